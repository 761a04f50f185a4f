"""The LaPrune solver as its paper describes it, kept for comparison only.

Find a barrier b and a temperature t = exp(tau) such that the mask p = sigma((r - b)/t), with sigma
the Laplace CDF, has sum p = k and sum p^2 = beta k, where a = k/n and beta = a + (1 - a) gamma.
A Gaussian guess starts 30 clipped Newton steps in (b, tau); rows that miss the tolerance are solved
again by nested bisection. The gradient is implicit and evaluated in closed form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from laprune.baselines._common import constant_mask, rows_of
from laprune.baselines.hard import hard_mask

__all__ = ["PaperSolution", "gaussian_start", "newton_solve", "paper_solve", "paper_topk"]

# Constants of the paper, "Solver Tolerances and Clipping", "Bisection Fallback" and
# "Asymptotic Warm Start".
NEWTON_STEPS = 30
FREEZE_TOL = 1e-7
FALLBACK_TOL = 1e-4
TAU_MIN, TAU_MAX = -12.0, 8.0
MAX_TAU_STEP = 1.5
MAX_B_STEP_STDS = 8.0
OUTER_BISECTIONS = INNER_BISECTIONS = 48
BRACKET_WIDTHS = 40.0
MIN_STD = 1e-9
MIN_DENSITY = 1e-4
MIN_START_T = 1e-3


class PaperSolution(NamedTuple):
    """What the paper's solver found, one entry for each row of the scores."""

    mask: Tensor
    """p, the shape of the scores."""
    barrier: Tensor
    """b, the leading shape of the scores; NaN at the endpoints of k and gamma."""
    temperature: Tensor
    """t; NaN at the endpoints."""
    iterations: Tensor
    """Newton steps taken before the row was frozen, 30 where it never was."""
    fallback: Tensor
    """True where Newton missed the tolerance, whether or not bisection was then allowed."""
    budget_residual: Tensor
    """|sum p - k| / k of the returned (b, t)."""
    hardness_residual: Tensor
    """|sum p^2 - beta k| / (beta k) of the returned (b, t)."""


def _laplace(r: Tensor, b: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Standardised scores z, mask p = sigma(z) and density d = sigma'(z)."""
    z = (r - b) / t
    d = 0.5 * torch.exp(-z.abs())
    return z, torch.where(z > 0, 1 - d, d), d


def _total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _off_zero(x: Tensor) -> Tensor:
    """Keep a divisor away from zero. The paper is silent on a singular Jacobian."""
    tiny = torch.finfo(x.dtype).tiny
    return torch.where(x.abs() < tiny, torch.full_like(x, tiny), x)


def _row_std(r: Tensor) -> Tensor:
    return r.std(-1, keepdim=True, unbiased=False)


def gaussian_start(r: Tensor, k: float, gamma: float) -> tuple[Tensor, Tensor]:
    """Guess (b, tau) as if the scores of each row were Gaussian.

    >>> b, tau = gaussian_start(torch.tensor([[-1.0, 1.0]]), 1, 0.5)
    >>> b.tolist(), round(tau.exp().item(), 3)
    ([[0.0]], 0.418)
    """
    a = k / r.shape[-1]
    z_a = -torch.special.ndtri(torch.full_like(r[:1, :1], a))
    normal_density = torch.exp(-z_a * z_a / 2) / math.sqrt(2 * math.pi)
    s = _row_std(r)
    density = (normal_density / s.clamp_min(MIN_STD)).clamp_min(MIN_DENSITY)
    t = (4 * a * (1 - a) * (1 - gamma) / (3 * density)).clamp_min(MIN_START_T)
    return r.mean(-1, keepdim=True) + s * z_a, t.log()


def _within(f1: Tensor, f2: Tensor, k: float, beta: float, tol: float) -> Tensor:
    return (f1.abs() < tol * max(k, 1.0)) & (f2.abs() < tol * max(beta * k, 1.0))


def newton_solve(
    r: Tensor, b: Tensor, tau: Tensor, k: float, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve sum p = k, sum p^2 = beta k by 30 clipped Newton steps in (b, tau) from a guess.

    Converged rows are frozen with `torch.where` and the number of steps is fixed, so that
    `torch.compile` sees no data-dependent control flow.

    Args:
        r: scores `(rows, n)`.
        b: barrier of each row to start from, `(rows, 1)`.
        tau: log-temperature of each row to start from, `(rows, 1)`.
        k: budget.
        beta: second moment per unit of budget.

    Returns:
        b, tau and the steps each row took before it was frozen, all `(rows, 1)`.

    >>> r = torch.linspace(-2, 2, 8, dtype=torch.float64)[None]
    >>> b, tau, steps = newton_solve(r, *gaussian_start(r, 4, 0.5), k=4, beta=0.75)
    >>> bool(b.abs() < 1e-6), bool(steps < 10)
    (True, True)
    """
    max_b_step = MAX_B_STEP_STDS * _row_std(r) + 1
    frozen = torch.zeros_like(b, dtype=torch.bool)
    steps = torch.zeros_like(b, dtype=torch.int32)
    for _ in range(NEWTON_STEPS):
        t = tau.exp()
        z, p, d = _laplace(r, b, t)
        f1, f2 = _total(p) - k, _total(p * p) - beta * k
        frozen = frozen | _within(f1, f2, k, beta, FREEZE_TOL)
        s0, s1, u0, u1 = _total(d), _total(d * z), _total(p * d), _total(p * d * z)
        det = _off_zero(2 * (s0 * u1 - s1 * u0))
        db = t * (2 * u1 * f1 - s1 * f2) / det
        dtau = (s0 * f2 - 2 * u0 * f1) / det
        db = torch.minimum(torch.maximum(db, -max_b_step), max_b_step)
        new_tau = (tau + dtau.clamp(-MAX_TAU_STEP, MAX_TAU_STEP)).clamp(TAU_MIN, TAU_MAX)
        b = torch.where(frozen, b, b + db)
        tau = torch.where(frozen, tau, new_tau)
        steps = steps + (~frozen).to(steps.dtype)
    return b, tau, steps


@functools.cache
def _compiled_newton() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(newton_solve)


def _bisect_barrier(r: Tensor, t: Tensor, k: float) -> Tensor:
    """The barrier with mass k at a given temperature, by bisection."""
    margin = BRACKET_WIDTHS * (t + _row_std(r)) + 1
    low, high = r.amin(-1, keepdim=True) - margin, r.amax(-1, keepdim=True) + margin
    for _ in range(INNER_BISECTIONS):
        middle = (low + high) / 2
        too_much = _total(_laplace(r, middle, t)[1]) > k
        low = torch.where(too_much, middle, low)
        high = torch.where(too_much, high, middle)
    return (low + high) / 2


def _bisect(r: Tensor, k: float, beta: float) -> tuple[Tensor, Tensor]:
    """(b, tau) by bisection over tau, with a bisection over b inside."""
    low = torch.full_like(r[:, :1], TAU_MIN)
    high = torch.full_like(low, TAU_MAX)
    for _ in range(OUTER_BISECTIONS):
        middle = (low + high) / 2
        t = middle.exp()
        p = _laplace(r, _bisect_barrier(r, t, k), t)[1]
        too_hard = _total(p * p) > beta * k
        low = torch.where(too_hard, middle, low)
        high = torch.where(too_hard, high, middle)
    tau = (low + high) / 2
    return _bisect_barrier(r, tau.exp(), k), tau


class _Solved(NamedTuple):
    b: Tensor
    t: Tensor
    steps: Tensor
    missed: Tensor


def _solve(r: Tensor, k: float, gamma: float, fallback: bool, compiled: bool) -> _Solved:
    """Newton on every row, then bisection on the rows that missed the tolerance."""
    a = k / r.shape[-1]
    beta = a + (1 - a) * gamma
    newton = _compiled_newton() if compiled else newton_solve
    b, tau, steps = newton(r, *gaussian_start(r, k, gamma), k, beta)
    p = _laplace(r, b, tau.exp())[1]
    # A NaN residual is a miss too, hence the negation.
    missed = ~_within(_total(p) - k, _total(p * p) - beta * k, k, beta, FALLBACK_TOL)
    if fallback and bool(missed.any()):
        rows = missed.squeeze(-1)
        b_rows, tau_rows = _bisect(r[rows], k, beta)
        b = b.masked_scatter(missed, b_rows)
        tau = tau.masked_scatter(missed, tau_rows)
    return _Solved(b, tau.exp(), steps, missed)


class _PaperMask(torch.autograd.Function):
    """Mask of the solved (b, t), with the implicit gradient in the paper's closed form."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, b: Tensor, t: Tensor) -> Tensor:
        ctx.save_for_backward(r, b, t)
        return _laplace(r, b, t)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        r, b, t = ctx.saved_tensors
        z, p, d = _laplace(r, b, t)
        s0, s1, u0, u1 = _total(d), _total(d * z), _total(p * d), _total(p * d * z)
        g0, g1 = _total(g * d), _total(g * d * z)
        det = _off_zero(s0 * u1 - s1 * u0)
        correction = (g0 * (u1 - s1 * p) + g1 * (s0 * p - u0)) / det
        return d / t * (g - correction), None, None


def _endpoint(scores: Tensor, k: float, gamma: float) -> Tensor | None:
    """The mask where no finite temperature is solved for, else `None`."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be between 0 and 1, got {gamma}")
    constant = constant_mask(scores, k)
    if constant is not None:
        return constant
    everywhere = torch.ones_like(scores, dtype=torch.bool)
    if gamma == 0:
        return scores.masked_fill(everywhere, k / scores.shape[-1])
    if gamma == 1:
        return scores.masked_fill(everywhere, 0.0) + hard_mask(scores.detach(), k)
    return None


def paper_topk(
    scores: Tensor, k: float, gamma: float = 0.9, *, fallback: bool = True, compiled: bool = False
) -> Tensor:
    """Mask with sum p = k and sum p^2 = (a + (1 - a) gamma) k, solved as in the LaPrune paper.

    Args:
        scores: any shape, rows along the last dimension; differentiable.
        k: budget, 0 to n. `k = 0` gives zeros and `k = n` gives ones.
        gamma: hardness, 0 (uniform mask) to 1 (hard top-k); both ends have a zero gradient.
        fallback: solve the rows Newton missed by 48 x 48 nested bisection. Without it there is no
            data-dependent control flow, and a missed row keeps its last Newton iterate.
        compiled: run the Newton loop through `torch.compile`.

    >>> p = paper_topk(torch.tensor([3.0, 1.0, 0.5, -1.0], dtype=torch.float64), k=2, gamma=0.5)
    >>> round(p.sum().item(), 6), round((p**2).sum().item(), 6)
    (2.0, 1.5)
    """
    r = rows_of(scores, k)
    mask = _endpoint(r, k, gamma)
    if mask is None:
        solved = _solve(r.detach(), k, gamma, fallback, compiled)
        mask = _PaperMask.apply(r, solved.b, solved.t)
    return mask.reshape(scores.shape).to(scores.dtype)


def paper_solve(
    scores: Tensor, k: float, gamma: float = 0.9, *, fallback: bool = True
) -> PaperSolution:
    """Mask of `paper_topk` with the solver's account of each row; not differentiable.

    >>> solution = paper_solve(torch.linspace(-2, 2, 9), k=3, gamma=0.3)
    >>> solution.fallback.item(), solution.iterations.item() <= 30
    (False, True)
    """
    lead = scores.shape[:-1]
    r = rows_of(scores.detach(), k)
    a = k / r.shape[-1]
    target = (a + (1 - a) * gamma) * k
    mask = _endpoint(r, k, gamma)
    if mask is None:
        b, t, steps, missed = _solve(r, k, gamma, fallback, compiled=False)
        mask = _laplace(r, b, t)[1]
    else:
        b = t = torch.full_like(r[:, :1], math.nan)
        steps = torch.zeros_like(b, dtype=torch.int32)
        missed = torch.zeros_like(b, dtype=torch.bool)
    exact = mask.double()
    budget_residual = (exact.sum(-1) - k).abs() / max(k, MIN_STD)
    hardness_residual = (exact.square().sum(-1) - target).abs() / max(target, MIN_STD)
    return PaperSolution(
        mask.reshape(scores.shape).to(scores.dtype),
        *(x.reshape(lead) for x in (b, t, steps, missed, budget_residual, hardness_residual)),
    )
