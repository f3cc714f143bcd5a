"""Where the pages are: host pool, device pages, and what moves between them."""

from hisparse.cache.device_pool import DeviceBuffer
from hisparse.cache.host_pool import HOST_LAYOUTS, HostKVPool
from hisparse.cache.manager import SparseKVCacheManager
from hisparse.cache.staging import Tile
from hisparse.cache.swap import Overlap, SwapIn

__all__ = [
    "HOST_LAYOUTS",
    "DeviceBuffer",
    "HostKVPool",
    "Overlap",
    "SparseKVCacheManager",
    "SwapIn",
    "Tile",
]
