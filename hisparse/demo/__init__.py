"""``python -m hisparse.demo``: a question about a long document, answered dense and sparse."""
