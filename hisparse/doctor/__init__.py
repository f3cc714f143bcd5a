"""The checks of ``hisparse doctor``: what was found, and what to do about it."""

from hisparse.doctor.checks import Check, Status, run_checks

__all__ = ["Check", "Status", "run_checks"]
