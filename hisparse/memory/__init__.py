"""Divides host and device memory."""
