"""Pages of KV below host memory: a folder of files that several processes share.

A page is written once under a key that names its tokens and all tokens before them, is never
changed, and is read back whole. A store holds bytes; ``fingerprint.py`` says which models may
share them. docs/storage.md has how to operate a store.

::

    namespace = Namespace(model="…", kv_dtype="bfloat16", page_size=16, rank=0, num_ranks=1,
                          page_bytes=196608)
    with FileStore("/var/cache/hisparse", 500 << 30) as store:
        store.put(namespace, key, page)               # page: a buffer of 196,608 bytes
        found = store.find(namespace, keys)           # the first `found` keys are stored
        store.get(namespace, keys[:found], buffers)   # buffers: one of 196,608 bytes a key
"""

from hisparse.storage.namespace import Namespace, page_keys
from hisparse.storage.report import StoreReport
from hisparse.storage.store import FileStore

__all__ = [
    "FileStore",
    "Namespace",
    "StoreReport",
    "page_keys",
]
