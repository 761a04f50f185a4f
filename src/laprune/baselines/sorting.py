"""Soft top-k from relaxed sorting: NeuralSort, SoftSort and differentiable sorting networks.

A relaxed permutation has one row for each rank; the mask is the sum of its first k rows. Nothing
here builds such a matrix in full, except `diffsort_topk`, which is the published package.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from laprune.baselines._common import budget_weights, constant_mask, import_optional, rows_of

__all__ = ["bitonic_topk", "diffsort_topk", "neuralsort_topk", "softsort_topk"]

# Entries of a relaxed permutation held at once, and recomputed for the gradient.
CHUNK_ENTRIES = 1 << 22

_Logits: TypeAlias = Callable[[slice], Tensor]
_Layer: TypeAlias = tuple[Tensor, Tensor]


def _sum_of_softmax_rows(logits: _Logits, weights: Tensor, rows: int, ranks: int) -> Tensor:
    """Sum softmax(logits[rank]) over ranks with weights, without keeping the ranks x n matrix.

    `logits(slice)` returns `(rows, ranks, n)`; the first `ranks` weights are not zero.
    """
    n = weights.shape[0]
    chunk = max(1, CHUNK_ENTRIES // max(1, rows * n))

    def part(ranks: slice) -> Tensor:
        return torch.einsum("k,bkn->bn", weights[ranks], logits(ranks).softmax(-1))

    mask = torch.zeros(rows, n, dtype=weights.dtype, device=weights.device)
    for start in range(0, ranks, chunk):
        block = slice(start, min(start + chunk, ranks))
        mask = mask + checkpoint(part, block, use_reentrant=False, preserve_rng_state=False)
    return mask


def _total_distances(rows: Tensor) -> Tensor:
    """sum_j |r_i - r_j| for each i, from prefix sums of the sorted row."""
    n = rows.shape[-1]
    x, order = rows.sort(-1)
    before = torch.arange(n, device=x.device, dtype=x.dtype)
    prefix = x.cumsum(-1)
    total = x * (2 * before + 2 - n) - 2 * prefix + prefix[:, -1:]
    return torch.zeros_like(total).scatter(-1, order, total)


def neuralsort_topk(scores: Tensor, k: float, tau: float = 1.0) -> Tensor:
    """Sum of the first k rows of NeuralSort: softmax(((n + 1 - 2 i) r - d)/tau) for rank i.

    d_j is the total distance of score j to all scores. Every row of the relaxed permutation sums
    to one, so the mass is k; a column need not, so values may exceed one. Time grows with k n.

    Args:
        scores: any shape, rows along the last dimension; differentiable.
        k: budget, 0 to n. `k = 0` gives zeros and `k = n` gives ones.
        tau: temperature, positive.

    >>> neuralsort_topk(torch.tensor([3.0, 1.0, 0.0, -1.0]), k=2)
    tensor([0.9645, 0.7757, 0.2477, 0.0121])
    """
    rows = rows_of(scores, k, tau)
    mask = constant_mask(rows, k)
    if mask is None:
        n = rows.shape[-1]
        distance = _total_distances(rows)
        slope = n - 1 - 2 * torch.arange(n, device=rows.device, dtype=rows.dtype)

        def logits(ranks: slice) -> Tensor:
            return (slope[ranks, None] * rows[:, None] - distance[:, None]) / tau

        weights = budget_weights(n, k, rows)
        mask = _sum_of_softmax_rows(logits, weights, rows.shape[0], math.ceil(k))
    return mask.reshape(scores.shape).to(scores.dtype)


def softsort_topk(scores: Tensor, k: float, tau: float = 1.0) -> Tensor:
    """Sum of the first k rows of SoftSort: softmax(-|r_[i] - r|/tau) for the i-th largest r_[i].

    Every row of the relaxed permutation sums to one, so the mass is k; a column need not, so values
    may exceed one. Time grows with k n.

    Args:
        scores: any shape, rows along the last dimension; differentiable.
        k: budget, 0 to n. `k = 0` gives zeros and `k = n` gives ones.
        tau: temperature, positive.

    >>> softsort_topk(torch.tensor([3.0, 1.0, 0.0, -1.0]), k=2)
    tensor([0.9135, 0.7228, 0.2659, 0.0978])
    """
    rows = rows_of(scores, k, tau)
    mask = constant_mask(rows, k)
    if mask is None:
        ranked = rows.sort(-1, descending=True).values

        def logits(ranks: slice) -> Tensor:
            return -(ranked[:, ranks, None] - rows[:, None]).abs() / tau

        weights = budget_weights(rows.shape[-1], k, rows)
        mask = _sum_of_softmax_rows(logits, weights, rows.shape[0], math.ceil(k))
    return mask.reshape(scores.shape).to(scores.dtype)


@functools.lru_cache(maxsize=8)
def _bitonic_layers(n: int, device: torch.device) -> tuple[_Layer, ...]:
    """Comparators of a bitonic sorting network on n wires: (lower wires, upper wires) by layer.

    Each merge first mirrors its block, so that all comparators point the same way and those
    that reach past wire n, where the padding to a power of two would be, can be dropped.
    """
    layers = []
    size = 2
    with torch.inference_mode(False):  # they are kept, and may be needed for a gradient later
        wire = torch.arange(n, device=device)
        while size < 2 * n:
            flips = [size - 1] + [size >> j for j in range(2, size.bit_length())]
            for flip in flips:
                partner = wire ^ flip
                low = wire[(partner > wire) & (partner < n)]
                layers.append((low, low ^ flip))
            size *= 2
    return tuple(layers)


def _keep_probability(low: Tensor, high: Tensor, softness: float) -> Tensor:
    """Cauchy probability that a pair is already in ascending order."""
    return torch.atan((high - low) / softness) / torch.pi + 0.5


def bitonic_topk(scores: Tensor, k: float, softness: float = 0.1) -> Tensor:
    """Mass that a differentiable bitonic sorting network moves from each score to the top k ranks.

    Each comparator swaps with a Cauchy probability. Its layers are doubly stochastic, so the mass
    is k and values lie in [0, 1]. The top-k indicator of the last layer is carried back through
    the layers, which takes O(n log^2 n) rather than the n x n permutation matrix.

    Args:
        scores: any shape, rows along the last dimension; differentiable.
        k: budget, 0 to n. `k = 0` gives zeros and `k = n` gives ones.
        softness: width of the swap, the inverse of the steepness in the literature; positive.

    >>> bitonic_topk(torch.tensor([3.0, 1.0, 0.0, -1.0]), k=2)
    tensor([0.9916, 0.9705, 0.0292, 0.0088])
    """
    rows = rows_of(scores, k, softness)
    mask = constant_mask(rows, k)
    if mask is None:
        n = rows.shape[-1]
        layers = _bitonic_layers(n, rows.device)
        keeps = []
        x = rows
        for low, high in layers:
            a, b = x.index_select(1, low), x.index_select(1, high)
            keep = _keep_probability(a, b, softness)
            swapped = (1 - keep) * (b - a)
            x = x.index_add(1, low, swapped).index_add(1, high, -swapped)
            keeps.append(keep)
        mask = budget_weights(n, k, rows).flip(0).expand_as(rows)
        for (low, high), keep in zip(reversed(layers), reversed(keeps), strict=True):
            swapped = (1 - keep) * (mask.index_select(1, high) - mask.index_select(1, low))
            mask = mask.index_add(1, low, swapped).index_add(1, high, -swapped)
    return mask.reshape(scores.shape).to(scores.dtype)


def diffsort_topk(scores: Tensor, k: float, softness: float = 0.1) -> Tensor:
    """Mask of a bitonic sorting network with Cauchy swaps, from the `diffsort` package.

    The package builds an n x n relaxed permutation in every layer. `bitonic_topk` gives the same
    mask without it where n is a power of two; on other lengths the networks differ.

    Args:
        scores: any shape, rows along the last dimension; differentiable.
        k: budget, 0 to n. `k = 0` gives zeros and `k = n` gives ones.
        softness: the inverse of the package's steepness, positive.
    """
    diffsort = import_optional("diffsort", "diffsort")
    rows = rows_of(scores, k, softness)
    mask = constant_mask(rows, k)
    if mask is None:
        n = rows.shape[-1]
        network = diffsort.DiffSortNet(
            "bitonic", n, device=rows.device, steepness=1 / softness, distribution="cauchy"
        )
        permutation = network(rows)[1]
        mask = permutation @ budget_weights(n, k, rows).flip(0)
    return mask.reshape(scores.shape).to(scores.dtype)
