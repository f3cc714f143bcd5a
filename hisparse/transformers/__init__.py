"""A Hugging Face transformers cache that runs the server's engine, and contexts on a disk.

::

    cache = enable(model, {"budget": 256}, max_length=8192)
    model.generate(**inputs, past_key_values=cache)

    with DB("contexts", model, {"budget": 256}, max_length=8192) as db:
        session, rest = db.create_session(inputs.input_ids[0])
        out = model.generate(**inputs, past_key_values=session.cache)
        session.store(out[0])
"""

from hisparse.transformers.attention import disable, enable
from hisparse.transformers.cache import HiSparseCache
from hisparse.transformers.db import DB
from hisparse.transformers.session import Session

__all__ = ["DB", "HiSparseCache", "Session", "disable", "enable"]
