"""Where the pages are: host pool, device pages, and what moves between them."""

from hisparse.cache.device_buffer import DeviceBuffer
from hisparse.cache.host_pool import HOST_LAYOUTS, HostKVPool
from hisparse.cache.manager import SparseKVCacheManager

__all__ = ["HOST_LAYOUTS", "DeviceBuffer", "HostKVPool", "SparseKVCacheManager"]
