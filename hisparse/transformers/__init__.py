"""A Hugging Face transformers cache that runs the server's engine.

::

    cache = enable(model, {"budget": 256}, max_length=8192)
    model.generate(**inputs, past_key_values=cache)
"""

from hisparse.transformers.activation import disable, enable
from hisparse.transformers.cache import HiSparseCache

__all__ = ["HiSparseCache", "disable", "enable"]
