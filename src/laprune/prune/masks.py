"""The derivatives: of a mask in its scores and the point it is at, of that point in all scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from laprune._mesh import everyone, is_dtensor, layout, like, local
from laprune.backends import Status
from laprune.backends._contract import OFFSET, TEMPERATURE
from laprune.backends.exchange import Exchange
from laprune.pieces import solve_pieces, vjp_pieces

if TYPE_CHECKING:
    from .budget import Budget


class Point(NamedTuple):
    """A solution in the type that masks are computed in."""

    pivot: Tensor
    b: Tensor
    t: Tensor
    level: Tensor
    """Of a mask without a temperature."""
    soft: Tensor
    """Whether there is a temperature."""
    regular: Tensor
    """Whether the mask follows its scores; at the limits it does not."""

    @classmethod
    def of(cls, state: Tensor, status: Tensor, work: torch.dtype) -> Point:
        pivot, b, t, _, level = state[0].unbind()
        regular = (status[0] == int(Status.CONVERGED)) | (status[0] == int(Status.STALLED))
        soft = regular | (status[0] == int(Status.TIED))
        # Harmless numbers where there is no temperature, so that no NaN reaches a gradient.
        pivot, b = (torch.where(soft, x, 0.0).to(work) for x in (pivot, b))
        t = torch.where(soft, t, 1.0).to(work).clamp(min=torch.finfo(work).tiny)
        return cls(pivot, b, t, level.to(work), soft, regular)


def soft_mask(score: Tensor, state: Tensor, points: dict[torch.dtype, Point]) -> Tensor:
    """sigma((score - b)/t) of what lies here, differentiable in the scores and the state."""
    here = local(score)
    if is_dtensor(score):
        state = _Shared.apply(state, layout([score]).groups)
    point = points[torch.promote_types(here.dtype, torch.float32)]
    return like(_Mask.apply(here, state, *point), score)


class _Mask(torch.autograd.Function):
    """A mask at a given point. By hand, since a model may have many small parameters: autograd
    would take five times as many operations."""

    @staticmethod
    def forward(
        ctx: Any,
        score: Tensor,
        state: Tensor,
        pivot: Tensor,
        b: Tensor,
        t: Tensor,
        level: Tensor,
        soft: Tensor,
        regular: Tensor,
    ) -> Tensor:
        z = ((score.to(t.dtype) - pivot) - b) / t
        q = 0.5 * torch.exp(-z.abs())
        ctx.save_for_backward(z, q, t, regular, state)
        p = torch.where(soft, torch.where(z > 0, 1 - q, q), level)
        return p.to(score.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError("second derivatives through a pruner are not available")
        z, q, t, regular, state = ctx.saved_tensors
        pull = torch.where(regular, grad * q / t, 0.0)
        of_state = torch.zeros_like(state)
        of_state[:, OFFSET] = -pull.sum()
        of_state[:, TEMPERATURE] = -(pull * z).sum()
        return pull.to(grad.dtype), of_state, *[None] * 6


class _Shared(torch.autograd.Function):
    """The state as used by shards of one weight: their gradients belong together."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, groups: str) -> Tensor:
        ctx.groups = groups
        return state.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Exchange(ctx.groups).add(grad), None


class Barrier(torch.autograd.Function):
    """``(budget, k, gamma, *sources) -> (state, status)`` of the scores of all sources.

    It keeps its inputs as they are, not as saved tensors, so that several losses may go back
    through it between two steps of the optimiser.
    """

    @staticmethod
    def forward(
        ctx: Any, budget: Budget, k: Tensor, gamma: Tensor, *sources: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.sources, ctx.budget = sources, budget
        ctx.versions = [x._version for x in sources]
        scores = [budget.scored(x.detach()) for x in sources]
        ctx.groups, ctx.owners = layout(scores)
        rows = [local(x).reshape(1, -1) for x in scores]
        *_, state, info = solve_pieces(rows, k, gamma, False, ctx.groups, list(ctx.owners))
        ctx.rest = (k, gamma, state.clone(), info)
        status = info[:, 0].clone()
        ctx.mark_non_differentiable(status)
        return state, status

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        k, gamma, state, info = ctx.rest
        if [x._version for x in ctx.sources] != ctx.versions:
            raise RuntimeError("a pruned parameter was changed between forward and backward")
        # Ranks see different data, and gradients are averaged over all of them, replicas included.
        exchange = Exchange(everyone(ctx.sources))
        grad = exchange.add(grad) / exchange.size
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.sources]
            scores = [ctx.budget.scored(x) for x in inputs]
        rows = [local(x.detach()).reshape(1, -1) for x in scores]
        zeros = [torch.zeros_like(x) for x in rows]
        *pulled, _, _ = vjp_pieces(
            rows, k, gamma, False, ctx.groups, list(ctx.owners), state, info, zeros, grad
        )
        along = [
            like(d.reshape(local(s.detach()).shape), s.detach())
            for d, s in zip(pulled, scores, strict=True)
        ]
        found = torch.autograd.grad(scores, inputs, along) if not ctx.budget.learned else along
        return None, None, None, *found
