"""How many requests fit a machine."""
