"""Settings that several tests of servers share."""

from __future__ import annotations

import json
from typing import Any

from tiny_models import (
    INDEX_TOP_K,
    INFLLM_BLOCK,
    INFLLM_DENSE,
    MSA_BLOCK,
    MSA_BUDGET,
    MSA_DENSE,
    MSA_FIELDS,
    QSA_BUDGET,
)

#: SGLang wants a CPU for each of two ranks, or to be told.
TWO_RANKS = {"TORCHDYNAMO_DISABLE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}

MEMORY: dict[str, Any] = {"host_memory": "1GiB", "device_memory": "600MB"}

#: A budget that most prompts exceed; device memory holds some more requests than the tests send.
SPARSE: dict[str, Any] = {
    "budget": 128,
    "device_buffer_size": 128,
    "host_memory": "1GiB",
    "device_memory": "14MB",
}

#: Rows hold less than most contexts, so pages are loaded and evicted in most steps.
SMALL_ROWS: dict[str, Any] = {
    "budget": 128,
    "device_buffer_size": 256,
    "max_row_capacity": 512,
    "host_memory": "1GiB",
    "device_memory": "200MB",
}

#: A budget of every context.
ROOMY: dict[str, Any] = MEMORY | {"budget": 8192}

#: ``--max-total-tokens`` of a server that retracts requests of ``workload.RETRACTED``.
SMALL_POOL = 4096
SMALL_POOL_FLAGS = ("--max-total-tokens", str(SMALL_POOL), "--schedule-conservativeness", "0.01")
#: A budget of every context of such a server, so that answers are those of dense attention. Staging
#: is of 128 tokens, so that prefixes come in many tiles.
WHOLE: dict[str, Any] = MEMORY | {
    "budget": SMALL_POOL,
    "device_buffer_size": SMALL_POOL,
    "staging_bytes": 65536,
}

#: Every selection and every resident byte is verified.
CHECKED: dict[str, Any] = MEMORY | {"checked": True}

#: DeepSeek-V3.2 with the tokens of its own indexer.
DSA: dict[str, Any] = {
    "algorithm": "dsa",
    "algorithm_config": {"index_dtype": "float32"},
    "page_size": 1,
    "num_sink_pages": 0,
    "num_recent_pages": 0,
    "budget": INDEX_TOP_K,
    "device_buffer_size": 2 * INDEX_TOP_K,
}

#: Qwen4-Exp with the blocks of its own indexer.
QSA: dict[str, Any] = DSA | {
    "algorithm": "qsa",
    "page_size": 4,
    "budget": QSA_BUDGET,
    "device_buffer_size": 2 * QSA_BUDGET,
}

#: MiniMax-M3 with the blocks of its own indexer.
MSA: dict[str, Any] = DSA | {
    "algorithm": "msa",
    "page_size": MSA_BLOCK,
    "budget": MSA_BUDGET,
    "device_buffer_size": 2 * MSA_BUDGET,
    "dense_layers": MSA_DENSE,
}
#: MiniCPM with the means and blocks of its training.
INFLLM: dict[str, Any] = {
    "algorithm": "infllm",
    "algorithm_config": {
        "blocks": INDEX_TOP_K // INFLLM_BLOCK,
        "kernel_size": 8,
        "kernel_stride": 4,
    },
    "page_size": INFLLM_BLOCK,
    "num_sink_pages": 1,
    "num_recent_pages": 1,
    "budget": INFLLM_DENSE,
    "device_buffer_size": INFLLM_DENSE,
}
#: What SGLang reads of the tiny model.
MSA_FLAGS = ("--json-model-override-args", json.dumps(MSA_FIELDS))


def latents(budget: int, max_row_capacity: int) -> dict[str, dict[str, Any]]:
    """Settings of MLA, with ``budget``, and of DeepSeek-V3.2, by the kind of the tiny model."""
    rows = {"budget": budget, "device_buffer_size": budget, "max_row_capacity": max_row_capacity}
    return {
        "deepseek_v2": CHECKED | rows,
        "deepseek_v32": CHECKED | DSA | {"max_row_capacity": 4 * INDEX_TOP_K},
    }
