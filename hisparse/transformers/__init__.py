"""hisparse under Hugging Face's transformers: the coordinator of the server as a cache.

::

    cache = enable(model, {"budget": 256}, max_length=8192)
    model.generate(**inputs, past_key_values=cache)
"""

from hisparse.transformers.cache import HiSparseCache
from hisparse.transformers.activation import disable, enable

__all__ = ["HiSparseCache", "disable", "enable"]
