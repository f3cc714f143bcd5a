"""What speculative decoding calls; every function changes its arguments in place."""

from __future__ import annotations

from ctypes import memmove, string_at
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write consecutive entries of ``out_cache_loc`` to ``req_to_token[row, start:end]``."""
    done = 0
    for row, first, last in _rows(req_pool_indices, start, end):
        req_to_token[row, first:last] = out_cache_loc[done : done + last - first]
        done += last - first


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read ``req_to_token[row, start:end]`` into consecutive entries of ``out_cache_loc``."""
    done = 0
    for row, first, last in _rows(req_pool_indices, start, end):
        out_cache_loc[done : done + last - first] = req_to_token[row, first:last]
        done += last - first


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Pack the locations of the accepted nodes, those with an index above -1."""
    accepted = accept_index.flatten()
    found = out_cache_loc[accepted[accepted > -1].long()]
    accept_out_cache_loc[: len(found)] = found


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the target's own tokens from node 0 on, as far as a child has them."""
    trees = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        target_predict.tolist(),
        strict=True,
    )
    for request, (tokens, index, child, sibling, target) in enumerate(trees):
        node = accepted = 0
        accept_index[request, 0] = index[0]
        while accepted + 1 < accept_index.shape[1]:
            next_node = child[node]
            while next_node != -1 and tokens[next_node] != target[node]:
                next_node = sibling[next_node]
            if next_node == -1:
                break
            predicts[index[node]] = target[node]
            node, accepted = next_node, accepted + 1
            accept_index[request, accepted] = index[node]
        accept_token_num[request] = accepted
        predicts[index[node]] = target[node]


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` entries of each row that follow its length."""
    ends = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len
    )


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Mask, positions and links of a draft model's chains; node 0 is the last verified token."""
    if topk != 1:
        raise ValueError(f"topk: got {topk}, expected 1: this stand-in builds chains")
    if tree_mask_mode != 1:
        raise ValueError(f"tree_mask_mode: got {tree_mask_mode}, expected 1 (QLEN_ONLY) on a CPU")
    nodes = positions.new_ones(draft_token_num).cumsum(0) - 1
    tree_mask.view(-1, draft_token_num, draft_token_num)[:] = nodes <= nodes[:, None]
    positions.view(-1, draft_token_num)[:] = verified_seq_len[:, None] + nodes
    retrive_index.view(-1)[:] = retrive_index.new_ones(retrive_index.numel()).cumsum(0) - 1
    retrive_next_token[:, :-1] = nodes[1:]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copy tokens from ``src_loc`` to ``tgt_loc`` in each buffer; its stride is a token's bytes."""
    for pointer, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        tokens = [string_at(pointer + place * size, size) for place in src_loc.tolist()]
        for place, token in zip(tgt_loc.tolist(), tokens, strict=True):
            memmove(pointer + place * size, token, size)


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """The last accepted token of each request, of ``accept_stride`` tokens each."""
    tokens = accept_tokens.reshape(-1, accept_stride)
    for request, length in enumerate(accept_lens.tolist()):
        bonus_tokens[request] = tokens[request, length - 1]


def _rows(req_pool_indices: Tensor, start: Tensor, end: Tensor) -> list[tuple[int, int, int]]:
    lists = (req_pool_indices.tolist(), start.tolist(), end.tolist())
    return list(zip(*lists, strict=True))
