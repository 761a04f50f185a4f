"""The operator's functions: arguments, shapes, masks and modes around the row-wise op."""

from __future__ import annotations

from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ._arguments import Mode as Mode
from ._arguments import Number as Number
from ._arguments import check_dim, check_floating, check_gate, check_mode, masked, number
from ._mesh import is_dtensor
from .backends import Status
from .backends._contract import OFFSET, PIVOT, TEMPERATURE
from .op import eager_mask, plain_mask, takes_numbers, topk


class Solution(NamedTuple):
    """A solved mask and how it was found; rows have the shape of the scores without ``dim``."""

    mask: Tensor
    """The mask, shaped as the scores."""
    barrier: Tensor
    """b per row: where the mask crosses 1/2. NaN for uniform rows, the threshold for hard ones."""
    temperature: Tensor
    """t per row: 0 for hard rows, infinite for uniform ones."""
    status: Tensor
    """A :class:`laprune.Status` per row."""
    passes: Tensor
    """How often all of the row was read in search of the answer."""


def soft_topk(
    scores: Tensor,
    k: Number,
    gamma: Number,
    *,
    dim: int = -1,
    mask: Tensor | None = None,
    mode: Mode = "soft",
) -> Tensor:
    r"""A differentiable top-k mask with exactly mass k and hardness gamma.

    Solves, for each row r of n scores, for the barrier b and temperature t of
    ``p = sigma((r - b)/t)``, sigma the Laplace CDF, such that ``sum p = k`` and
    ``sum p^2 = (a + (1 - a) gamma) k`` with ``a = k/n``.

    >>> scores = torch.tensor([3.0, 1.0, 2.0, 0.0])
    >>> soft_topk(scores, k=2, gamma=0.8)
    tensor([0.9952, 0.1065, 0.8935, 0.0048])
    >>> soft_topk(scores, k=2, gamma=0.8).sum()
    tensor(2.)

    Args:
        scores: float64, float32, float16 or bfloat16, any shape; ``-inf`` is never selected. Half
            types are solved in float32 and come back in their own type. A DTensor is solved where
            its shards lie, by :mod:`laprune.distributed`.
        k: the mass of each row, between 0 and n, fractional if you like; a number, or a tensor that
            broadcasts to the rows (the shape of the scores without ``dim``).
        gamma: hardness between 0 (uniform) and 1 (hard top-k); a number or a tensor like k.
        dim: the dimension to select along.
        mask: True where an entry may be selected; n counts those, row by row.
        mode: ``"soft"``, or ``"ste"`` for the hard mask forward and the soft gradient backward.

    Returns:
        The mask, shaped as the scores, differentiable in scores, k and gamma inside (0, 1). At the
        endpoints, where ties allow no more hardness and on constant rows the gradient of the scores
        is zero; a row with NaN or ``+inf`` is NaN. :func:`solve` reports which case a row was.
    """
    if mode == "soft" and _is_usual(dim, mask):
        out = plain_mask(scores, k, gamma, gated=False, fixed=False)
        if out is not None:
            return out
    if is_dtensor(scores):
        return _spread().soft_topk(scores, k, gamma, dim=dim, mask=mask, mode=mode)
    check_mode(mode)
    rows = _Rows(scores, dim, mask)
    soft = rows.mask(k, gamma, name="gamma", fixed=False)
    if mode == "ste":
        hard = rows.detached().mask(k, 1.0, name="gamma", fixed=False)
        soft = hard.detach() + (soft - soft.detach())
    return soft


def solve(
    scores: Tensor, k: Number, gamma: Number, *, dim: int = -1, mask: Tensor | None = None
) -> Solution:
    """:func:`soft_topk` with everything the solver knows.

    >>> s = solve(torch.tensor([3.0, 1.0, 2.0, 0.0]), k=2, gamma=0.8)
    >>> round(s.barrier.item(), 6), round(s.temperature.item(), 4), Status(s.status.item()).name
    (1.5, 0.3234, 'CONVERGED')

    Mask, barrier and temperature are differentiable; barrier and temperature are float64.
    """
    if is_dtensor(scores):
        return Solution(*_spread().solve(scores, k, gamma, dim=dim, mask=mask)[:5])
    return _solution(scores, k, gamma, "gamma", dim, mask)


def _solution(
    scores: Tensor,
    k: Number,
    hardness: Number,
    name: Literal["gamma", "temperature"],
    dim: int = -1,
    mask: Tensor | None = None,
) -> Solution:
    """:func:`solve` for either kind of hardness."""
    rows = _Rows(scores, dim, mask)
    out, state, info = rows.solve(k, hardness, name=name, fixed=name == "temperature")
    status, passes = info.unbind(-1)
    pivot, temperature = state[:, PIVOT], state[:, TEMPERATURE]
    # As plain ints: dynamo takes a comparison with an enum for False.
    hard, *flat = map(int, (Status.HARD, Status.UNIFORM, Status.CONSTANT, Status.INFEASIBLE))
    barrier = torch.where(status == hard, pivot, pivot + state[:, OFFSET])
    level = (status == flat[0]) | (status == flat[1]) | (status == flat[2])
    barrier = barrier.masked_fill(level, torch.nan)
    return Solution(out, *(rows.per_row(x) for x in (barrier, temperature, status, passes)))


def lapsum_topk(
    scores: Tensor, k: Number, temperature: Number, *, dim: int = -1, mask: Tensor | None = None
) -> Tensor:
    """The mask ``sigma((r - b)/t)`` of mass k at a given temperature t: LapSum.

    >>> lapsum_topk(torch.tensor([3.0, 1.0, 2.0, 0.0]), k=2, temperature=0.5)
    tensor([0.9751, 0.1839, 0.8161, 0.0249])

    Arguments as in :func:`soft_topk`; differentiable in scores, k and temperature. Temperature 0 is
    the hard mask, an infinite one the uniform mask.
    """
    if _is_usual(dim, mask):
        out = plain_mask(scores, k, temperature, gated=False, fixed=True)
        if out is not None:
            return out
    if is_dtensor(scores):
        return _spread().lapsum_topk(scores, k, temperature, dim=dim, mask=mask)
    return _Rows(scores, dim, mask).mask(k, temperature, name="temperature", fixed=True)


def hard_topk(scores: Tensor, k: Number, *, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """The mask of exactly k ones, lowest index first among equal scores; it carries no gradient.

    >>> hard_topk(torch.tensor([1.0, 2.0, 2.0, 2.0]), k=2)
    tensor([0., 1., 1., 0.])

    Arguments as in :func:`soft_topk`. A fractional k gives its fraction to the next entry in line,
    so that the mass is k.
    """
    if is_dtensor(scores):
        return _spread().hard_topk(scores, k, dim=dim, mask=mask)
    rows = _Rows(scores, dim, mask).detached()
    return rows.mask(k, 1.0, name="gamma", fixed=False).detach()


def gated_topk(
    values: Tensor,
    k: Number,
    gamma: Number,
    *,
    scores: Tensor | None = None,
    dim: int = -1,
    mask: Tensor | None = None,
    mode: Mode = "soft",
) -> Tensor:
    """``values * soft_topk(scores, k, gamma)`` in one go; a soft mask is never stored.

    >>> gated_topk(torch.tensor([3.0, 1.0, 2.0, 0.0]), k=2, gamma=0.8)
    tensor([2.9855, 0.1065, 1.7869, 0.0000])

    Args:
        values: what is gated, shaped as the scores.
        scores: what is selected by; the values themselves if None.

    Other arguments as in :func:`soft_topk`. Backward keeps the values, the scores if they differ,
    and five numbers per row.
    """
    if scores is None and mode == "soft" and _is_usual(dim, mask):
        out = plain_mask(values, k, gamma, gated=True, fixed=False)
        if out is not None:
            return out
    if is_dtensor(values) or is_dtensor(scores):
        return _spread().gated_topk(values, k, gamma, scores=scores, dim=dim, mask=mask, mode=mode)
    check_mode(mode)
    check_gate(values, scores)
    own = None
    if scores is not None:
        scores = scores.to(torch.promote_types(scores.dtype, values.dtype))
        own = _Rows(values, dim, None)
    chosen_by = values if scores is None else scores
    if mode == "ste":
        chosen = soft_topk(chosen_by, k, gamma, dim=dim, mask=mask, mode="ste")
        excluded = chosen_by == -torch.inf
        if mask is not None:
            excluded = excluded | ~mask
        return chosen * values.masked_fill(excluded, 0.0)
    rows = _Rows(chosen_by, dim, mask)
    return rows.mask(k, gamma, name="gamma", fixed=False, values=own, gated=True)


def _is_usual(dim: int, mask: Tensor | None) -> bool:
    """Whether scores are rows as they are."""
    return mask is None and type(dim) is int and dim == -1


def _spread() -> ModuleType:
    from . import distributed  # only DTensors need what it imports

    return distributed


class _Rows:
    """Scores as rows along the last dimension, with ineligible entries at ``-inf``."""

    def __init__(self, scores: Tensor, dim: int, mask: Tensor | None) -> None:
        check_floating(scores, "scores")
        check_dim(scores, dim)
        if scores.shape[dim] == 0:
            raise ValueError(f"scores {tuple(scores.shape)} have no entries along dim {dim}")
        scores = masked(scores, mask)
        # On a GPU every call counts: those that would change nothing are left out.
        self.dim = -1 if dim == scores.dim() - 1 else dim
        self.scores = scores if self.dim == -1 else scores.movedim(dim, -1)
        self.shape = self.scores.shape

    def detached(self) -> _Rows:
        other = object.__new__(_Rows)
        other.dim, other.shape, other.scores = self.dim, self.shape, self.scores.detach()
        return other

    def flat(self) -> Tensor:
        """As contiguous rows (rows, n)."""
        rows = self.scores
        return (rows if rows.dim() == 2 else rows.reshape(-1, self.shape[-1])).contiguous()

    def mask(
        self,
        k: Number,
        hardness: Number,
        *,
        name: str,
        fixed: bool,
        values: _Rows | None = None,
        gated: bool = False,
    ) -> Tensor:
        k, hardness, eager = self._numbers(k, hardness, name, fixed)
        if eager:
            own = None if values is None else values.scores
            out = eager_mask(self.scores, k, hardness, own, gated, fixed)
        else:
            own = None if values is None else values.flat()
            out = topk(self.flat(), k, hardness, own, gated, fixed)[0]
        return self.restore(out)

    def solve(
        self, k: Number, hardness: Number, *, name: str, fixed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, hardness, _ = self._numbers(k, hardness, name, fixed)
        out, state, info = topk(self.flat(), k, hardness, None, False, fixed)
        return self.restore(out), state, info

    def _numbers(
        self, k: Number, hardness: Number, name: str, fixed: bool
    ) -> tuple[Number, Number, bool]:
        shape, largest = self.shape[:-1], float("inf") if fixed else 1.0
        as_is = takes_numbers(self.scores)
        k = number(k, "k", self.shape[-1], shape, self.scores, as_is)
        return k, number(hardness, name, largest, shape, self.scores, as_is), as_is

    def restore(self, out: Tensor) -> Tensor:
        moved = out if out.dim() == len(self.shape) else out.reshape(self.shape)
        return moved if self.dim == -1 else moved.movedim(-1, self.dim)

    def per_row(self, x: Tensor) -> Tensor:
        return x.reshape(self.shape[:-1])
