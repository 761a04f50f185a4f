"""Sparse soft top-k by isotonic regression, with quadratic regularisation (p = 2).

Maximise <r, p> - (softness/2) |p|^2 over masks of mass k in [0, 1]. With s = r/softness sorted
in descending order and w = (1, .., 1, 0, .., 0) of sum k, the sorted mask is s - v, where v is the
non-increasing vector nearest to s - w. Two solvers find v: pooling of adjacent violators (PAV),
exact and sequential, and Dykstra's alternating projections, parallel and iterative. Where v is
constant over a block of scores, the mask's Jacobian subtracts the mean over that block.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laprune.baselines._common import around_the_cut, budget_weights, constant_mask, rows_of

__all__ = ["isotonic_dykstra", "isotonic_pav", "sander_dykstra", "sander_pav"]

DYKSTRA_STEPS = 500

_Float64: TypeAlias = npt.NDArray[np.float64]
_Int64: TypeAlias = npt.NDArray[np.int64]
_Isotonic: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]


def _pool_adjacent_violators(y: _Float64, v: _Float64, block: _Int64) -> None:
    """Write the non-increasing fit of each row of y into v and the block of each entry."""
    rows, n = y.shape
    mean = np.empty(n)
    start = np.empty(n + 1, dtype=np.int64)
    for row in range(rows):
        blocks = 0
        for i in range(n):
            value, first = y[row, i], i
            while blocks > 0 and mean[blocks - 1] < value:
                blocks -= 1
                weight = (first - start[blocks]) / (i + 1 - start[blocks])
                value += weight * (mean[blocks] - value)
                first = start[blocks]
            mean[blocks], start[blocks] = value, first
            blocks += 1
        start[blocks] = n
        for j in range(blocks):
            v[row, start[j] : start[j + 1]] = mean[j]
            block[row, start[j] : start[j + 1]] = j


@functools.cache
def _pav_kernel() -> Callable[[_Float64, _Float64, _Int64], None]:
    """The loop compiled by numba where it is installed, plain Python otherwise."""
    if importlib.util.find_spec("numba") is None:
        return _pool_adjacent_violators
    numba: Any = importlib.import_module("numba")
    return numba.njit(_pool_adjacent_violators)


def isotonic_pav(y: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest non-increasing vector to each row, and the block each entry was pooled into.

    Exact up to rounding, linear in n, on the CPU in float64.

    >>> isotonic_pav(torch.tensor([[3.0, 1.0, 2.0, 0.0]], dtype=torch.float64))[0].tolist()
    [[3.0, 1.5, 1.5, 0.0]]
    """
    array = y.detach().double().cpu().contiguous().numpy()
    v = np.empty_like(array)
    block = np.empty(array.shape, dtype=np.int64)
    _pav_kernel()(array, v, block)
    return torch.from_numpy(v).to(y), torch.from_numpy(block).to(y.device)


def _raise_multipliers(v: Tensor, multiplier: Tensor, first: int) -> None:
    """Project v, in place, onto v_i >= v_(i+1) for every second i, with Dykstra's correction.

    Each constraint remembers how much it has moved its pair. That is undone before the pair is
    projected again, so that a constraint which no longer binds lets go of it.
    """
    left, right = v[:, first:-1:2], v[:, first + 1 :: 2]
    old = multiplier[:, first::2]
    new = (old + (right - left) / 2).clamp_min(0)
    left += new - old
    right -= new - old
    multiplier[:, first::2] = new


def isotonic_dykstra(y: Tensor, steps: int = DYKSTRA_STEPS) -> tuple[Tensor, Tensor]:
    """Nearest non-increasing vector to each row by alternating projections, and its blocks.

    A step costs a few passes over the row. A block of m entries needs about m^2 steps to level
    out; before that the row's sum is already exact but neighbours may still be out of order.
    The blocks are those of the constraints that have been active.

    >>> isotonic_dykstra(torch.tensor([[3.0, 1.0, 2.0, 0.0]]))[0].tolist()
    [[3.0, 1.5, 1.5, 0.0]]
    """
    v = y.detach().clone()
    multiplier = torch.zeros_like(v[:, 1:])
    for _ in range(steps):
        _raise_multipliers(v, multiplier, 0)
        _raise_multipliers(v, multiplier, 1)
    linked = torch.nn.functional.pad(multiplier > 0, (1, 0), value=False)
    return v, (~linked).cumsum(-1) - 1


class _IsotonicMask(torch.autograd.Function):
    """Mask s - v of descending scores s, with the block-averaging gradient."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, k: float, isotonic: _Isotonic) -> Tensor:
        y = s.double()
        v, block = isotonic(y - budget_weights(s.shape[-1], k, y))
        ctx.save_for_backward(block)
        return (y - v).to(s.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (block,) = ctx.saved_tensors
        total = torch.zeros_like(g).scatter_add(-1, block, g)
        count = torch.zeros_like(g).scatter_add(-1, block, torch.ones_like(g))
        return g - (total / count.clamp_min(1)).gather(-1, block), None, None


def _sander(scores: Tensor, k: float, softness: float, isotonic: _Isotonic) -> Tensor:
    rows = rows_of(scores, k, softness)
    mask = constant_mask(rows, k)
    if mask is None:
        x = around_the_cut(rows, k, softness)
        s, order = x.sort(dim=-1, descending=True, stable=True)
        mask = torch.zeros_like(s).scatter(-1, order, _IsotonicMask.apply(s, k, isotonic))
    return mask.reshape(scores.shape).to(scores.dtype)


def sander_pav(scores: Tensor, k: float, softness: float = 1.0) -> Tensor:
    """Maximise <r, p> - (softness/2) |p|^2 over masks of mass k in [0, 1], exactly, by PAV.

    Args:
        scores: any shape, rows along the last dimension; differentiable.
        k: budget, 0 to n. `k = 0` gives zeros and `k = n` gives ones.
        softness: weight of the quadratic regularisation, positive.

    >>> sander_pav(torch.tensor([3.0, 1.0, 0.75, -1.0]), k=2)
    tensor([1.0000, 0.6250, 0.3750, 0.0000])
    """
    return _sander(scores, k, softness, isotonic_pav)


def sander_dykstra(
    scores: Tensor, k: float, softness: float = 1.0, *, steps: int = DYKSTRA_STEPS
) -> Tensor:
    """The mask of `sander_pav` by a fixed number of Dykstra's alternating projections.

    The mass is k and values lie in [0, 1] after any number of steps: from zero the multipliers only
    grow, and levelling a pair moves its two mask values towards each other. The mask agrees with
    `sander_pav` once the steps outnumber the square of the number of fractional entries.

    >>> sander_dykstra(torch.tensor([3.0, 1.0, 0.75, -1.0]), k=2)
    tensor([1.0000, 0.6250, 0.3750, 0.0000])
    """
    return _sander(scores, k, softness, functools.partial(isotonic_dykstra, steps=steps))
