"""SGLang's hierarchical cache on a CPU, whose events and copies it has for other devices alone."""

from typing import Any


class _Event:
    """Of a stream whose work is done at once."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


def _copy(
    *, src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any,
    page_size: int,
) -> None:  # fmt: skip
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()].view(-1, *target.shape[1:])


def load() -> None:
    import torch

    torch.cpu.Event = _Event
    torch.cpu.Stream.wait_event = lambda *_: None
    from sglang.srt.mem_cache.pool_host import base, common, mha

    allocate = base.HostKVCache._allocate_host_buffer

    def unpinned(pool: Any) -> None:
        pool.pin_memory = False
        allocate(pool)

    base.HostKVCache._allocate_host_buffer = unpinned
    common._cuda_host_register = common._cuda_host_unregister = lambda *_: None
    mha.transfer_kv_direct = _copy
