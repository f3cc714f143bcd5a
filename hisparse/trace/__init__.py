"""Traces of what a server selected: reading and replaying them, and making some up."""

from hisparse.trace.reader import SelectionTrace
from hisparse.trace.replay import HitCurve, adjacent_overlap, lru_curve, policy_hits

__all__ = ["HitCurve", "SelectionTrace", "adjacent_overlap", "lru_curve", "policy_hits"]
