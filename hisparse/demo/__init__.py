"""``python -m hisparse.demo``: one long document, answered densely and then by hisparse."""
