"""Rows in pieces as PyTorch sees them: two custom ops and their autograd function.

The counterpart of :mod:`laprune.op` for rows whose scores lie in several tensors or on several
ranks. Process groups travel by name, so that the ops are opaque to tracing too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backends import STATE_SIZE
from .op import Vjp, _report


@torch.library.custom_op("laprune::solve_pieces", mutates_args=())
def solve_pieces(
    pieces: Sequence[Tensor],
    k: Tensor,
    hardness: Tensor,
    fixed: bool,
    groups: str,
    owners: Sequence[int],
) -> list[Tensor]:
    """Pieces (rows, n_i) to their masks, then state and info."""
    from .backends.exchange import Exchange
    from .backends.pieces import solve

    masks, state, info = solve(pieces, k, hardness, fixed, Exchange(groups), owners)
    if state.device.type == "cpu":
        _report(info)
    return [*masks, state, info]


@solve_pieces.register_fake
def _(pieces, k, hardness, fixed, groups, owners):  # type: ignore[no-untyped-def]
    rows = k.shape[0]
    masks = [torch.empty_like(x) for x in pieces]
    return [*masks, k.new_empty((rows, STATE_SIZE)), k.new_empty((rows, 3), dtype=torch.int32)]


@torch.library.custom_op("laprune::vjp_pieces", mutates_args=())
def vjp_pieces(
    pieces: Sequence[Tensor],
    k: Tensor,
    hardness: Tensor,
    fixed: bool,
    groups: str,
    owners: Sequence[int],
    state: Tensor,
    info: Tensor,
    grads: Sequence[Tensor],
    grad_state: Tensor | None,
) -> list[Tensor]:
    """Gradients of the pieces, then of k and hardness."""
    from .backends.exchange import Exchange
    from .backends.pieces import vjp

    scores, dk, dh = vjp(
        pieces, k, hardness, fixed, Exchange(groups), owners, state, info, grads, grad_state
    )
    return [*scores, dk, dh]


@vjp_pieces.register_fake
def _(pieces, k, hardness, fixed, groups, owners, state, info, grads, grad_state):  # type: ignore[no-untyped-def]
    return [*(torch.empty_like(x) for x in pieces), torch.empty_like(k), torch.empty_like(hardness)]


@torch.compiler.allow_in_graph
def topk_pieces(
    k: Tensor, hardness: Tensor, fixed: bool, groups: str, owners: tuple[int, ...], *pieces: Tensor
) -> tuple[Tensor, ...]:
    """:func:`solve_pieces`, differentiable in the pieces, k and hardness.

    On several ranks the loss is the sum of what every rank makes of its own masks: the gradients of
    k and hardness are those of the whole, the same on every rank, and the state carries none.
    """
    return TopKPieces.apply(k, hardness, fixed, groups, owners, *pieces)


class TopKPieces(torch.autograd.Function):
    """``(k, hardness, fixed, groups, owners, *pieces) -> (*masks, state, info)``."""

    @staticmethod
    def forward(k, hardness, fixed, groups, owners, *pieces):  # type: ignore[no-untyped-def]
        return tuple(solve_pieces(list(pieces), k, hardness, fixed, groups, list(owners)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        k, hardness, ctx.fixed, ctx.groups, ctx.owners, *pieces = inputs
        *_, state, info = output
        ctx.mark_non_differentiable(info, *([state] if ctx.groups else []))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(k, hardness, state, info, *pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        k, hardness, state, info, *pieces = ctx.saved_tensors
        *given, grad_state, _ = grads
        if ctx.groups:
            grad_state = None
        upstream = [
            torch.zeros_like(x) if g is None else g for x, g in zip(pieces, given, strict=True)
        ]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if ctx.groups:
                raise NotImplementedError("second derivatives across ranks are not available")
            return _differentiable(ctx, k, hardness, state, info, pieces, upstream, grad_state)
        *scores, dk, dh = vjp_pieces(
            pieces, k, hardness, ctx.fixed, ctx.groups, list(ctx.owners), state, info, upstream,
            grad_state,
        )  # fmt: skip
        return dk, dh, None, None, None, *scores

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        raise NotImplementedError(f"{_NEITHER}: call it for each budget, or soft_topk on rows")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(f"{_NEITHER}: soft_topk of one row has the latter")


_NEITHER = "a budget over several tensors or ranks has neither vmap nor forward mode"


def _differentiable(
    ctx: Any,
    k: Tensor,
    hardness: Tensor,
    state: Tensor,
    info: Tensor,
    pieces: list[Tensor],
    upstream: list[Tensor],
    grad_state: Tensor | None,
) -> tuple[Any, ...]:
    """The gradient by the operator's own function, over all pieces put together."""
    row, g = torch.cat(pieces, -1), torch.cat(upstream, -1)
    dr, _, dk, dh = Vjp.apply(
        row, k, hardness, None, False, ctx.fixed, state, info[:, :2].contiguous(), g, grad_state
    )
    parts = dr.split([x.shape[-1] for x in pieces], -1)
    scores = (d.to(x.dtype) for d, x in zip(parts, pieces, strict=True))
    return dk, dh, None, None, None, *scores
