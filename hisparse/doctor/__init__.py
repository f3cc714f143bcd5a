"""The checks of ``hisparse doctor``: what was found, and what to do about it."""

from hisparse.doctor.checks import Finding, run_checks

__all__ = ["Finding", "run_checks"]
