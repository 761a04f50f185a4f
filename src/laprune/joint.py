"""One budget over several tensors."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import TypeVar

import torch
from torch import Tensor

from ._arguments import Mode, Number, broadcast, check_floating, check_mode, masked, number
from ._mesh import full, is_dtensor, layout, like, local, part, whole
from .pieces import topk_pieces

Tensors = TypeVar("Tensors", list[Tensor], tuple[Tensor, ...], dict[str, Tensor])


def global_topk(
    tensors: Tensors, k: Number, gamma: Number, *, masks: object = None, mode: Mode = "soft"
) -> Tensors:
    """Masks of several tensors that share one budget: together they have mass k and hardness gamma.

    As :func:`laprune.soft_topk` of all entries in one row, in the order of the tensors, but without
    vmap and forward mode. They are read where they lie; only on a single GPU they are copied into
    one row, which then takes one launch.

    >>> scores = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([[2.0], [0.0]])}
    >>> global_topk(scores, k=2, gamma=0.8)
    {'a': tensor([0.9952, 0.1065]), 'b': tensor([[0.8935],
            [0.0048]])}

    Args:
        tensors: a list, tuple or dict of tensors of any shape, on one device. DTensors are solved
            where they lie: only a sample and the sums of each pass travel. Of equal scores in one
            DTensor the hard masks serve those on the lowest rank first.
        k: the mass of all masks together; a number or a tensor with one element.
        gamma: their hardness, from 0 to 1; a number or a tensor with one element.
        masks: True where an entry may be selected: the same structure, None for a tensor whose
            entries all may.
        mode: ``"soft"``, or ``"ste"`` for the hard masks forward and the soft gradient backward.

    Returns:
        Masks in the structure of the tensors, differentiable in tensors, k and gamma.
    """
    names, leaves = flatten(tensors, "tensors")
    allowed: Sequence[Tensor | None] = [None] * len(leaves)
    if masks is not None:
        other, allowed = flatten(masks, "masks")
        if other != names:
            raise ValueError(f"masks must have the structure of tensors, {names}, got {other}")
    leaves = [whole(x) if is_dtensor(x) else x for x in leaves]  # type: ignore[arg-type]
    groups, owners = layout(leaves)
    here = [part_of(m, x) for m, x in zip(allowed, leaves, strict=True)]
    found = jointly([local(x) for x in leaves], here, k, gamma, mode, groups, owners)[0]
    out = [like(m, x) for m, x in zip(found, leaves, strict=True)]
    return rebuild(tensors, out)


def flatten(tensors: object, name: str) -> tuple[list[str], list[Tensor]]:
    """The names (keys or positions) and the tensors of a list, tuple or dict."""
    if isinstance(tensors, dict):
        return [repr(key) for key in tensors], list(tensors.values())
    if isinstance(tensors, list | tuple):
        return [str(i) for i in range(len(tensors))], list(tensors)
    raise TypeError(f"{name} must be a list, tuple or dict, got {type(tensors).__name__}")


def rebuild(tensors: Tensors, leaves: list[Tensor]) -> Tensors:
    if isinstance(tensors, dict):
        return dict(zip(tensors, leaves, strict=True))
    if hasattr(tensors, "_fields"):  # a named tuple
        return type(tensors)(*leaves)
    return type(tensors)(leaves)


def jointly(
    leaves: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    k: Number,
    gamma: Number,
    mode: str,
    groups: str,
    owners: tuple[int, ...],
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Masks shaped as the leaves, with the state and info of their one row."""
    check_mode(mode)
    if not leaves:
        raise ValueError("tensors are empty: nothing to select from")
    for x in leaves:
        check_floating(x, "every tensor")
        if x.device != leaves[0].device:
            raise ValueError(f"tensors must be on one device, got {leaves[0].device}, {x.device}")
    total = sum(x.numel() for x in leaves)
    if not groups and total == 0:
        raise ValueError("tensors have no entries: nothing to select from")
    rows = [masked(x, m).reshape(1, -1) for x, m in zip(leaves, masks, strict=True)]
    one, row = torch.Size([1]), rows[0]
    k, gamma = _single(k, "k"), _single(gamma, "gamma")
    if groups:
        k, gamma = unchecked(k), unchecked(gamma)
    k, gamma = number(k, "k", total, one, row), number(gamma, "gamma", 1.0, one, row)
    *soft, state, info = topk_pieces(k, gamma, False, groups, owners, *rows)
    if mode == "ste":
        sure = torch.ones_like(gamma)
        still = [x.detach() for x in rows]
        hard = topk_pieces(k.detach(), sure, False, groups, owners, *still)[: len(rows)]
        soft = [h.detach() + (p - p.detach()) for h, p in zip(hard, soft, strict=True)]
    return [p.reshape(x.shape) for p, x in zip(soft, leaves, strict=True)], state, info


def unchecked(x: Number) -> Number:
    """A number as a tensor, whose value is not looked at before the ranks have compared theirs: a
    wrong one must be refused by all of them, or the others would wait for the one that did."""
    real = isinstance(x, Real) and not isinstance(x, bool)
    return torch.tensor(float(x), dtype=torch.float64, device="cpu") if real else x


def _single(x: Number, name: str) -> Number:
    if isinstance(x, Tensor) and x.numel() != 1:
        raise ValueError(f"{name} must have one element, got shape {tuple(x.shape)}")
    return full(x).reshape(1) if isinstance(x, Tensor) else x


def part_of(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """What of a mask belongs to the part of x that lies here."""
    if mask is None or not is_dtensor(x):
        return mask
    whole_mask = broadcast(full(mask), x.shape, "mask")
    return part(whole_mask, x.device_mesh, x.placements)  # type: ignore[attr-defined]
