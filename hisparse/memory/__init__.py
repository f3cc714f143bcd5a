"""How much fits into host and device memory."""
