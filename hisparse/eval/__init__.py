"""Quality of sparse attention on a real model, measured through the code that serves."""

from hisparse.eval.documents import TASKS, Document, Item, make_document
from hisparse.eval.evaluation import Evaluation
from hisparse.eval.method import Method, parse_methods
from hisparse.eval.results import make_cells, make_summary

__all__ = [
    "TASKS", "Document", "Evaluation", "Item", "Method", "make_cells", "make_document",
    "make_summary", "parse_methods",
]  # fmt: skip
