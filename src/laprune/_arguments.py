"""Checks of what users pass, shared by all functions."""

from __future__ import annotations

import math
from numbers import Real
from typing import Literal, overload

import torch
from torch import Tensor

Mode = Literal["soft", "ste"]
Number = float | Tensor

_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@overload
def number(
    x: Number,
    name: str,
    largest: float,
    shape: torch.Size,
    like: Tensor,
    as_is: Literal[False] = ...,
) -> Tensor: ...


@overload
def number(
    x: Number, name: str, largest: float, shape: torch.Size, like: Tensor, as_is: bool
) -> Tensor | float: ...


def number(
    x: Number, name: str, largest: float, shape: torch.Size, like: Tensor, as_is: bool = False
) -> Tensor | float:
    """A number or a tensor that broadcasts to ``shape``, as one float64 for each of the rows.

    ``as_is``: a positive number stays one.
    """
    # The usual types first: an abstract class takes longer to ask.
    plain = type(x) in (float, int) or (not isinstance(x, Tensor | bool) and isinstance(x, Real))
    if plain or isinstance(x, torch.SymInt | torch.SymFloat):
        if not 0 <= x <= largest:
            raise ValueError(f"{name} must lie in [0, {largest:g}], got {x}")
        if plain:
            x = float(x)
            if as_is and x > 0:
                return x
    elif not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a number or a tensor, got {type(x).__name__}")
    device, count = like.device, math.prod(shape)
    work = torch.float32 if device.type == "mps" else torch.float64
    if not isinstance(x, Tensor):
        return torch.full((count,), x, dtype=work, device=device)
    if x.dtype == torch.bool or x.is_complex():
        raise TypeError(f"{name} must be real, got {x.dtype}")
    # A copy: a buffer may change between forward and backward.
    x = broadcast(x.to(device, work, copy=True), shape, name)
    return x.reshape(count)


def broadcast(x: Tensor, shape: torch.Size, name: str) -> Tensor:
    try:
        return x.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} does not broadcast to {tuple(shape)}"
        ) from None


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The scores, at ``-inf`` where the mask is False."""
    if mask is None:
        return scores
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a boolean tensor, got {given}")
    return scores.masked_fill(~broadcast(mask, scores.shape, "mask"), -torch.inf)


def check_floating(x: Tensor, name: str) -> None:
    given = x.dtype if isinstance(x, Tensor) else type(x).__name__
    if given not in _FLOATING:
        raise TypeError(
            f"{name} must be a float64, float32, float16 or bfloat16 tensor, got {given}"
        )


def check_gate(values: Tensor, scores: Tensor | None) -> None:
    check_floating(values, "values")
    if scores is None:
        return
    check_floating(scores, "scores")
    if scores.shape != values.shape:
        raise ValueError(
            f"scores must have the shape of values, {tuple(values.shape)}, "
            f"got {tuple(scores.shape)}"
        )


def check_dim(scores: Tensor, dim: int) -> None:
    if not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    if scores.dim() == 0 or not -scores.dim() <= dim < scores.dim():
        raise ValueError(f"dim must be a dimension of scores {tuple(scores.shape)}, got {dim}")


def check_mode(mode: str) -> None:
    if mode not in ("soft", "ste"):
        raise ValueError(f"mode must be 'soft' or 'ste', got {mode!r}")
