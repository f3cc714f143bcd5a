"""The KV cache: host pool, device pages, and the transfers between them."""

from hisparse.cache.counters import Counters
from hisparse.cache.device_pool import PoolSizes
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.manager import SparseKVCacheManager
from hisparse.cache.staging import Tile
from hisparse.cache.swap_in import check_selection

__all__ = [
    "Counters",
    "HostKVPool",
    "PoolSizes",
    "SparseKVCacheManager",
    "Tile",
    "check_selection",
]
