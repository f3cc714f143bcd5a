"""The rank of a process in its server, and values that the ranks agree on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from hisparse.cache.allocate import NodeRanks
from hisparse.cache.formats import KVFormat

T = TypeVar("T")


def attention_replicas() -> int:
    """Parts into which the ranks of a model divide its requests (``--attn-dp-size``)."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_dp_size)


def pipeline_size() -> int:
    """Ranks that each have some of a model's layers (``--pp-size``)."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().pp_size)


def num_replicas() -> int:
    """Replicas of this process's server (``--dp-size``). Each has ranks of its own."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.num_dp_ranks // parallel.attn_dp_size)


def _node_size(num_nodes: int) -> int:
    """Ranks of a replica on each node: SGLang numbers them node by node."""
    from sglang.srt.distributed.parallel_state import get_world_group

    world_size: int = get_world_group().world_size
    return max(1, world_size // max(1, num_nodes))


def latent_ranks(num_nodes: int) -> NodeRanks:
    """The ranks of this node that compute the same latents, those of one model's heads.

    Groups of attention data parallelism serve other requests, and pipeline stages other layers.
    """
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    group, size = get_attn_tp_group(), _node_size(num_nodes)
    node = group.rank // size
    members = [index for index, rank in enumerate(group.ranks) if rank // size == node]

    def gather(text: str) -> list[str]:
        texts = _gather(group.cpu_group, text)
        return [texts[index] for index in members]

    return NodeRanks(rank=members.index(group.rank_in_group), size=len(members), gather=gather)


def layer_share(num_layers: int, num_nodes: int) -> tuple[int, int]:
    """Number of layers of this rank, and of all ranks of its node; they divide host memory.

    Args:
        num_layers: layers that attend on this rank.
        num_nodes: nodes of the server. Replicas have one node.
    """
    from sglang.srt.distributed.parallel_state import get_world_group

    size = _node_size(num_nodes)
    first = get_world_group().rank_in_group // size * size
    of_node = sum(layers_of_ranks(num_layers)[first : first + size])
    return num_layers, of_node * num_replicas()


def layers_of_ranks(num_layers: int) -> list[int]:
    """The layers of each rank of this replica, of which this one has ``num_layers``."""
    return _gather(_world(), num_layers)


def least_of_ranks(*numbers: int) -> list[int]:
    """The least of each number over the ranks of this replica, so that all compute the same."""
    return _least(_world(), numbers)


def _world() -> Any:
    """PyTorch's group of the ranks of this replica; None: there is one."""
    from sglang.srt.distributed.parallel_state import get_world_group

    world = get_world_group()
    return world.cpu_group if world.world_size > 1 else None


def _least(group: Any, numbers: Sequence[int]) -> list[int]:
    if group is None:
        return list(numbers)
    least = torch.tensor(numbers, dtype=torch.int64)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    return cast(list[int], least.tolist())


def _gather(group: Any, value: T) -> list[T]:
    if group is None:
        return [value]
    values = [value] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def gather_queries(stored: KVFormat) -> Callable[[Tensor], Tensor] | None:
    """Joins the query heads of the ranks: ``[B, Hq, D]`` -> ``[B, ranks * Hq, D]``.

    None if no other rank has the same K and V, ``stored`` so.
    """
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    group = get_attn_tp_group()
    if stored.num_shards(group.world_size) == group.world_size:
        return None
    return lambda queries: cast(Tensor, group.all_gather(queries.contiguous(), dim=1))


@dataclass(frozen=True, kw_only=True)
class LinkerRanks:
    """The ranks that divide a model's heads.

    Attributes:
        rank: of this process.
        size: number of ranks.
        key: rank and number of ranks in the keys of pages: (0, 1) if all ranks have the same K and
            V (MLA), so that rank 0 writes for all.
        group: of PyTorch; None: this is the only rank.
    """

    rank: int
    size: int
    key: tuple[int, int]
    group: Any

    @classmethod
    def of(cls, params: Any, stored: KVFormat) -> Self:
        """The ranks of SGLang's ``CacheInitParams``, whose K and V are ``stored`` so."""
        group = params.attn_tp_cache_group or params.tp_cache_group
        if group is None or not torch.distributed.is_initialized():
            return cls(rank=0, size=1, key=(0, 1), group=None)
        size = torch.distributed.get_world_size(group=group)
        rank = torch.distributed.get_rank(group=group)
        shards = stored.num_shards(size)
        key = (rank % shards, shards)
        return cls(rank=rank, size=size, key=key, group=group if size > 1 else None)

    @property
    def writes(self) -> bool:
        """Whether this rank writes to the store."""
        return self.key[0] == self.rank

    def least_of(self, mine: int) -> int:
        """The smallest value of all ranks."""
        return _least(self.group, [mine])[0]

    def all_of(self, mine: bool) -> bool:
        """Whether the value is true on every rank."""
        return bool(self.least_of(int(mine)))

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, in their order."""
        return _gather(self.group, text)
