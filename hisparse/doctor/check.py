"""The result of one check of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of a check.

    Attributes:
        name: what was checked.
        status: "error" if hisparse cannot serve, "warning" if a part of it does not work.
        message: what was found, one line.
        remedy: what to do, one line; "" if there is nothing to do.
    """

    name: str
    status: Status
    message: str
    remedy: str = ""
