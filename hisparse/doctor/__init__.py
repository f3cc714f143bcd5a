"""The checks of ``hisparse doctor``: what was found, and what to do about it."""

from hisparse.doctor.check import Check, Status
from hisparse.doctor.run import run_checks

__all__ = ["Check", "Status", "run_checks"]
