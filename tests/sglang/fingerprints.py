"""Prints the fingerprint of each model named, as SGLang and as transformers hold it.

A program of its own: SGLang's groups of ranks are global to a process.
"""

from __future__ import annotations

import socket
import sys

from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.model_loader import get_model
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from transformers import AutoModelForCausalLM

from hisparse.sglang.features.storage.key import rope_differences
from hisparse.storage.fingerprint import fingerprint, model_settings
from hisparse.transformers.fingerprint import model_fingerprint


def main(folders: list[str]) -> None:
    """Print two fingerprints a line."""
    options = {"device": "cpu", "attention_backend": "torch_native"}
    set_global_server_args_for_scheduler(ServerArgs(model_path=folders[0], **options))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
    initialize_model_parallel()
    get_parallel().override_permanently(tp_rank=0, pp_rank=0)
    for folder in folders:
        there = AutoModelForCausalLM.from_pretrained(folder)
        config = ModelConfig(folder, dtype=str(there.dtype).removeprefix("torch."))
        here = get_model(
            model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu")
        )
        settings = model_settings(config.hf_config)
        settings |= dict.fromkeys(rope_differences(here, config.hf_config))
        own = fingerprint(settings, here.named_parameters())
        print(own, model_fingerprint(there), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
