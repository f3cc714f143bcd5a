"""Latents in the model's dtype (MLA): the key of a token is its only tensor."""

from __future__ import annotations

from hisparse.cache.formats.base import LATENT_FORMATS
from hisparse.cache.formats.plain import Plain


@LATENT_FORMATS.register("auto")
class Latent(Plain):
    """The value is the first columns of the key."""

    shares_values = True
