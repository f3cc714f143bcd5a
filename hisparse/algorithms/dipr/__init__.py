"""DIPR, AlayaDB's dynamic inner product range query. https://arxiv.org/abs/2504.10326"""

from hisparse.algorithms.dipr.algorithm import DIPR

__all__ = ["DIPR"]
