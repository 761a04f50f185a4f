"""The operator for scores that are spread over ranks.

Each rank holds some entries of every row: the local shard of a ``DTensor``, or a plain tensor and a
``ProcessGroup``. Masks come back where the scores lie. A call costs one collective to compare k,
gamma and the lengths of the shards, one for a first look and a sample to start from, and one
all-reduce of a few sums for each pass; backward costs one. No score moves but the sample: one in
256, not less than 2048 of a row and otherwise not more than 262,144 in all.

:func:`laprune.soft_topk` and the others call these functions for DTensors. With plain shards a loss
is understood as the sum of what every rank makes of its own part: gradients of k, gamma and
temperature are those of the whole, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ._arguments import (
    Mode,
    Number,
    broadcast,
    check_dim,
    check_floating,
    check_gate,
    check_mode,
    masked,
    number,
)
from ._mesh import cut_dims, full, is_dtensor, like, names, part, whole, without
from .backends import Status
from .backends._contract import OFFSET, PIVOT, TEMPERATURE
from .joint import Tensors, flatten, jointly, part_of, rebuild, unchecked
from .op import topk
from .pieces import topk_pieces

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Solution",
    "gated_topk",
    "global_topk",
    "hard_topk",
    "lapsum_topk",
    "soft_topk",
    "solve",
]


class Solution(NamedTuple):
    """As :class:`laprune.Solution`, with the cost; barrier and temperature carry no gradient."""

    mask: Tensor
    barrier: Tensor
    temperature: Tensor
    status: Tensor
    passes: Tensor
    collectives: Tensor
    """How many collectives the forward pass took."""


def soft_topk(
    scores: Tensor,
    k: Number,
    gamma: Number,
    *,
    group: dist.ProcessGroup | None = None,
    dim: int = -1,
    mask: Tensor | None = None,
    mode: Mode = "soft",
) -> Tensor:
    """:func:`laprune.soft_topk` of rows whose entries are spread over ranks along ``dim``.

    Args:
        scores: a DTensor of any placement, or this rank's shard: all shards alike but in ``dim``,
            where they may be of any length, or none.
        k, gamma: of the whole row, the same on all ranks. Those that share rows compare them, and
            all raise where they differ; those that hold whole rows, or copies, do not.
        group: the ranks of plain shards, in the order of the entries; the default group if None.
        dim, mask, mode: as there; the mask of plain shards is that of the shard.
    """
    check_mode(mode)
    rows = _Spread(scores, dim, mask, group)
    soft = rows.run(k, gamma)[0]
    if mode == "ste":
        soft = rows.detached().run(k, 1.0)[0].detach() + (soft - soft.detach())
    return rows.restore(soft)


def solve(
    scores: Tensor,
    k: Number,
    gamma: Number,
    *,
    group: dist.ProcessGroup | None = None,
    dim: int = -1,
    mask: Tensor | None = None,
) -> Solution:
    """:func:`soft_topk` with everything the solver knows, the number of collectives included."""
    rows = _Spread(scores, dim, mask, group)
    out, state, info = rows.run(k, gamma)
    state = state.detach()
    status, passes, *cost = info.unbind(-1)
    collectives = cost[0] if cost else torch.zeros_like(passes)
    pivot, temperature = state[:, PIVOT], state[:, TEMPERATURE]
    barrier = torch.where(status == Status.HARD, pivot, pivot + state[:, OFFSET])
    for flat in (Status.UNIFORM, Status.CONSTANT, Status.INFEASIBLE):
        barrier = barrier.masked_fill(status == flat, torch.nan)
    numbers = (barrier, temperature, status, passes, collectives)
    return Solution(rows.restore(out), *map(rows.per_row, numbers))


def lapsum_topk(
    scores: Tensor,
    k: Number,
    temperature: Number,
    *,
    group: dist.ProcessGroup | None = None,
    dim: int = -1,
    mask: Tensor | None = None,
) -> Tensor:
    """:func:`laprune.lapsum_topk` of rows spread over ranks; arguments as in :func:`soft_topk`."""
    rows = _Spread(scores, dim, mask, group)
    return rows.restore(rows.run(k, temperature, fixed=True)[0])


def hard_topk(
    scores: Tensor,
    k: Number,
    *,
    group: dist.ProcessGroup | None = None,
    dim: int = -1,
    mask: Tensor | None = None,
) -> Tensor:
    """:func:`laprune.hard_topk` of rows spread over ranks; lowest rank first among equal scores."""
    rows = _Spread(scores, dim, mask, group).detached()
    return rows.restore(rows.run(k, 1.0)[0].detach())


def gated_topk(
    values: Tensor,
    k: Number,
    gamma: Number,
    *,
    scores: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    dim: int = -1,
    mask: Tensor | None = None,
    mode: Mode = "soft",
) -> Tensor:
    """``values * soft_topk(scores, k, gamma)``, the scores being the values if None."""
    check_gate(values, scores)
    chosen_by = values if scores is None else scores
    if is_dtensor(values) != is_dtensor(chosen_by):
        kinds = [type(x).__name__ for x in (values, chosen_by)]
        raise TypeError(
            "values and scores must both be DTensors or neither, got {}, {}".format(*kinds)
        )
    chosen = soft_topk(chosen_by, k, gamma, group=group, dim=dim, mask=mask, mode=mode)
    # What is excluded may be -inf, and 0 * -inf is no gate.
    excluded = chosen_by.detach() == -torch.inf
    if mask is not None:
        if is_dtensor(chosen_by):
            x = whole(chosen_by)  # type: ignore[arg-type]
            mask = like(cast(Tensor, part_of(mask, x)), x)
        excluded = excluded | ~mask
    return chosen * torch.where(excluded, torch.zeros_like(values), values)


def global_topk(
    tensors: Tensors,
    k: Number,
    gamma: Number,
    *,
    group: dist.ProcessGroup | None = None,
    masks: object = None,
    mode: Mode = "soft",
) -> Tensors:
    """:func:`laprune.global_topk` of the plain shards of all ranks; for DTensors use that one.

    Every rank passes as many tensors, empty ones where it holds nothing.
    """
    named, leaves = flatten(tensors, "tensors")
    if any(map(is_dtensor, leaves)):
        raise TypeError("laprune.global_topk takes DTensors; this function takes plain shards")
    allowed: Sequence[Tensor | None] = [None] * len(leaves)
    if masks is not None:
        other, allowed = flatten(masks, "masks")
        if other != named:
            raise ValueError(f"masks must have the structure of tensors, {named}, got {other}")
    groups, rank = _group(group)
    found = jointly(leaves, allowed, k, gamma, mode, groups, (rank,) * len(leaves))[0]
    return rebuild(tensors, found)


def _group(group: dist.ProcessGroup | None) -> tuple[str, int]:
    if not dist.is_initialized():
        raise RuntimeError("plain shards need torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    assert group is not None
    return group.group_name, dist.get_rank(group)


class _Spread:
    """The local part of the rows (rows, n), with ineligible entries at ``-inf``."""

    def __init__(
        self, scores: Tensor, dim: int, mask: Tensor | None, group: dist.ProcessGroup | None
    ) -> None:
        check_floating(scores, "scores")
        check_dim(scores, dim)
        self.given, self.dim = scores, dim % scores.dim()
        self.mesh: DeviceMesh | None = None
        if is_dtensor(scores):
            if group is not None:
                raise ValueError("a DTensor knows its ranks: group must be None")
            here = self._from_dtensor(scores, mask)
        else:
            self.groups, self.rank = _group(group)
            here = masked(scores, mask)
        moved = here.movedim(self.dim, -1)
        self.shape = moved.shape
        self.rows = moved.reshape(self.shape[:-1].numel(), self.shape[-1]).contiguous()

    def _from_dtensor(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        x = whole(scores)  # type: ignore[arg-type]
        if x.shape[self.dim] == 0:
            raise ValueError(f"scores {tuple(x.shape)} have no entries along dim {self.dim}")
        mesh = x.device_mesh
        self.given, self.mesh = x, mesh
        cut = cut_dims(x, self.dim)
        self.groups, self.rank = names(mesh, cut), 0
        for d in cut:
            self.rank = self.rank * mesh.size(d) + mesh.get_local_rank(d)
        # Rows are cut as the scores are, but for the dimension that is selected along.
        self.row_placements = [without(p, self.dim) for p in x.placements]
        self.row_shape = torch.Size(n for d, n in enumerate(x.shape) if d != self.dim)
        return masked(x.to_local(), part_of(mask, x))

    def detached(self) -> _Spread:
        other = object.__new__(_Spread)
        other.__dict__.update(self.__dict__, rows=self.rows.detach())
        return other

    def run(
        self, k: Number, hardness: Number, *, fixed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        alone = not self.groups
        name, most = ("temperature", float("inf")) if fixed else ("gamma", 1.0)
        k = self._number(k, "k", self.shape[-1])
        hardness = self._number(hardness, name, most)
        if alone or not self.rows.shape[0]:
            return topk(self.rows, k, hardness, None, False, fixed)
        return topk_pieces(k, hardness, fixed, self.groups, (self.rank,), self.rows)

    def _number(self, x: Number, name: str, largest: float) -> Tensor:
        if isinstance(x, Tensor) and self.mesh is not None:
            # Rows of other ranks have their share in the gradient even of a single number.
            every = broadcast(full(x), self.row_shape, name)
            x = part(every, self.mesh, self.row_placements)
        x = unchecked(x) if self.groups else x
        return number(x, name, largest, self.shape[:-1], self.rows)

    def restore(self, rows: Tensor) -> Tensor:
        return like(rows.reshape(self.shape).movedim(-1, self.dim).contiguous(), self.given)

    def per_row(self, x: Tensor) -> Tensor:
        x = x.reshape(self.shape[:-1])
        if self.mesh is None:
            return x
        from torch.distributed.tensor import DTensor

        shape = self.row_shape
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            x, self.mesh, self.row_placements, run_check=False, shape=shape, stride=stride
        )
