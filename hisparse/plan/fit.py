"""How many requests fit a server, dense and with hisparse, by its sizing formula."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from hisparse.algorithms import entry_bytes
from hisparse.cache.formats import format_of
from hisparse.config import HiSparseConfig
from hisparse.engine.build import choose_selection, resolve
from hisparse.engine.capabilities import check_dense_layers, stored_spec
from hisparse.errors import CapacityError, ConfigError
from hisparse.memory.costs import Resources
from hisparse.memory.sizing import Sizing, SizingLimit, size
from hisparse.types import KVSpec
from hisparse.units import MemorySize, format_bytes, resolve_memory

_MIB = 2**20
#: ``--chunked-prefill-size``, as SGLang sets it on a GPU of 80 GB.
_CHUNK_TOKENS = 8192
#: States that SGLang allocates for each running request of a hybrid: three, and two in which it
#: takes those for the radix cache (``_calculate_mamba_ratio``).
STATES = 5


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The memory of a server.

    Attributes:
        device_bytes: memory of one GPU.
        host_bytes: free memory of the node.
        tp: number of GPUs that divide the heads of a layer, all on that node.
        weight_bytes: size of the model's weights, summed over the ranks.
        mem_fraction: fraction of a GPU for weights and KV cache (``--mem-fraction-static``); the
            rest is for activations and CUDA graphs.
        state_bytes: device memory of one state of a hybrid's other layers, on one GPU; 0: there are
            no such layers.
    """

    device_bytes: int
    host_bytes: int
    tp: int
    weight_bytes: int
    mem_fraction: float
    state_bytes: int = 0

    @property
    def rank_weight_bytes(self) -> int:
        """Weights of a GPU."""
        return -(-self.weight_bytes // self.tp)

    @property
    def cache_bytes(self) -> int:
        """Bytes that one GPU has for its KV cache: what SGLang profiles."""
        return int(self.device_bytes * self.mem_fraction) - self.rank_weight_bytes

    def cache_bytes_beside(self, requests: int) -> int:
        """:attr:`cache_bytes` without the states of so many requests, and SGLang's spare one."""
        return self.cache_bytes - (requests * STATES + 1) * self.state_bytes


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """How many requests of one length fit a server.

    Attributes:
        config: the settings.
        host_memory: the setting ``host_memory`` to start with.
        context: tokens of a request, prompt and answer.
        spec: the model's shape on one rank.
        sizing: the rank's sizing for ``max_requests``, as the server's; None if not even one
            request with ``device_buffer_size`` tokens on the device fits.
        max_requests: requests at once with hisparse.
        dense_max_requests: requests at once with the whole KV cache on the device.
        limit: the memory that is too small for one more request.
        states_bytes: device memory of a request's states in layers that do not attend.
        message: why no request fits; "" if one does.
    """

    config: HiSparseConfig
    host_memory: MemorySize
    context: int
    spec: KVSpec
    sizing: Sizing | None
    max_requests: int
    dense_max_requests: int
    limit: SizingLimit
    states_bytes: int = 0
    message: str = ""

    @property
    def token_bytes(self) -> int:
        """K and V of a token on one GPU."""
        return self.spec.num_layers * format_of(self.spec).layer_token_bytes

    @property
    def host_bytes_per_request(self) -> int:
        """Host memory of a request: K, V and what the algorithm keeps there beside them."""
        return self._pages * self.spec.page_size * self.host_bytes_per_token

    @property
    def device_bytes_per_request(self) -> int:
        """Device memory of a running request.

        The sum of its smallest device buffer, tables, state, captured steps, representations, the
        GPU's page tables for its host memory, and a hybrid's states.
        """
        if self.sizing is None:
            return 0
        request = self.sizing.request
        row_pages = self.sizing.max_row_capacity // self.spec.page_size
        row = request.fixed_bytes(1, row_pages) - request.fixed_bytes(0, row_pages)
        return row + self._pages * request.page_bytes + self.states_bytes

    @property
    def host_bytes_per_token(self) -> int:
        """Host memory of one token, all layers."""
        return 0 if self.sizing is None else self.sizing.request.kv_token_bytes

    @property
    def device_bytes_per_token(self) -> int:
        """Representations of one token, all layers, and a GPU's page tables for it, rounded up."""
        if self.sizing is None:
            return 0
        return -(-self.sizing.request.page_bytes // self.spec.page_size)

    @property
    def _pages(self) -> int:
        return -(-self.context // self.spec.page_size)


def fit(config: HiSparseConfig, spec: KVSpec, machine: Machine, context: int) -> Capacity:
    """The most requests of ``context`` tokens that a server with these settings runs at once.

    ``host_memory`` is lowered if representations of a larger host pool would displace requests.

    Raises:
        ConfigError: a setting does not fit the model or another setting, or the weights fill the
            device memory.
    """
    if machine.cache_bytes <= 0:
        raise ConfigError(
            f"--device-memory: got {format_bytes(machine.device_bytes)}, of which "
            f"{machine.mem_fraction:g} is for weights and KV cache, but the weights alone take "
            f"{format_bytes(machine.rank_weight_bytes)} a GPU; expected more memory, or a larger "
            "--tp"
        )
    spec, tokens = stored_spec(config, spec), _server_tokens(config, context)
    pool = resolve_memory(config.host_memory, machine.host_bytes, "host_memory") // _MIB
    check_dense_layers(config, spec)
    requests, sizing = 0, None
    limit: SizingLimit = "device_memory"
    try:
        rank = _Rank(config, spec, machine, context, pool)
        requests, sizing, limit, pool = _find_most(rank, config, tokens, pool)
        message = "" if requests else f"one request does not fit: {sizing.describe()}"
    except CapacityError as error:
        message = str(error)
        limit = "host_memory" if message.startswith("host_memory") else "device_memory"
    return Capacity(
        config=config,
        host_memory=f"{max(1, pool)}MiB",
        context=context,
        spec=spec,
        sizing=sizing,
        max_requests=requests,
        dense_max_requests=_dense_requests(config, spec, machine, tokens),
        limit=limit,
        states_bytes=STATES * machine.state_bytes,
        message=message,
    )


def _server_tokens(config: HiSparseConfig, tokens: int) -> int:
    """Tokens in whole pages of SGLang, which allocates these."""
    return -(-tokens // config.server_page_size) * config.server_page_size


def _dense_requests(config: HiSparseConfig, spec: KVSpec, machine: Machine, tokens: int) -> int:
    """Requests of ``tokens`` tokens that SGLang runs at once with its own KV cache.

    Index keys are counted as the algorithm keeps them.
    """
    request_bytes = format_of(spec).dense_token_bytes * tokens
    if spec.index_head_dim:
        algorithm, policy, _ = choose_selection(config, spec, spec.head_dim**-0.5)
        page_bytes = entry_bytes(algorithm.representations(policy), "page", kv=spec)
        request_bytes += page_bytes * tokens // spec.page_size
    device = machine.cache_bytes_beside(0)
    return max(0, device) // (request_bytes + STATES * machine.state_bytes)


class _Rank:
    """A rank, of which all of a server are equal; ``first`` is sized for one request."""

    def __init__(
        self, config: HiSparseConfig, spec: KVSpec, machine: Machine, context: int, pool_mib: int
    ) -> None:
        self._machine, self._device = machine, machine.cache_bytes
        if config.device_memory is not None:
            most = resolve_memory(config.device_memory, self._device, "device_memory")
            self._device = min(self._device, most)
        resources = Resources(
            host_bytes=pool_mib * _MIB // machine.tp,
            device_bytes=self._device_bytes(1),
            context_length=context,
            max_requests=1,
            device_type="cuda",
            node_ranks=machine.tp,
            chunk_tokens=_CHUNK_TOKENS,
        )
        self.first = resolve(config, spec, spec.head_dim**-0.5, resources).sizing

    def _device_bytes(self, requests: int) -> int:
        """Device memory that hisparse may take beside so many requests' states."""
        return min(self._device, self._machine.cache_bytes_beside(requests))

    def least_pool(self, tokens: int) -> int:
        """MiB of host memory for the K and V of tokens and the padding page, all ranks."""
        request = self.first.request
        need = (tokens + request.page_size) * request.kv_token_bytes
        return -(-need * self._machine.tp // _MIB)

    def sized(self, requests: int, pool_mib: int) -> Sizing:
        """The sizing for so many requests."""
        host_bytes = pool_mib * _MIB // self._machine.tp
        request = replace(self.first.request, max_requests=requests, host_bytes=host_bytes)
        return size(replace(request, device_bytes=self._device_bytes(requests)))

    def fits(self, requests: int, tokens: int, page: int, pool_mib: int) -> bool:
        """Whether so many requests and tokens fit, in whole pages of SGLang."""
        try:
            sizing = self.sized(requests, pool_mib)
        except CapacityError:
            return False
        return sizing.max_requests >= requests and sizing.kv_tokens // page * page >= tokens


def _find_most(
    rank: _Rank, config: HiSparseConfig, tokens: int, pool_mib: int
) -> tuple[int, Sizing, SizingLimit, int]:
    """Find the most requests, and then the largest host pool with which all of them still fit.

    Args:
        rank: a rank.
        tokens: tokens of one request, in whole pages of SGLang.
        pool_mib: MiB of host memory.

    Returns:
        The most requests, the rank's sizing, what stops one more, and MiB of host memory.
    """
    page = config.server_page_size

    def fits(requests: int, mib: int) -> bool:
        return rank.fits(requests, requests * tokens, page, mib)

    def possible(requests: int) -> bool:
        least = rank.least_pool(requests * tokens)
        return least <= pool_mib and fits(requests, least)

    if not fits(1, pool_mib):
        return 0, rank.first, rank.first.limit, pool_mib
    bound = pool_mib * _MIB // (rank.first.request.kv_token_bytes * tokens) + 2
    requests = max(1, largest(possible, 1, bound))
    limit: SizingLimit = "device_memory"
    if rank.least_pool((requests + 1) * tokens) > pool_mib:
        limit = "host_memory"
    least = rank.least_pool(requests * tokens)
    pool = largest(lambda mib: fits(requests, mib), least, pool_mib)
    return requests, rank.sized(requests, pool), limit, pool


def largest(holds: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number from ``least`` to ``most`` for which ``holds`` is true, by bisection.

    ``holds`` has to be true for ``least``, and false for all numbers above the result.
    """
    return least + bisect_left(range(least + 1, most + 1), True, key=lambda x: not holds(x))
