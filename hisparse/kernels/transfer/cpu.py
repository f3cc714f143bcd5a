"""Appending tokens in C++: one call for the host's pages, and one for the tail pages."""

from torch import Tensor

from hisparse.kernels.transfer.op import SCATTER_TOKENS, MovedKV, row_tokens


def append_tokens(
    host: MovedKV, tokens: MovedKV, host_slots: Tensor, device: MovedKV, tail_slots: Tensor
) -> None:
    """See :func:`hisparse.kernels.append_tokens`."""
    SCATTER_TOKENS.on_cpu(host, tokens, host_slots)
    SCATTER_TOKENS.on_cpu(device, row_tokens(tokens, tail_slots.shape[0]), tail_slots)
