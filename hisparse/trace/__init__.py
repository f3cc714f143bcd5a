"""Traces of what a server selected: reading and replaying them."""

from hisparse.trace.file import SelectionTrace
from hisparse.trace.replay import adjacent_overlap, replay_hits

__all__ = ["SelectionTrace", "adjacent_overlap", "replay_hits"]
