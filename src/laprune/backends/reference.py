"""The mathematics of the operator, in plain torch: the oracle of every backend, and their fallback.

A row has scores ``r``, a budget ``k`` and a hardness ``gamma``; ``n`` counts the scores that may be
selected (the others are ``-inf``) and ``a = k/n``. With the Laplace CDF ``sigma`` the mask is

    p = sigma(z),  z = (r - b)/t      with      sum p = k,   sum p^2 = (a + (1-a) gamma) k.

Everything is said through one quantity without cancellation,

    q = exp(-|z|)/2,    p = q where z <= 0,  1 - q where z > 0,    sigma'(z) = q.

**Budget.** With N the number of scores above b, ``P = sum_{z<=0} q + max(N-k, 0)`` and ``M =
sum_{z>0} q + max(k-N, 0)`` satisfy ``P - M = sum p - k``. We solve ``e1 = log P - log M = 0``,
which is exactly linear in b inside a gap between scores.

**Hardness.** With ``V = sum q(1-q) = sum p(1-p)`` and ``C = sum (p - mean p)^2``, a mask on its
budget has ``gamma = C/(C+V)``. We solve ``e2 = log C - log V - logit(gamma) = 0``: close to
linear in log t at both ends, and as sharp for ``1 - gamma`` as for ``gamma``.

**Start.** A few counts of the scores above a cut locate the barrier, and the density of the scores
there gives a temperature. A long row is solved on a sample first.

**Iteration.** Newton's method in ``(b, log t)``, one read of the row per pass. Eliminating b
gives the reduced residual ``R = e2 - (e2_b/e1_b) e1`` and its slope in log t, which is negative.
The temperature moves only when the barrier is solved for the present t, or nearly so; then the
sign of R also moves a bracket of log t, and a step that leaves it, or does not shrink inside it,
bisects. A step in log t is at most 3, and smaller downwards where the barrier is uncertain; b
follows linearly in t, as it does at both ends. In the gap that parts the k largest scores from
the others a temperature that is certainly too small is raised at once. Otherwise only the barrier
moves, inside a bracket of its own. The scores are measured from a ``pivot``, a score near b, so
that b and t keep their digits however far the scores lie from zero.

**Limits.** When all weight sits on one score, or on equal ones, no smaller t changes p: a row
whose gamma is larger than that allows stops there (``Status.TIED``).

**Gradient.** The implicit function theorem on the two sums, with weights q and weighted means:

    dr = (q/t)(g - c0 - c1 p),   c1 = Cov_q(z, g)/Cov_q(z, p),   c0 = mean_q(g) - c1 mean_q(p),
    dk = c0 + c1 (2a + (1-2a) gamma)/2,    dgamma = c1 k (1-a)/2.

With a fixed temperature only the budget constrains: ``c1 = 0``, ``dk = c0`` and
``dt = (c0 sum q z - sum q z g)/t``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ._contract import MEAN_P, OFFSET, PIVOT, TEMPERATURE, Status

MAX_PASSES = 100
PATIENCE = 16  # passes after which a temperature step needs a solved barrier
MAX_STEP = 3.0  # largest step in log t
SATURATED = 45.0  # exp(-45) is nothing beside 1
MAX_Z = {torch.float64: 700.0, torch.float32: 80.0}  # |z| is cut here, before exp underflows
TOLERANCE = {torch.float64: (2.5e-13, 1e-8), torch.float32: (4e-7, 1e-5)}  # mass, hardness
LONG = 1 << 16  # rows longer than this start from a sample
SAMPLE_RATIO = 256
MIN_SAMPLE = 2048
ROUNDS = 4  # counts that locate the barrier
MIN_DOUBT = 8.0  # least k (1-a) of a sample that says anything


class _Sums(NamedTuple):
    """What one pass over the rows yields; lo is z <= 0, hi is z > 0, w = |z|."""

    above_count: Tensor
    q_lo: Tensor
    q_hi: Tensor
    qw_lo: Tensor
    qw_hi: Tensor
    qq_lo: Tensor
    qq_hi: Tensor
    qqw: Tensor
    spread: Tensor
    below: Tensor
    above: Tensor
    gap: Tensor


class _Point(NamedTuple):
    """Where the iteration stands, and its brackets."""

    pivot: Tensor
    b: Tensor
    tau: Tensor
    tau_lo: Tensor
    tau_hi: Tensor
    b_lo: Tensor
    b_hi: Tensor
    stride: Tensor
    """The size of the last step in log t."""

    @classmethod
    def start(cls, pivot: Tensor, b: Tensor, tau: Tensor) -> _Point:
        inf = torch.full_like(tau, math.inf)
        return cls(pivot, b, tau, -inf, inf, -inf, inf, inf)

    def where(self, moving: Tensor, other: _Point) -> _Point:
        return _Point(*(torch.where(moving, x, y) for x, y in zip(self, other, strict=True)))


class _Verdict(NamedTuple):
    converged: Tensor
    tied: Tensor
    mean_z: Tensor
    mean_p: Tensor
    next: _Point


def _z_and_q(r: Tensor, pivot: Tensor, b: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    z = ((r - pivot[:, None]) - b[:, None]) / t[:, None]
    z = z.clamp(-MAX_Z[r.dtype], MAX_Z[r.dtype])
    return z, torch.where(r > -math.inf, 0.5 * torch.exp(-z.abs()), 0.0)


def _sums(r: Tensor, pivot: Tensor, b: Tensor, t: Tensor, a: Tensor) -> _Sums:
    z, q = _z_and_q(r, pivot, b, t)
    ok, hi, w = r > -math.inf, z > 0, z.abs()
    lo_q, hi_q = torch.where(hi, 0.0, q), torch.where(hi, q, 0.0)
    a = a[:, None]
    off = torch.where(hi, (1 - a) - q, q - a)  # p - a, without rounding 1 - q
    far = (r - pivot[:, None]).abs()
    inf = math.inf
    sums = (
        hi.sum(-1).to(q.dtype),
        *(part.sum(-1) for x in (1, w, q) for part in (lo_q * x, hi_q * x)),
        (q * q * w).sum(-1),
        torch.where(ok, off, 0.0).square().sum(-1),
        torch.where(ok & ~hi, r, -inf).amax(-1),
        torch.where(hi, r, inf).amin(-1),
        torch.where(far > 0, far, inf).amin(-1),
    )
    return _Sums(*sums)


class _Residuals(NamedTuple):
    """The two equations at a point, and their derivatives in b/t and log t."""

    excess: Tensor
    """P - M: the mass beyond k."""
    e1: Tensor
    e1_b: Tensor
    e1_t: Tensor
    e2: Tensor
    reduced: Tensor
    """e2 on the barrier that holds the budget, to first order."""
    slope: Tensor
    """The derivative of `reduced` in log t."""


def _residuals(
    s: _Sums, at: _Point, n: Tensor, k: Tensor, target: Tensor, fixed: bool
) -> _Residuals:
    N, q = s.above_count, s.q_lo + s.q_hi
    P = s.q_lo + (N - k).clamp(min=0)
    M = s.q_hi + (k - N).clamp(min=0)
    excess = P - M
    e1 = torch.log(P / M)
    e1_b = -(s.q_lo / P + s.q_hi / M)
    e1_t = s.qw_lo / P - s.qw_hi / M
    if fixed:
        miss = target - at.tau
        return _Residuals(excess, e1, e1_b, e1_t, miss, miss, -torch.ones_like(miss))
    mean = (k + excess) / n
    C = (s.spread - excess.square() / n).clamp(min=torch.finfo(q.dtype).tiny)
    V = q - s.qq_lo - s.qq_hi
    c_b = -2 * ((s.qq_lo - mean * s.q_lo) + ((1 - mean) * s.q_hi - s.qq_hi))
    c_t = 2 * (s.qqw - mean * s.qw_lo - (1 - mean) * s.qw_hi)
    v_b = -((s.q_lo - 2 * s.qq_lo) - (s.q_hi - 2 * s.qq_hi))
    v_t = s.qw_lo + s.qw_hi - 2 * s.qqw
    e2 = torch.log(C / V) - target
    e2_b, e2_t = c_b / C - v_b / V, c_t / C - v_t / V
    return _Residuals(excess, e1, e1_b, e1_t, e2, e2 - e2_b * e1 / e1_b, e2_t - e2_b * e1_t / e1_b)


def _step(
    s: _Sums,
    at: _Point,
    n: Tensor,
    k: Tensor,
    target: Tensor,
    *,
    fixed: bool,
    passes: int,
    tol: tuple[float, float],
) -> _Verdict:
    """Judge the sums at a point and propose the next one."""
    N, q = s.above_count, s.q_lo + s.q_hi
    e = _residuals(s, at, n, k, target, fixed)
    budget_holds = e.excess.abs() <= tol[0] * torch.minimum(k, n - k)
    converged = budget_holds & (e.e2.abs() <= (0.0 if fixed else tol[1]))
    saturated = (at.tau.exp() < s.gap / SATURATED) & (at.b.abs() < s.gap / 2)
    pinned = saturated & (e.e2 < 0) & (k != N)
    tied = pinned & budget_holds & (not fixed)

    u = -e.e1 / e.e1_b
    flat = e.slope > -0.2
    solved = (e.e1.abs() <= (0.1 * e.reduced.abs().clamp(max=1)).clamp(min=1e-11)) & (
        ~flat | (u.abs() <= 0.003)
    )
    newton = at.tau - e.reduced / e.slope
    promising = ~flat & (newton > at.tau_lo) & (newton < at.tau_hi) & (passes < PATIENCE)
    may_cool = e.reduced != 0 if fixed else ~pinned
    both = (e.e1.abs() <= 1) & may_cool & (solved | promising)

    joint = _move_both(e, at, u, solved, pinned, target, fixed)
    moved = joint.where(both, _move_barrier(e, s, at, u))
    moved = (
        _settle_sharp(s, at, moved, k, target)
        if fixed
        else _raise_sharp(s, at, moved, n, k, target)
    )
    mean_z, mean_p = (s.qw_hi - s.qw_lo) / q, (s.qq_lo + s.q_hi - s.qq_hi) / q
    return _Verdict(converged, tied, mean_z, mean_p, _repivot(moved, s))


def _move_both(
    e: _Residuals,
    at: _Point,
    u: Tensor,
    solved: Tensor,
    pinned: Tensor,
    target: Tensor,
    fixed: bool,
) -> _Point:
    """Newton in log t, inside its bracket; b follows linearly in t, as it does at both ends.

    Its own step is one in units of the new t: what is left has no product of the two steps' sizes.
    """
    fine = e.reduced.abs() <= 1e-7
    certain = solved & ~fine
    tau_lo = torch.where(certain & (e.reduced > 0), torch.maximum(at.tau_lo, at.tau), at.tau_lo)
    tau_hi = torch.where(certain & (e.reduced <= 0), torch.minimum(at.tau_hi, at.tau), at.tau_hi)
    crossed = tau_lo >= tau_hi
    tau_lo, tau_hi = tau_lo.masked_fill(crossed, -math.inf), tau_hi.masked_fill(crossed, math.inf)

    blind_step = torch.copysign(torch.full_like(e.reduced, MAX_STEP), e.reduced)
    d = torch.where(e.slope < 0, -e.reduced / e.slope, blind_step)
    down = torch.log(u.abs().clamp(min=1e-15) / 3).clamp(min=-MAX_STEP)
    d = torch.where(pinned, d, torch.maximum(d, down).clamp(max=MAX_STEP))
    tau = at.tau + d
    if fixed:
        tau = torch.where((target - tau).abs() < 1e-9, target, tau)
    bracketed = tau_lo.isfinite() & tau_hi.isfinite()
    shrinks = (tau - at.tau).abs() <= 0.75 * at.stride
    out = bracketed & ~fine & ~((tau > tau_lo) & (tau < tau_hi) & shrinks)
    tau = torch.where(out, 0.5 * (tau_lo + tau_hi), tau)
    growth = torch.expm1(tau - at.tau)
    b = at.b + at.tau.exp() * (u + (u - e.e1_t / e.e1_b) * growth)
    inf = torch.full_like(tau, math.inf)
    # A short step in t means little beside a long one in b.
    stride = torch.maximum((tau - at.tau).abs(), u.abs())
    return _Point(at.pivot, b, tau, tau_lo, tau_hi, -inf, inf, stride)


def _move_barrier(e: _Residuals, s: _Sums, at: _Point, u: Tensor) -> _Point:
    """Newton in b at this temperature, inside its bracket."""
    t = at.tau.exp()
    b_lo = torch.where(e.excess > 0, at.b, at.b_lo)
    b_hi = torch.where(e.excess > 0, at.b_hi, at.b)
    # Too far from any score to see one: on to the next.
    under, over = at.b - (s.below - at.pivot), (s.above - at.pivot) - at.b
    blind = torch.minimum(under, over) > 0.9 * MAX_Z[t.dtype] * t
    jump = torch.where(e.excess > 0, at.b + over, at.b - under)
    b = torch.where(blind, jump, at.b + t * u)
    bracketed = b_lo.isfinite() & b_hi.isfinite()
    b = torch.where(bracketed & ~((b > b_lo) & (b < b_hi)), 0.5 * (b_lo + b_hi), b)
    return at._replace(b=b, b_lo=b_lo, b_hi=b_hi)


def _settle_sharp(s: _Sums, at: _Point, moved: _Point, k: Tensor, target: Tensor) -> _Point:
    """In a saturated gap a lower temperature changes nothing: straight to the given one."""
    middle = 0.5 * ((s.below - at.pivot) + (s.above - at.pivot))
    inf = torch.full_like(middle, math.inf)
    settled = at._replace(b=middle, tau=target, b_lo=-inf, b_hi=inf)
    saturated = s.above - s.below > 2 * SATURATED * at.tau.exp()
    return settled.where((k == s.above_count) & (target <= at.tau) & saturated, moved)


def _raise_sharp(
    s: _Sums, at: _Point, moved: _Point, n: Tensor, k: Tensor, target: Tensor
) -> _Point:
    """In the right gap V <= sqrt(k (n-k)) exp(-gap/2t): a t below this bound is too small."""
    reach = torch.log(n / torch.sqrt(k * (n - k))) + torch.nn.functional.softplus(target)
    bound = torch.log((s.above - s.below) / (2 * reach))
    middle = 0.5 * ((s.below - at.pivot) + (s.above - at.pivot))
    inf = torch.full_like(bound, math.inf)
    raised = at._replace(
        b=middle, tau=bound, tau_lo=torch.maximum(at.tau_lo, at.tau), b_lo=-inf, b_hi=inf
    )
    return raised.where((k == s.above_count) & (at.tau < bound), moved)


def _repivot(at: _Point, s: _Sums) -> _Point:
    """Measure from the score nearest to the barrier once b is large beside t.

    Where scores are few, always from the one the barrier is at: all weight may come to rest on it.
    """
    over, under = (s.above - at.pivot) - at.b, at.b - (s.below - at.pivot)
    pivot = torch.where(over < under, s.above, s.below)
    shift = pivot - at.pivot
    t, left = at.tau.exp(), (at.b - shift).abs()
    better = (at.b.abs() > 2 * t) & (left < 0.5 * at.b.abs())
    better = better | ((s.above - s.below > 8 * t) & (left <= 4 * t))
    shift = torch.where(better, shift, 0.0)
    return at._replace(
        pivot=torch.where(better, pivot, at.pivot),
        b=at.b - shift,
        b_lo=at.b_lo - shift,
        b_hi=at.b_hi - shift,
    )


def _row_start(r: Tensor, n: Tensor, k: Tensor, target: Tensor, fixed: bool) -> _Point:
    ok = r > -math.inf
    low = torch.where(ok, r, math.inf).amin(-1)
    mean = torch.where(ok, r - low[:, None], 0.0).sum(-1) / n + low

    def count(cut: Tensor) -> Tensor:
        return (r > cut[:, None]).sum(-1).to(r.dtype)

    return _counting_start(count, low, r.amax(-1), mean, n, k, target, fixed)


def _counting_start(
    count: Callable[[Tensor], Tensor],
    low: Tensor,
    high: Tensor,
    mean: Tensor,
    n: Tensor,
    k: Tensor,
    target: Tensor,
    fixed: bool,
) -> _Point:
    """Locate the barrier by counting the scores above some cuts.

    The density of the scores there says which temperature leaves as many of them undecided as
    gamma asks: close to a sharp barrier V = 3/4 t dN/db. It is no smaller than the cuts leave the
    barrier in doubt, or a count its hardness: 1 - gamma >= 1/sqrt(k (1-a)).
    """
    few, flip = torch.minimum(k, n - k), 2 * k > n  # flip: the few are the lowest scores

    def log_count(cut: Tensor) -> Tensor:
        above = count(cut)
        return torch.log((torch.where(flip, n - above, above) + 0.25) / few)

    def between(from_: Tensor, to: Tensor) -> Tensor:
        return (from_ / (from_ - to)).nan_to_num(0.5)

    # Regula falsi (Illinois) on the log of the count: more than the few at lo, less at hi.
    f = log_count(mean)
    under = f <= 0
    lo = torch.where(under, torch.where(flip, high, low), mean)
    hi = torch.where(under, mean, torch.where(flip, low, high))
    f_lo = torch.where(under, torch.log(n / few), f)
    f_hi = torch.where(under, f, torch.log(0.25 / few))
    w_lo, w_hi, last = f_lo, f_hi, torch.zeros_like(f)
    for _ in range(ROUNDS):
        cut = lo + between(w_lo, w_hi).clamp(0.02, 0.98) * (hi - lo)
        f = log_count(cut)
        up = f > 0
        side = torch.where(up, 1.0, -1.0).to(f.dtype)
        half = torch.where(side == last, 0.5, 1.0)
        w_lo, w_hi = torch.where(up, f, w_lo * half), torch.where(up, w_hi * half, f)
        lo, f_lo = torch.where(up, cut, lo), torch.where(up, f, f_lo)
        hi, f_hi = torch.where(up, hi, cut), torch.where(up, f_hi, f)
        last = side

    share, width = between(f_lo, f_hi).clamp(0, 1), (hi - lo).abs()
    soft = (few * (1 - few / n)).rsqrt().clamp(max=0.5)
    if not fixed:
        soft = torch.maximum(soft, torch.sigmoid(-target))
    t = (soft * (1 - few / n) / 0.75 * width / (f_lo - f_hi)).nan_to_num(math.inf)
    t = torch.maximum(t, 0.3 * torch.minimum(share, 1 - share) * width)
    t = torch.maximum(torch.minimum(t, high - low), 1e-7 * (high - low))
    tau = torch.log(t)
    tau = torch.maximum(tau, target) if fixed else tau - 0.25 * target.clamp(max=0)
    return _Point.start(lo + share * (hi - lo), torch.zeros_like(tau), tau)


def _sample_start(r: Tensor, n: Tensor, k: Tensor, target: Tensor, fixed: bool) -> _Point:
    """Solve one score in SAMPLE_RATIO first; its answer starts the whole row."""
    size = max(MIN_SAMPLE, r.shape[-1] // SAMPLE_RATIO)
    index = torch.arange(size, device=r.device) * r.shape[-1] // size
    at, ok = _start_from(r[:, index], k * size / r.shape[-1], target, fixed)
    return at.where(ok, _row_start(r, n, k, target, fixed))


def _start_from(sample: Tensor, part: Tensor, target: Tensor, fixed: bool) -> tuple[_Point, Tensor]:
    """The answer of a sample whose share of the budget is ``part``, and whether it says anything.

    The sample knows the count above a barrier only to sqrt(k (1-a)): a temperature that leaves
    fewer scores undecided is no start for the row.
    """
    size = sample.shape[-1]
    count = (sample > -math.inf).sum(-1).to(sample.dtype)
    low = torch.where(sample > -math.inf, sample, math.inf).amin(-1)
    doubt = part * (1 - part / count)
    ok = (doubt >= MIN_DOUBT) & (sample.amax(-1) > low)
    # Rows whose sample says nothing get a harmless stand-in, and start from the whole row.
    stand_in = torch.arange(size, dtype=sample.dtype, device=sample.device)
    sample = torch.where(ok[:, None], sample, stand_in)
    count, part = torch.where(ok, count, size), torch.where(ok, part, size / 2)
    noise = (part * (1 - part / count)).rsqrt()
    hardest = torch.log(1 / noise - 1)
    rough = hardest if fixed else torch.minimum(target, hardest)
    begin = _row_start(sample, count, part, rough, False)

    def sums(at: _Point) -> _Sums:
        return _sums(sample, at.pivot, at.b, at.tau.exp(), part / count)

    at = _iterate(sums, count, part, rough, begin, False, (1e-3, 1e-3))[0]
    if fixed:
        warm = _Point.start(at.pivot, at.b, at.tau)
        goal = torch.maximum(target, at.tau)
        at = _iterate(sums, count, part, goal, warm, True, (1e-3, 1e-3))[0]
    return _Point.start(at.pivot, at.b, at.tau), ok


def _iterate(
    sums: Callable[[_Point], _Sums],
    n: Tensor,
    k: Tensor,
    target: Tensor,
    at: _Point,
    fixed: bool,
    tol: tuple[float, float],
) -> tuple[_Point, Tensor, Tensor, Tensor, Tensor]:
    """Run all rows until each has converged or is tied; finished rows stay where they are.

    ``sums`` reads the rows at a point, wherever their scores lie.
    """
    rows = k.shape[0]
    status = torch.full((rows,), Status.STALLED, dtype=torch.int32, device=k.device)
    passes = torch.zeros_like(status)
    mean_z, mean_p = torch.zeros_like(k), torch.zeros_like(k)
    for i in range(1, MAX_PASSES + 1):
        v = _step(sums(at), at, n, k, target, fixed=fixed, passes=i, tol=tol)
        running = status == Status.STALLED
        passes += running
        mean_z, mean_p = (
            torch.where(running, v.mean_z, mean_z),
            torch.where(running, v.mean_p, mean_p),
        )
        status = torch.where(running & v.converged, Status.CONVERGED, status)
        status = torch.where(running & ~v.converged & v.tied, Status.TIED, status)
        running = status == Status.STALLED
        if not running.any():
            break
        at = v.next.where(running, at)
    return at, status, passes, mean_z, mean_p


def _work_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _hard(r: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros and ones, lowest index first among equal scores; a fraction goes to the next."""
    ranked, order = torch.sort(r, dim=-1, descending=True, stable=True)
    rank = torch.arange(r.shape[-1], device=r.device)
    p = torch.zeros_like(r).scatter(-1, order, (k[:, None] - rank).clamp(0, 1))
    last = (k.ceil().long() - 1).clamp(0, r.shape[-1] - 1)
    threshold = torch.where(k > 0, ranked.gather(-1, last[:, None])[:, 0], math.inf)
    return p, threshold, k - (r > threshold[:, None]).sum(-1)


def _hard_from_state(r: Tensor, threshold: Tensor, share: Tensor) -> Tensor:
    tied = r == threshold[:, None]
    turn = tied.cumsum(-1) - 1
    return torch.where(
        tied, (share[:, None] - turn).clamp(0, 1), (r > threshold[:, None]).to(r.dtype)
    )


def _classify(
    low: Tensor, high: Tensor, bad: Tensor, n: Tensor, k: Tensor, hardness: Tensor, fixed: bool
) -> Tensor:
    """The status of rows that need no iteration; STALLED for the others."""
    uniform, binary = (math.inf, 0.0) if fixed else (0.0, 1.0)
    largest = math.inf if fixed else 1.0
    status = torch.full(k.shape, Status.STALLED, dtype=torch.int32, device=k.device)
    for condition, answer in (
        (low == high, Status.CONSTANT),
        (hardness == uniform, Status.UNIFORM),
        ((hardness == binary) | (k == 0) | (k == n), Status.HARD),
        (k > n, Status.INFEASIBLE),
        (bad | ~(k >= 0) | ~((hardness >= 0) & (hardness <= largest)), Status.NONFINITE),
    ):
        status = torch.where(condition, int(answer), status)
    return status


def _mask(r: Tensor, state: Tensor, status: Tensor) -> Tensor:
    """The mask of each row from its state, whatever its status."""
    pivot, b, t = state[:, PIVOT], state[:, OFFSET], state[:, TEMPERATURE]
    ok = r > -math.inf
    z, q = _z_and_q(r, pivot, b, t)
    soft = torch.where(z > 0, 1 - q, torch.where(z > -MAX_Z[r.dtype], q, 0.0))
    status = status[:, None]
    p = torch.where(ok, state[:, MEAN_P, None], 0.0)
    p = torch.where(
        (status == Status.CONVERGED) | (status == Status.TIED) | (status == Status.STALLED), soft, p
    )
    p = torch.where(status == Status.HARD, _hard_from_state(r, pivot, b), p)
    return torch.where(status == Status.NONFINITE, math.nan, p)


def solve(
    scores: Tensor, k: Tensor, hardness: Tensor, values: Tensor | None, gated: bool, fixed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The mask of each row of ``scores`` (rows, n), or mask * values, with its state and info.

    ``hardness`` is gamma, or the temperature where ``fixed``. A gated row without values gates its
    own scores.
    """
    work = _work_dtype(scores.device)
    r, k, hardness = scores.to(work), k.to(work), hardness.to(work)
    n = (r > -math.inf).sum(-1).to(work)
    low = torch.where(r > -math.inf, r, math.inf).amin(-1)
    bad = ~(r < math.inf).all(-1)
    status = _classify(low, r.amax(-1), bad, n, k, hardness, fixed)
    level = torch.where(status == Status.INFEASIBLE, 1.0, k / n)
    zero = torch.zeros_like(k)
    state = torch.stack([zero, zero, torch.full_like(k, math.inf), zero, level], -1)
    passes = torch.ones_like(status)

    hard = status == Status.HARD
    if hard.any():
        _, threshold, share = _hard(r[hard], k[hard])
        state[hard] = torch.stack([threshold, share, zero[hard], zero[hard], zero[hard]], -1)
    state[status == Status.NONFINITE] = math.nan
    open_ = status == Status.STALLED
    if open_.any():
        rows, n_, k_ = (x if open_.all() else x[open_] for x in (r, n, k))
        target = torch.log(hardness[open_])
        target = target if fixed else target - torch.log1p(-hardness[open_])
        begin = _sample_start if r.shape[-1] > LONG else _row_start
        start = begin(rows, n_, k_, target, fixed)

        def sums(at: _Point) -> _Sums:
            return _sums(rows, at.pivot, at.b, at.tau.exp(), k_ / n_)

        at, found, count, mean_z, mean_p = _iterate(
            sums, n_, k_, target, start, fixed, TOLERANCE[work]
        )
        t = hardness[open_] if fixed else at.tau.exp()
        state[open_] = torch.stack([at.pivot, at.b, t, mean_z, mean_p], -1)
        status[open_], passes[open_] = found, count

    p = _mask(r, state, status)
    if gated:
        p = torch.where(p == 0, 0.0, p * (scores if values is None else values).to(work))
    return p.to(scores.dtype), state, torch.stack([status, passes], -1)


class _Weights(NamedTuple):
    """The q-weighted moments that every derivative of a row is made of."""

    t: Tensor
    q: Tensor
    z: Tensor
    p: Tensor
    s0: Tensor
    mean_z: Tensor
    mean_p: Tensor
    cov: Tensor


def _weights(r: Tensor, state: Tensor, smooth: Tensor) -> _Weights:
    """Moments at the solution; rows that are not smooth get harmless numbers."""
    pivot, b, t = (
        torch.where(smooth, state[:, i], float(i == TEMPERATURE))[:, None]
        for i in (PIVOT, OFFSET, TEMPERATURE)
    )
    z, q = _z_and_q(torch.where(smooth[:, None], r, 0.0), pivot[:, 0], b[:, 0], t[:, 0])
    q = torch.where(r > -math.inf, q, 0.0)
    s0 = q.sum(-1, keepdim=True)
    s0 = torch.where(s0 > 0, s0, 1.0)
    p = torch.where(z > 0, 1 - q, q)
    mean_z, mean_p = (q * z).sum(-1, keepdim=True) / s0, (q * p).sum(-1, keepdim=True) / s0
    cov = (q * (z - mean_z) * (p - mean_p)).sum(-1, keepdim=True)
    return _Weights(t, q, z, p, s0, mean_z, mean_p, cov)


def vjp(
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
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients with respect to scores, values, k and hardness; itself differentiable.

    Where a gated row has no values of its own, the gradient of both roles is in the scores'.
    """
    work, status = state.dtype, info[:, 0]
    r, g = scores.to(work), grad_out.to(work)
    ok = r > -math.inf
    v = (r if values is None else values.to(work)) if gated else torch.ones_like(r)
    e = torch.where(ok, g * torch.where(ok, v, 0.0), 0.0)

    regular = ((status == Status.CONVERGED) | (status == Status.STALLED))[:, None]
    tied = (status == Status.TIED)[:, None]
    w = _weights(r, state, (regular | tied)[:, 0])
    gb, gt = (
        (grad_state[:, [OFFSET]], grad_state[:, [TEMPERATURE]])
        if grad_state is not None
        else (0.0, 0.0)
    )
    g0 = (w.q * e).sum(-1, keepdim=True) - w.t * gb
    two = regular & (w.cov > 0) & (not fixed)
    lever = (w.q * (w.z - w.mean_z) * e).sum(-1, keepdim=True) - w.t * gt + w.mean_z * w.t * gb
    c1 = torch.where(two, lever / torch.where(two, w.cov, 1.0), 0.0)
    c0 = g0 / w.s0 - c1 * w.mean_p
    dr = torch.where(regular, w.q / w.t * (e - c0 - c1 * w.p), 0.0)

    n = ok.sum(-1, keepdim=True).clamp(min=1).to(work)
    k, hardness = k.to(work)[:, None], hardness.to(work)[:, None]
    a = k / n
    level = ((status == Status.UNIFORM) | (status == Status.CONSTANT))[:, None]
    dk = torch.where(regular | tied, c0, torch.where(level, e.sum(-1, keepdim=True) / n, 0.0))
    if fixed:
        heat = (c0 * w.s0 * w.mean_z - (w.q * w.z * e).sum(-1, keepdim=True)) / w.t + gt
        dh = torch.where(regular, heat, 0.0)
    else:
        dk = dk + 0.5 * c1 * (2 * a + (1 - 2 * a) * hardness)
        dh = 0.5 * c1 * k * (1 - a)

    broken = (status == Status.NONFINITE)[:, None]
    dr, dk, dh = (torch.where(broken, math.nan, x) for x in (dr, dk, dh))
    dv = None
    if gated:
        direct = g * torch.where(regular | tied, w.p * ok, _mask(r, state.detach(), status))
        if values is None:
            dr = dr + direct
        else:
            dv = direct.to(values.dtype)
    return dr.to(scores.dtype), dv, dk[:, 0], dh[:, 0]


def jvp(
    scores: Tensor,
    k: Tensor,
    hardness: Tensor,
    values: Tensor | None,
    gated: bool,
    fixed: bool,
    state: Tensor,
    info: Tensor,
    tangents: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor]:
    """Tangents of the output and of the state, for tangents of scores, k, hardness and values."""
    work, status = state.dtype, info[:, 0]
    r = scores.to(work)
    ok = r > -math.inf
    dr, dk, dh, dv = (None if x is None else x.to(work) for x in tangents)
    zero = torch.zeros_like(state[:, :1])
    dr = torch.zeros_like(r) if dr is None else torch.where(ok, dr, 0.0)
    dk = zero if dk is None else dk[:, None]
    dh = zero if dh is None else dh[:, None]

    regular = ((status == Status.CONVERGED) | (status == Status.STALLED))[:, None]
    tied = (status == Status.TIED)[:, None]
    w = _weights(r, state, (regular | tied)[:, 0])
    n = ok.sum(-1, keepdim=True).clamp(min=1).to(work)
    k, hardness = k.to(work)[:, None], hardness.to(work)[:, None]
    a = k / n
    x = torch.where(regular, dr / w.t, 0.0)
    mean_x = (w.q * x).sum(-1, keepdim=True) / w.s0
    if fixed:
        dtau = torch.where(regular, dh / w.t, 0.0)
    else:
        two = regular & (w.cov > 0)
        drive = 0.5 * ((2 * a + (1 - 2 * a) * hardness) * dk + k * (1 - a) * dh) - w.mean_p * dk
        lever = (w.q * (w.p - w.mean_p) * x).sum(-1, keepdim=True) - drive
        dtau = torch.where(two, lever / torch.where(two, w.cov, 1.0), 0.0)
    smooth = w.q * ((x - mean_x) + dk / w.s0 - (w.z - w.mean_z) * dtau)
    level = ((status == Status.UNIFORM) | (status == Status.CONSTANT))[:, None]
    dp = torch.where(regular | tied, smooth, torch.where(level & ok, dk / n, 0.0))
    dp = torch.where((status == Status.NONFINITE)[:, None], math.nan, dp)
    if gated:
        v = torch.where(ok, (r if values is None else values.to(work)), 0.0)
        p = torch.where(regular | tied, w.p * ok, _mask(r, state.detach(), status))
        dv = dr if values is None else (torch.zeros_like(r) if dv is None else dv)
        dp = dp * v + p * torch.where(ok, dv, 0.0)
    db = torch.where(regular | tied, w.t * (mean_x - dk / w.s0 - w.mean_z * dtau), 0.0)
    still = torch.zeros_like(zero)
    dstate = torch.cat([still, db, w.t * dtau, still, still], -1)
    return dp.to(scores.dtype), dstate
