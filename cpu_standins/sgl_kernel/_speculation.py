"""What speculative decoding by n-grams calls; every function changes its arguments in place."""

from __future__ import annotations

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


def _rows(req_pool_indices: Tensor, start: Tensor, end: Tensor) -> list[tuple[int, int, int]]:
    lists = (req_pool_indices.tolist(), start.tolist(), end.tolist())
    return list(zip(*lists, strict=True))
