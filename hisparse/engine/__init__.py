"""What happens in a forward pass: order, decode, prefill, and what they share."""
