"""Speculative decoding: SGLang's drafts as a batch."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.engine.build import EngineSetup
from hisparse.errors import ConfigError
from hisparse.sglang.requested import DRAFT_BACKEND

__all__ = [
    "ALGORITHMS",
    "DRAFT_MODELS",
    "accepted_drafts",
    "check_draft_model",
    "check_rollback",
    "draft_tokens",
    "keep_chains",
    "make_chains",
]

logger = logging.getLogger("hisparse")

_NGRAM = "NGRAM"

#: Algorithms with a draft model. SGLang turns NEXTN into EAGLE.
DRAFT_MODELS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")

#: Values of ``--speculative-algorithm``.
ALGORITHMS = (_NGRAM, *DRAFT_MODELS)

#: Tokens that a draft model drafts, unless the command line says.
_STEPS = 3

#: What SGLang fills up drafts of n-grams with, and a token that no model generates.
_FILLER, _NO_TOKEN = 0, -1


def draft_tokens(server_args: Any) -> int:
    """Tokens that one forward verifies for a request; 0: there is no speculation."""
    if server_args.speculative_algorithm not in ALGORITHMS:
        return 0
    return int(server_args.speculative_num_draft_tokens or 0)


def make_chains(server_args: Any) -> None:
    """Let SGLang draft chains unless it is told otherwise; its default of trees needs page size 1.

    Args:
        server_args: SGLang's ``ServerArgs``, not yet resolved; the shape of the drafts and the
            attention backend of a draft model are written.

    Raises:
        ConfigError: the command line asks a draft model for trees, or for another backend.
    """
    algorithm = server_args.speculative_algorithm
    if algorithm not in ALGORITHMS:
        return
    server_args.disable_cuda_graph = True
    if algorithm != _NGRAM:
        _make_model_chains(server_args)
        return
    if server_args.speculative_ngram_max_bfs_breadth != 1:
        logger.info("hisparse: --speculative-ngram-max-bfs-breadth is set to 1: drafts are chains")
    server_args.speculative_ngram_max_bfs_breadth = 1


def _make_model_chains(server_args: Any) -> None:
    """:func:`make_chains` of a draft model."""
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


def check_draft_model(view: Any) -> None:
    """Check that a draft model is named.

    Args:
        view: SGLang's resolved arguments; SGLang itself names that of DeepSeek's models.

    Raises:
        ConfigError: it is not.
    """
    algorithm = view.speculative_algorithm
    if algorithm in DRAFT_MODELS and view.speculative_draft_model_path is None:
        raise ConfigError(
            f"--speculative-algorithm is {algorithm} without --speculative-draft-model-path; "
            "expected the folder of a draft model, or the model's own for its MTP layers"
        )


def check_rollback(setup: EngineSetup, speculation: str) -> None:
    """Check that all an algorithm writes while it decodes belongs to pages.

    Args:
        setup: the engine's.
        speculation: value of ``--speculative-algorithm``.

    Raises:
        ConfigError: it keeps state of requests, which would keep what rejected drafts did to it.
    """
    algorithm, name = setup.algorithm, setup.resolved.config.algorithm
    kinds = algorithm.representations(setup.policy).values()
    if algorithm.host_token_bytes(setup.spec) or any(kind.per == "request" for kind in kinds):
        raise ConfigError(
            f"--speculative-algorithm is {speculation}, but algorithm {name!r} "
            "keeps state of requests; expected one that keeps state of pages alone: sketch, quest, "
            "dsa, topp"
        )


def keep_chains(drafts: Any) -> np.ndarray:
    """Reject n-gram drafts that are on no chain, before SGLang verifies them.

    A chain is a request's last token and the drafts after it, up to the first one that does not
    follow the token before it. The other drafts are what SGLang fills up with, token 0 right after
    the last token, or what followed a shorter n-gram: with a breadth of 1 SGLang drafts that too
    where it differs. They get a token that no model generates.

    A first draft of token 0 that no draft follows looks like filling. It is rejected, and the model
    generates the token.

    Args:
        drafts: SGLang's ``NgramVerifyInput``; the tokens that it compares are replaced.

    Returns:
        ``[B]``, tokens of each chain, the request's last one included.
    """
    follows = drafts.retrieve_next_token.numpy()
    count = follows.shape[1]
    tokens = drafts.draft_token.view(-1, count).clone()
    chained = np.logical_and.accumulate(follows[:, :-1] == np.arange(1, count), axis=1)
    lengths: np.ndarray = 1 + chained.sum(1)
    lengths[(lengths == 2) & (tokens.numpy()[:, 1:2] == _FILLER).any(1)] = 1
    tokens.numpy()[np.arange(count) >= lengths[:, None]] = _NO_TOKEN
    # The model's input is another reference to the old tensor.
    drafts.draft_token = tokens.flatten()
    return lengths


def accepted_drafts(host_slots: Tensor, accepted: Tensor) -> np.ndarray:
    """The place in its chain of each request's last accepted token, ``[B]``.

    Args:
        host_slots: ``[B, n] int64``, host slots of the drafts.
        accepted: ``[T] int64``, host slots of all accepted ones; each request has token 0.
    """
    return torch.isin(host_slots, accepted).sum(1).numpy() - 1
