"""What one look at the machine found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Check", "Status"]

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        status: "error": hisparse does not serve so; "warning": not all that it could do works.
        message: what was found, one line.
        remedy: what to do, one line; "" where there is nothing to do.
    """

    name: str
    status: Status
    message: str
    remedy: str = ""
