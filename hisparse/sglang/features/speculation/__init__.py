"""Speculative decoding: SGLang drafts chains of tokens, which one forward verifies."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.engine.build import EngineSetup
from hisparse.errors import ConfigError
from hisparse.sglang.features.base import (
    ATTENTION_REPLICAS,
    EXTENSION,
    GPU,
    PIPELINE,
    RANKS,
    REPLICAS,
    SPECULATION,
    STORAGE,
    Demand,
    Feature,
    Flag,
    Option,
    Start,
    flag_set,
)
from hisparse.sglang.features.speculation import draft_model
from hisparse.sglang.features.speculation.chains import DraftMoves, Drafts
from hisparse.sglang.install import DRAFT_BACKEND
from hisparse.sglang.models import ModelShape
from hisparse.sglang.session import ServerSession, current_state

logger = logging.getLogger("hisparse")

_NGRAM = "NGRAM"

#: Algorithms with a draft model. SGLang turns NEXTN into EAGLE.
_DRAFT_MODELS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")

#: Values of ``--speculative-algorithm``.
_ALGORITHMS = (_NGRAM, *_DRAFT_MODELS)

#: Tokens that a draft model drafts, unless the command line says.
_STEPS = 3


def _draft_model(start: Start) -> str:
    return SPECULATION.given(start) if start.args.speculative_algorithm in _DRAFT_MODELS else ""


def _draft_dtype(start: Start) -> str:
    dtype = start.args.speculative_draft_kv_cache_dtype
    return "" if dtype in (None, "auto") else f"--speculative-draft-kv-cache-dtype {dtype}"


DRAFT_MODEL = Option(given=_draft_model, expected="no --speculative-algorithm")

#: Options of draft models that have not been tried.
UNTRIED_DRAFTS = (
    flag_set("--enable-mixed-chunk", "enable_mixed_chunk"),
    Option(given=_draft_dtype, expected="it unset"),
    flag_set("--enable-multi-layer-eagle", "enable_multi_layer_eagle"),
    flag_set("--speculative-adaptive", "speculative_adaptive"),
    flag_set("--speculative-use-rejection-sampling", "speculative_use_rejection_sampling"),
    flag_set("--speculative-token-map", "speculative_token_map"),
    flag_set("--enable-lora", "enable_lora"),
)


def draft_tokens(server_args: Any) -> int:
    """Tokens that one forward verifies for a request; 0: there is no speculation."""
    if server_args.speculative_algorithm not in _ALGORITHMS:
        return 0
    return int(server_args.speculative_num_draft_tokens or 0)


def _make_chains(server_args: Any) -> None:
    """Let SGLang draft chains unless it is told otherwise; its default of trees needs page size 1.

    Args:
        server_args: SGLang's ``ServerArgs``, not yet resolved; the shape of the drafts and the
            attention backend of a draft model are written.

    Raises:
        ConfigError: the command line asks a draft model for trees, or for another backend.
    """
    algorithm = server_args.speculative_algorithm
    if algorithm not in _ALGORITHMS:
        return
    server_args.disable_cuda_graph = True
    if algorithm != _NGRAM:
        _make_model_chains(server_args)
        return
    if server_args.speculative_ngram_max_bfs_breadth != 1:
        logger.info("hisparse: --speculative-ngram-max-bfs-breadth is set to 1: drafts are chains")
    server_args.speculative_ngram_max_bfs_breadth = 1


def _make_model_chains(server_args: Any) -> None:
    """:func:`_make_chains` of a draft model."""
    branches = server_args.speculative_eagle_topk
    if branches not in (None, 1):
        raise ConfigError(
            f"--speculative-eagle-topk is {branches}; expected 1: hisparse verifies chains of a "
            "draft model, and no trees"
        )
    backend = server_args.speculative_draft_attention_backend
    if backend not in (None, DRAFT_BACKEND):
        raise ConfigError(
            f"--speculative-draft-attention-backend is {backend}; expected it unset: with hisparse "
            f"a draft model uses {DRAFT_BACKEND}"
        )
    server_args.speculative_draft_attention_backend = DRAFT_BACKEND
    given = server_args.speculative_num_draft_tokens
    steps = server_args.speculative_num_steps or (given - 1 if given else _STEPS)
    if given not in (None, steps + 1):
        logger.info(
            "hisparse: --speculative-num-draft-tokens is set to %d: a chain of "
            "--speculative-num-steps %d, and the token before it",
            steps + 1,
            steps,
        )
    server_args.speculative_num_steps = steps
    server_args.speculative_eagle_topk = 1
    server_args.speculative_num_draft_tokens = steps + 1


def check_rollback(setup: EngineSetup, speculation: str) -> None:
    """Check that all an algorithm writes while it decodes belongs to pages.

    Args:
        setup: the engine's.
        speculation: value of ``--speculative-algorithm``.

    Raises:
        ConfigError: it keeps state of requests, which would keep what rejected drafts did to it.
    """
    name = setup.resolved.config.algorithm
    kinds = setup.algorithm.representations(setup.policy).values()
    if any(kind.per == "request" for kind in kinds):
        raise ConfigError(
            f"--speculative-algorithm is {speculation}, but algorithm {name!r} "
            "keeps state of requests; expected one that keeps state only of pages, such as sketch"
        )


def around_run_eagle_verify(original: Callable[..., Any], batch: Any, **options: Any) -> Any:
    """Report how many tokens of a draft model's chains are accepted. None of them moves."""
    drafts = current_state(Drafts)
    result = original(batch, **options)
    if drafts is not None:
        drafts.accept_lengths(result.accept_lens)
    return result


class Speculation(Feature):
    """Drafts are verified as a batch of their own, and rejected ones are undone."""

    name = "speculation"
    serves = (SPECULATION,)
    excludes = {
        SPECULATION: (GPU, ATTENTION_REPLICAS, REPLICAS, RANKS, PIPELINE, EXTENSION, STORAGE),
        DRAFT_MODEL: UNTRIED_DRAFTS,
    }
    flags = (Flag("speculative_algorithm", ("NONE", *_ALGORITHMS), "--speculative-algorithm"),)
    hooks = {
        "sglang.srt.speculative.eagle_worker_common.run_eagle_verify": around_run_eagle_verify,
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head": (
            draft_model.around_init_lm_head
        ),
        "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend": (
            draft_model.around_create_decode_backend
        ),
        "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend": (
            draft_model.around_create_draft_extend_backend
        ),
    }

    def prepare(self, start: Start) -> Mapping[str, Any]:
        """Let SGLang draft chains."""
        _make_chains(start.args)
        return {}

    def check(self, server_args: Any, config: HiSparseConfig) -> None:
        """Require that a draft model is named; SGLang itself names that of DeepSeek's models.

        Raises:
            ConfigError: it is not.
        """
        from sglang.srt.arg_groups.overrides import resolved_view

        view = resolved_view(server_args)
        algorithm = view.speculative_algorithm
        if algorithm in _DRAFT_MODELS and view.speculative_draft_model_path is None:
            raise ConfigError(
                f"--speculative-algorithm is {algorithm} without --speculative-draft-model-path; "
                "expected the folder of a draft model, or the model's own for its MTP layers"
            )

    def register(self) -> None:
        """Register the attention backend of draft models."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend(DRAFT_BACKEND)(draft_model.make_draft_backend)

    def demand(self, configurator: Any, shape: ModelShape) -> Demand:
        """Drafts beyond the end of a context, and the pool of a draft model."""
        return Demand(
            context_tokens=draft_tokens(configurator.server_args),
            device_token_bytes=draft_model.draft_token_bytes(configurator),
            sglang_token_bytes=draft_model.sglang_draft_bytes(configurator, shape.spec),
        )

    def sized(self, session: ServerSession, server_args: Any) -> None:
        """Require an algorithm whose state can be undone."""
        # SGLang may have switched drafts off while it resolved its arguments.
        if server_args.speculative_algorithm is not None:
            check_rollback(session.setup, server_args.speculative_algorithm)

    def pool_mixin(self, kind: str) -> type | None:
        """Accepted drafts of n-grams are reported as moves between slots."""
        return DraftMoves

    def built(self, session: ServerSession, model_runner: Any) -> None:
        """Keep the drafts of a forward until they are accepted or rejected."""
        session.add(Drafts(session))
        if model_runner.device == "cpu":
            from sglang.srt.mem_cache import allocation

            # SGLang would find the last slot of each request, for drafts, with Triton.
            allocation.get_last_loc_triton = allocation.get_last_loc_torch

    def batch(self, session: ServerSession, forward_batch: Any) -> Any:
        """The drafts of a forward that verifies them."""
        drafts = session.get(Drafts)
        assert drafts is not None, "added with the backend"
        return drafts.begin(forward_batch)


FEATURE = Speculation()
