"""The checks of ``hisparse doctor``: what was found, and what to do about it."""

from hisparse.doctor.checks import Finding, Status, run_checks

__all__ = ["Finding", "Status", "run_checks"]
