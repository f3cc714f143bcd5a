"""Selections of other papers, to be compared with: one paper, one file.

Written after the papers and what their authors published, for quality and not for speed. Attention
is hisparse's: over the selected pages with their exact keys and values. So what a paper does to
keys and values themselves is left out, in its favour: ShadowKV's low-rank keys, for instance.
MagicPIG and vAttention are not here: both weight each attended token by the probability that it
is sampled with, and a selection has no weights.
"""
