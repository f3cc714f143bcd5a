"""The contract between an algorithm and the engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.config import HiSparseConfig
from hisparse.options import from_options
from hisparse.registry import Registry
from hisparse.types import IndexerInputs, KVSpec, Selection, SelectionScope

#: The owner of one entry of a representation.
RepresentationOwner = Literal["page", "request", "layer"]

#: What a representation is computed from.
RepresentationSource = Literal["kv", "model"]

#: Where a representation is stored.
RepresentationMemory = Literal["device", "host"]


@dataclass(frozen=True)
class Representation:
    """A tensor that an algorithm keeps in every layer; the engine allocates it.

    Attributes:
        shape: shape of one entry.
        dtype: dtype of the stored values.
        per: the owner of an entry. "page": each host page, ``[L, host pages, *shape]``. Requests
            with a common prefix share these entries, so an entry may depend only on the tokens of
            its page. "request": each request slot, ``[L, request slots, *shape]``, zeroed when a
            request begins. "layer": the layer, ``[L, *shape]``, constants of the model.
        saved: whether a saved context includes the tensor; otherwise it is zero after loading.
        memory: where the tensor lies. "host" suits pages of which a step reads few entries. It is
            page-locked on a machine with a GPU, which reads and writes it over the link, and counts
            as ``host_memory``.
        source: what an entry is computed from. "kv": K, V and queries. "model": what the model's
            own indexer computes for each token; stores and prefill servers pass these entries on,
            because K and V cannot rebuild them.

    Raises:
        ValueError: ``memory`` is "host" and the owner is not a page.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    per: RepresentationOwner = "page"
    saved: bool = True
    memory: RepresentationMemory = "device"
    source: RepresentationSource = "kv"

    def __post_init__(self) -> None:
        if self.memory == "host" and self.per != "page":
            raise ValueError(f"memory: got 'host' for each {self.per}, expected it per 'page' only")

    @property
    def num_bytes(self) -> int:
        """Bytes of one entry in one layer."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def layers(self, kv: KVSpec) -> tuple[int, ...]:
        """The layers of a model that have entries."""
        return kv.selecting_layers if self.source == "model" else kv.full_layers


def entry_bytes(
    kinds: Mapping[str, Representation],
    per: RepresentationOwner,
    memory: RepresentationMemory = "device",
    kv: KVSpec | None = None,
) -> int:
    """Bytes of all entries of one owner in one memory, in one layer or all those of ``kv``."""
    own = [x for x in kinds.values() if (x.per, x.memory) == (per, memory)]
    return sum(x.num_bytes * (1 if kv is None else len(x.layers(kv))) for x in own)


class BaseSparseAlgorithm(ABC):
    """Chooses the pages that a decode step attends over.

    Subclasses are frozen dataclasses: their fields are their options. They hold no state except in
    representations. The methods are pure tensor functions without host syncs or loops over
    requests. The class attributes declare what an algorithm supports; the configuration is checked
    against them.
    """

    #: Supported selection scopes, best first.
    scopes: ClassVar[tuple[SelectionScope, ...]] = ("kv_head", "layer", "query_head")
    #: Supported page sizes; None: any.
    page_sizes: ClassVar[tuple[int, ...] | None] = None
    #: Whether the number of selected pages varies with the query, up to ``device_buffer_size``;
    #: otherwise it is fixed by ``budget``. Contexts within the budget are attended densely.
    variable_lengths: ClassVar[bool] = False
    #: The kind of the model's own indexer that the algorithm scores with, such as "dsa": steps then
    #: have ``indexer``. "": none.
    indexer: ClassVar[str] = ""
    #: Whether a full tail page is ranked with the other pages. A selection then holds up to
    #: ``budget / S`` pages, and a full tail page is attended only if the selection holds fewer.
    ranks_tail: ClassVar[bool] = False
    #: Version of what the options do not say: formulas and constants of the entries of pages and of
    #: :meth:`select_prefill`. A store keeps what depends on them only with one. Not inherited.
    store_version: ClassVar[int | None] = None
    #: Whether a CPU may record the kernel calls of a layer, :meth:`store` too, once and make them
    #: again in later steps of the same shapes, without this class. So nothing but tensors that
    #: kernels read may decide: no values in Python, no state, no random numbers. Not inherited.
    recordable: ClassVar[bool] = False
    #: The most kernels that a selecting layer launches in a CUDA graph, attention included, and a
    #: launch that appends: where :meth:`appends` says so, there are less by that one.
    #: ``hisparse plan`` estimates times with it. The default is that of ``summarize`` and ``score``
    #: of one operator or two.
    captured_launches: ClassVar[int] = 11
    #: Operations that score pages and that store a full page's representation, if ``hisparse plan``
    #: knows the times of their kernels (``hisparse/plan/kernel_costs.json``); else it counts bytes.
    kernels: ClassVar[tuple[str, ...]] = ()
    #: For the same estimate, where entries lie in host memory: extra launches, and the pages whose
    #: entries are read for each attended page.
    host_launches: ClassVar[int] = 0
    host_candidates: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        cls.store_version = vars(cls).get("store_version")
        cls.recordable = vars(cls).get("recordable", False)

    @classmethod
    def limits(cls) -> list[str]:
        """What a user has to know before choosing the algorithm, one line each."""
        found = []
        if cls.variable_lengths:
            found.append("keeps as many pages as a query needs, up to device_buffer_size")
        if cls.page_sizes is not None:
            found.append(f"works with page_size {' or '.join(map(str, cls.page_sizes))} only")
        if cls.indexer:
            found.append("works with models that have an indexer only")
        return found

    @property
    def reads_host_keys(self) -> bool:
        """Whether the algorithm reads keys in host memory, which only a CPU can."""
        return False

    def appends(self, policy: SelectionPolicy) -> bool:
        """Whether the kernel that scores writes a layer's new tokens to their pages as well.

        :meth:`DecodeStep.tail_pages` then hands them out if it is asked for them, and
        :meth:`retrieve_topk` has to pass both to :func:`hisparse.kernels.sketch_score`. Tokens that
        nobody asks for are appended before anything else reads the tail pages.

        Args:
            policy: shapes of the model and the rules of selections.
        """
        return False

    @property
    def query_window(self) -> int:
        """Queries at the prompt's end that the algorithm needs; no prefix cache may skip them."""
        return 0

    def attended_tokens(self, budget: int, row_tokens: int) -> int:
        """The most tokens that a sparse step attends in a row, tail page included.

        Args:
            budget: the setting.
            row_tokens: tokens that the row's device pages hold at least.
        """
        return row_tokens if self.variable_lengths else budget

    def captured_bytes(self, policy: SelectionPolicy, num_pages: int) -> int:
        """Device memory for intermediates of :meth:`retrieve_topk` beside its scores, in bytes.

        A CUDA graph keeps them for the longest sequence, whatever requests it serves; all layers
        share them.

        Args:
            policy: shapes of the model and the rules of selections.
            num_pages: pages of the longest sequence.

        Returns:
            bytes for one request of a captured step.
        """
        return 0

    def prefill_choices(self, policy: SelectionPolicy) -> int:
        """The most positions that :meth:`select_prefill` returns for a query; 0: it returns None.

        Args:
            policy: shapes of the model and the rules of selections.
        """
        return 0

    @abstractmethod
    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        """The tensors that the algorithm keeps, by name."""

    def initialize(self, representations: Mapping[str, Tensor], policy: SelectionPolicy) -> None:
        """Write constants, once, before the first request; all representations are zero.

        Args:
            representations: name to tensor; :class:`Representation` gives shapes and dtypes.
            policy: shapes of the model and the rules of selections.

        Raises:
            ConfigError: a constant is unavailable, for example a file that an option names.
        """
        return

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        """Store the representations of complete pages; without an override there are none.

        Args:
            keys: ``[P, S, Hkv, D]`` in the model's dtype.
            layer_id: layer number.
            host_pages: ``[P]``, int32 in prefill and int64 in decode, the entries to write in
                ``step.representations``; the padding page 0 may occur more than once.
            step: the step.
        """
        return

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        """Prefill: store the representations of a chunk; unless overridden, by :meth:`store`.

        Args:
            keys: ``[P, S, Hkv, D]``, model's dtype, of pages that this chunk completed; P may be 0.
            queries: ``[T, Hq, D]``, model's dtype, before the softmax scale.
            layer_id: layer number, counted from the first layer of this rank.
            step: the chunk.
        """
        self.store(keys, layer_id, step.host_pages, step)

    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: DecodeStep
    ) -> None:
        """Decode: store the representations of the tail pages that this step filled.

        Unless overridden, by :meth:`store`.

        Args:
            keys: ``[B, S, Hkv, D]``, model's dtype, of each request's full tail page. On a GPU the
                entries of requests without one are uninitialised.
            layer_id: layer number.
            host_pages: ``[B] int64``, host page of each tail page. A request without a full tail
                page has the padding page 0, so that one write serves all requests.
            step: the step.
        """
        self.store(keys, layer_id, host_pages, step)

    def select_prefill(self, layer_id: int, step: PrefillStep) -> Tensor | None:
        """Choose the positions that each query of a chunk attends, for models trained that way.

        Args:
            layer_id: layer number.
            step: the chunk; its own representations are already stored.

        Returns:
            positions ``[T, K]`` or, for each KV head, ``[T, Hkv, K]``, int32, unique, none after
            the query, padded with -1; those of a query are at most :meth:`prefill_choices`. None:
            every query attends all earlier positions, as in nearly all models.
        """
        return None

    def update_indexer(
        self, inputs: IndexerInputs, layer_id: int, step: DecodeStep
    ) -> IndexerInputs:
        """Decode, in every step: store what the model's own indexer gives for the new tokens.

        Args:
            inputs: of the B new tokens, in any attention mode.
            layer_id: layer number.
            step: the step, without ``indexer``.

        Returns:
            ``step.indexer`` of :meth:`retrieve_topk`.
        """
        return inputs

    @abstractmethod
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        """Choose at most ``step.policy.max_pages`` of each request's full pages.

        Every selection includes the sinks and the recent pages. The engine does not call this
        method when all requests are within the budget.

        Args:
            queries: ``[B, Hq, D]``, model's dtype, before the softmax scale. Ranks that share the
                latents of an MLA model see the heads of all ranks.
            layer_id: layer number.
            step: the step.

        Returns:
            pages ``[B, H, K] int32``, ascending, padded with -1, and lengths ``[B, H] int32``.
        """


A = TypeVar("A", bound=BaseSparseAlgorithm)

ALGORITHMS: Registry[BaseSparseAlgorithm] = Registry(
    "algorithm", package="hisparse.algorithms", entry_point_group="hisparse.algorithms"
)


def register_algorithm(name: str) -> Callable[[type[A]], type[A]]:
    """Class decorator: register an algorithm under ``name``; a taken name is an error."""

    def decorate(cls: type[A]) -> type[A]:
        ALGORITHMS.register(name)(cls)
        return cls

    return decorate


def build_algorithm(config: HiSparseConfig) -> BaseSparseAlgorithm:
    """The algorithm that ``config`` names, with the options of ``algorithm_config``.

    Raises:
        ConfigError: the algorithm is unknown, or an option is invalid.
    """
    name = config.algorithm
    return from_options(ALGORITHMS.get(name), name, "algorithm_config", config.algorithm_config)
