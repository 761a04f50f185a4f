"""The operator as PyTorch sees it: two custom ops, and the autograd functions around them.

The ops are opaque to tracing (``torch.compile``, ``export``, fake tensors) and go to whichever
backend serves the device; where nothing traces, the backend is called without their ceremony. The
autograd functions hold no mathematics: they say which op is whose
derivative, and leave second derivatives and forward mode to the differentiable formulas of the
reference.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, overload

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C._functorch import is_legacy_batchedtensor, unwrap_if_dead
from torch.autograd import forward_ad

from .backends import INFO_SIZE, STATE_SIZE, Status, cpu, cuda, pick, reference


@torch.library.custom_op("laprune::solve", mutates_args=())
def solve_op(
    scores: Tensor, k: Tensor, hardness: Tensor, values: Tensor | None, gated: bool, fixed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of scores (rows, n) to (mask or mask * values, state, info)."""
    return _solve(scores, k, hardness, values, gated, fixed)


def _solve(
    scores: Tensor,
    k: Tensor | float,
    hardness: Tensor | float,
    values: Tensor | None,
    gated: bool,
    fixed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    on_host = scores.is_cpu
    if on_host:
        _check_rows(scores.shape[-1], k, hardness, fixed)
    out, state, info = pick(scores).solve(scores, k, hardness, values, gated, fixed)
    if on_host:
        _report(info)
    return out, state, info


@solve_op.register_fake
def _(scores, k, hardness, values, gated, fixed):  # type: ignore[no-untyped-def]
    rows = scores.shape[0]
    state = k.new_empty((rows, STATE_SIZE))
    return torch.empty_like(scores), state, k.new_empty((rows, INFO_SIZE), dtype=torch.int32)


@torch.library.custom_op("laprune::vjp", mutates_args=())
def vjp_op(
    scores: Tensor,
    k: Tensor,
    hardness: Tensor,
    values: Tensor | None,
    gated: bool,
    fixed: bool,
    state: Tensor,
    info: Tensor,
    grad_out: Tensor,
    grad_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of scores, values (empty if there are none), k and hardness."""
    dscores, dvalues, dk, dhardness = pick(scores).vjp(
        scores, k, hardness, values, gated, fixed, state, info, grad_out, grad_state
    )
    return dscores, scores.new_empty(0) if dvalues is None else dvalues, dk, dhardness


@vjp_op.register_fake
def _(scores, k, hardness, values, gated, fixed, state, info, grad_out, grad_state):  # type: ignore[no-untyped-def]
    dvalues = scores.new_empty(0) if values is None else torch.empty_like(values)
    return torch.empty_like(scores), dvalues, torch.empty_like(k), torch.empty_like(hardness)


_TYPES = (Tensor, torch.nn.Parameter)


def _is_traced(scores: Tensor) -> bool:
    """Whether anything but plain eager execution sees these scores."""
    return (
        torch.compiler.is_compiling()
        or type(scores) not in _TYPES
        or scores.is_meta
        or _are_functorch_transforms_active()
        or _len_torch_dispatch_stack() > 0
        or is_legacy_batchedtensor(scores)  # is_grads_batched
    )


def takes_numbers(scores: Tensor) -> bool:
    """Whether k and the hardness of these scores may be numbers: the backend needs no tensors."""
    return not _is_traced(scores) and pick(scores) in (cpu, cuda)


def _check_rows(n: int, k: Tensor | float, hardness: Tensor | float, fixed: bool) -> None:
    """Refuse values that only real tensors show; elsewhere such rows come back as NaN."""
    name, most = ("temperature", torch.inf) if fixed else ("gamma", 1.0)
    for label, x, largest in (("k", k, float(n)), (name, hardness, most)):
        if not isinstance(x, Tensor) or not len(x):
            continue
        low, high = (bound.item() for bound in x.aminmax())
        if not (low >= 0 and high <= largest):  # NaN is neither
            wrong = ~((x >= 0) & (x <= largest))
            raise ValueError(f"{label} must lie in [0, {largest:g}], got {x[wrong][0].item():g}")


def _report(info: Tensor) -> None:
    if not len(info) or int(info[:, 0].max()) < Status.INFEASIBLE:
        return
    for status, what in (
        (Status.STALLED, "did not converge"),
        (Status.INFEASIBLE, "have fewer eligible entries than k; all of them are selected"),
    ):
        count = int((info[:, 0] == status).sum())
        if count:
            warnings.warn(
                f"laprune: {count} of {len(info)} rows {what}", RuntimeWarning, stacklevel=2
            )


# Dynamo refuses autograd functions with a jvp; in the graph, autograd itself traces this one.
@torch.compiler.allow_in_graph
def topk(
    scores: Tensor,
    k: Tensor | float,
    hardness: Tensor | float,
    values: Tensor | None,
    gated: bool,
    fixed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`solve_op` with every derivative; where it :func:`takes_numbers`, also of numbers."""
    function = TopK if _is_traced(scores) else _Eager
    return function.apply(scores, k, hardness, values, gated, fixed)


def eager_mask(
    scores: Tensor,
    k: Tensor | float,
    hardness: Tensor | float,
    values: Tensor | None,
    gated: bool,
    fixed: bool,
) -> Tensor:
    """The mask of scores ``(..., n)`` for which numbers are numbers (:func:`takes_numbers`)."""
    if forward_ad._current_level >= 0:
        out = _Eager.apply(_rows(scores), k, hardness, _rows(values), gated, fixed)[0]
        return out.reshape(scores.shape)
    return _Mask.apply(scores, k, hardness, values, gated, fixed)


def plain_mask(
    scores: Tensor, k: Tensor | float, hardness: Tensor | float, gated: bool, fixed: bool
) -> Tensor | None:
    """:func:`eager_mask` of what a :class:`cuda.Routine` serves; None for all else.

    Nothing is checked that would have to be said: what is wrong here, the usual way refuses.
    """
    if (
        _is_traced(scores)
        or type(k) not in (float, int)
        or type(hardness) not in (float, int)
        or forward_ad._current_level >= 0
        or pick(scores) is not cuda
    ):
        return None
    routine = cuda.routine(scores.device.index, scores.shape, scores.dtype, gated)
    if routine is None or not (0 < k <= routine.n and 0 < hardness <= (torch.inf if fixed else 1)):
        return None
    return _plain(unwrap_if_dead(scores), (routine, k, hardness, gated, fixed))


@overload
def _rows(x: Tensor) -> Tensor: ...
@overload
def _rows(x: None) -> None: ...
def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1, x.shape[-1])


class TopK(torch.autograd.Function):
    """``(scores, k, hardness, values, gated, fixed) -> (out, state, info)``, differentiable."""

    @staticmethod
    def forward(scores, k, hardness, values, gated, fixed):  # type: ignore[no-untyped-def]
        run = solve_op if _is_traced(scores) else _solve
        return run(scores, k, hardness, values, gated, fixed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(*_save(ctx, inputs, output))

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None, _: None
    ) -> tuple[Any, ...]:
        scores, k, hardness, values, state, info = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(scores)
        # Without a graph of its own, the gradient needs no autograd function.
        plain = not (torch.is_grad_enabled() or _is_traced(grad_out))
        plain = plain and (grad_state is None or not _is_traced(grad_state))
        run = pick(scores).vjp if plain else Vjp.apply
        given_k, given_hardness = _given(ctx, k, hardness, state, plain)
        ds, dv, dk, dh = run(
            scores, given_k, given_hardness, values, ctx.gated, ctx.fixed, state, info, grad_out,
            grad_state,
        )  # fmt: skip
        dk, dh = None if k is None else dk, None if hardness is None else dh
        return ds, dk, dh, dv if values is not None else None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor, None]:
        scores, k, hardness, values, state, info = ctx.saved_tensors
        k, hardness = _given(ctx, k, hardness, state, as_is=False)
        out, dstate = reference.jvp(
            scores, k, hardness, values, ctx.gated, ctx.fixed, state, info, tangents[:4]
        )
        return out, dstate, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        flat, unflatten = _flatten(info.batch_size, in_dims, args)
        return tuple(unflatten(x) for x in TopK.apply(*flat)), (0, 0, 0)


def _save(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Save what every derivative needs; a number is no tensor."""
    scores, k, hardness, values, ctx.gated, ctx.fixed = inputs
    ctx.k = ctx.hardness = None
    if isinstance(k, float):
        ctx.k, k = k, None
    if isinstance(hardness, float):
        ctx.hardness, hardness = hardness, None
    saved = scores, k, hardness, values, output[1], output[2]
    ctx.save_for_backward(*saved)
    return saved


def _given(
    ctx: Any, k: Tensor | None, hardness: Tensor | None, state: Tensor, as_is: bool
) -> tuple[Any, Any]:
    """k and the hardness of a row, of which numbers were not saved as tensors."""
    if k is None:
        k = ctx.k if as_is else state.new_full((len(state),), ctx.k)
    if hardness is None:
        hardness = ctx.hardness if as_is else state.new_full((len(state),), ctx.hardness)
    return k, hardness


class _Eager(torch.autograd.Function):
    """:class:`TopK` where nothing traces: an older form of function, with less ceremony."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _solve(*inputs)
        TopK.setup_context(ctx, inputs, output)
        return output

    backward = TopK.backward
    jvp = TopK.jvp


class _Mask(torch.autograd.Function):
    """:class:`_Eager` without state and info, and without a forward mode. Scores have any shape: to
    autograd, making rows of them is work."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _solve(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        scores, k, hardness, values, state, info = ctx.saved_tensors
        backend = pick(scores)
        if backend is reference or torch.is_grad_enabled() or _is_traced(grad_out):
            given = _given(ctx, k, hardness, state, as_is=False)
            ds, dv, dk, dh = _pull(scores, *given, values, ctx.gated, ctx.fixed, grad_out)
        else:
            ds, dv, dk, dh = backend.vjp(
                scores, *_given(ctx, k, hardness, state, as_is=True), values, ctx.gated, ctx.fixed,
                state, info, grad_out, None,
            )  # fmt: skip
        return ds, None if k is None else dk, None if hardness is None else dh, dv, None, None


class _Plain(torch.autograd.Function):
    """:class:`_Mask` as a :class:`cuda.Routine` finds it: ``(scores, call) -> out``."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, call: tuple[cuda.Routine, float, float, bool, bool]
    ) -> Tensor:
        routine, k, hardness, _, fixed = call
        out, state = routine.solve(scores, k, hardness, fixed)
        ctx.save_for_backward(scores, state)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        scores, state = ctx.saved_tensors
        routine, k, hardness, gated, fixed = ctx.call
        if torch.is_grad_enabled() or _is_traced(grad_out):
            k, hardness = (state.new_full((routine.rows,), x) for x in (k, hardness))
            return _pull(scores, k, hardness, None, gated, fixed, grad_out)[0], None
        return routine.vjp(scores, k, hardness, fixed, state, grad_out), None


# Without what a function does at every call for functorch, which is not there.
_plain: Any = super(torch.autograd.Function, _Plain).apply


def _pull(
    scores: Tensor,
    k: Tensor,
    hardness: Tensor,
    values: Tensor | None,
    gated: bool,
    fixed: bool,
    grad_out: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The gradient of a mask, with a graph of its own: it must know where the state comes from."""
    given = (_rows(scores), k, hardness, _rows(values), gated, fixed)
    _, state, info = topk(*given)
    ds, dv, dk, dh = Vjp.apply(*given, state, info, _rows(grad_out), None)
    return ds.reshape(scores.shape), None if values is None else dv.reshape(scores.shape), dk, dh


class Vjp(torch.autograd.Function):
    """The gradient op; its own derivatives are those of the reference formula."""

    @staticmethod
    def forward(scores, k, hardness, values, gated, fixed, state, info, grad_out, grad_state):  # type: ignore[no-untyped-def]
        return vjp_op(scores, k, hardness, values, gated, fixed, state, info, grad_out, grad_state)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.gated, ctx.fixed = inputs[4], inputs[5]
        ctx.save_for_backward(*inputs[:4], *inputs[6:])
        ctx.save_for_forward(*inputs[:4], *inputs[6:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        formula, tensors = _formula(ctx)
        present = [x for x in tensors if x is not None]
        _, pull = torch.func.vjp(formula, *present)  # type: ignore[misc]
        grads = iter(pull(tuple(cotangents)))
        ds, dk, dh, dv, dstate, dg, dgs = (None if x is None else next(grads) for x in tensors)
        return ds, dk, dh, dv, None, None, dstate, None, dg, dgs

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        # The pullback is linear, so its own pullback is the tangent map; a forward-mode call would
        # nest inside the one that brought us here, which torch refuses.
        formula, tensors = _formula(ctx)
        given = (*tangents[:4], tangents[6], *tangents[8:])
        directions = tuple(
            torch.zeros_like(x) if dx is None else dx
            for x, dx in zip(tensors, given, strict=True)
            if x is not None
        )
        present = [x for x in tensors if x is not None]
        outputs, pull = torch.func.vjp(formula, *present)  # type: ignore[misc]
        _, push = torch.func.vjp(pull, tuple(map(torch.zeros_like, outputs)))  # type: ignore[misc]
        return push(directions)[0]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        flat, unflatten = _flatten(info.batch_size, in_dims, args)
        ds, dv, dk, dh = Vjp.apply(*flat)
        empty = flat[3] is None
        dims = (0, None if empty else 0, 0, 0)
        return (unflatten(ds), dv if empty else unflatten(dv), unflatten(dk), unflatten(dh)), dims


# torch asks for the signature of forward at every call; kept here, it is not worked out each time.
for _function in (TopK, Vjp):
    _function.forward.__signature__ = inspect.signature(_function.forward)  # type: ignore[union-attr]


def _formula(ctx: Any) -> tuple[Any, tuple[Tensor | None, ...]]:
    """The reference gradient as a function of the tensors it is differentiable in."""
    scores, k, hardness, values, state, info, grad_out, grad_state = ctx.saved_tensors

    def formula(*tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        s, k_, h = next(rest), next(rest), next(rest)
        v = None if values is None else next(rest)
        st, g = next(rest), next(rest)
        gs = None if grad_state is None else next(rest)
        ds, dv, dk, dh = reference.vjp(s, k_, h, v, ctx.gated, ctx.fixed, st, info, g, gs)
        return ds, s.new_empty(0) if dv is None else dv, dk, dh

    return formula, (scores, k, hardness, values, state, grad_out, grad_state)


def _flatten(
    size: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], Any]:
    """Fold the mapped dimension into the rows."""

    def fold(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.reshape(size * x.shape[1], *x.shape[2:])

    flat = tuple(fold(x, dim) for x, dim in zip(args, in_dims, strict=True))
    return flat, lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:])
