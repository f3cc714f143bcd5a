"""The KV cache: host pool, device pages, and the transfers between them."""

from hisparse.cache.counters import Counters
from hisparse.cache.device_pool import DevicePool
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.manager import SparseKVCacheManager
from hisparse.cache.residency import RowCapacities
from hisparse.cache.staging import Tile
from hisparse.cache.swap_in import check_selection

__all__ = [
    "Counters",
    "DevicePool",
    "HostKVPool",
    "RowCapacities",
    "SparseKVCacheManager",
    "Tile",
    "check_selection",
]
