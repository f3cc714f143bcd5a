"""The namespace of a server's pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hisparse.cache.page_format import PageFormat
from hisparse.engine.fingerprint import fingerprint
from hisparse.engine.page_namespace import page_namespace
from hisparse.sglang.storage.ranks import LinkerRanks
from hisparse.storage import Namespace

__all__ = ["make_namespace", "model_fingerprint", "swap_namespace"]


def model_fingerprint(session: Any) -> str:
    """The fingerprint of this rank's model with the weights that it has now."""
    # Buffers follow from the configuration, and SGLang extends some while it serves.
    return fingerprint(session.model_settings, session.model.named_parameters())


def make_namespace(session: Any, page_format: PageFormat, ranks: LinkerRanks) -> Namespace:
    """The namespace of this rank's pages; see :func:`page_namespace`.

    Args:
        session: this rank's session, with the fingerprint of its model.
        page_format: bytes of a record.
        ranks: the ranks of the server.
    """
    rank, num_ranks = ranks.key
    return page_namespace(
        ranks.gather(session.fingerprint),
        session.algorithm,
        session.config,
        page_format,
        rank=rank,
        num_ranks=num_ranks,
    )


def swap_namespace(pages: Namespace) -> Namespace:
    """The namespace of retracted requests' pages; the names in it are those of one server.

    Args:
        pages: the namespace of pages that servers share.
    """
    return replace(pages, model="retracted requests")
