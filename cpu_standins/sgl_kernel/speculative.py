"""Stand-in for sgl_kernel.speculative on a CPU-only machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of the nodes of each request, from which nodes are their ancestors.

    ``tree_mask [bs * n * n]``: entry ``[b, i, j]`` says that node j is an ancestor of node i.
    """
    masks = tree_mask[: batch_size * draft_token_num**2].view(batch_size, draft_token_num, -1)
    for request, (mask, length) in enumerate(
        zip(masks.tolist(), verified_seq_len.tolist(), strict=True)
    ):
        first = request * draft_token_num
        ancestors = [[j for j in range(i) if row[j]] for i, row in enumerate(mask)]
        parents = [max(nodes, default=-1) for nodes in ancestors]
        for node, nodes in enumerate(ancestors):
            later = range(node + 1, draft_token_num)
            positions[first + node] = length + len(nodes)
            retrive_index[request, node] = first + node
            children = (k for k in later if node in ancestors[k])
            retrive_next_token[request, node] = next(children, -1)
            siblings = (k for k in later if parents[k] == parents[node] >= 0)
            retrive_next_sibling[request, node] = next(siblings, -1)
