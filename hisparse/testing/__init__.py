"""What algorithms are tested with."""

from hisparse.testing.simulator import Request, Simulator

__all__ = ["Request", "Simulator"]
