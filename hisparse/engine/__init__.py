"""The forward pass: its order, decode, prefill, and the state that they share."""
