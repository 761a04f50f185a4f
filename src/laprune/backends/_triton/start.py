# mypy: ignore-errors
# ruff: noqa: SIM108
"""The first point: scores above some cuts are counted, and the barrier lies between two of them."""

import triton
import triton.language as tl

from .sums import _held_count, _row_count
from .team import _meet1
from .tiles import INF, _log, _over

ROUNDS = tl.constexpr(4)  # counts that locate the barrier
DOUBT = tl.constexpr(0.7)  # a count knows the barrier to so many times its standard deviation


@triton.jit
def _locate(lo, hi, w_lo, w_hi):
    """Where a line through two log counts, of which one is positive, would be zero."""
    share = _over(w_lo, w_lo - w_hi)
    share = tl.where(share == share, share, 0.5)
    return lo + tl.minimum(tl.maximum(share, 0.02), 0.98) * (hi - lo)


@triton.jit
def _narrow(bracket, cut, f):
    """Regula falsi (Illinois): the end of the bracket that the count at `cut` belongs to moves."""
    lo, hi, f_lo, f_hi, w_lo, w_hi, last = bracket
    up = f > 0
    side = tl.where(up, 1.0, -1.0).to(f.dtype)
    half = tl.where(side == last, 0.5, 1.0).to(f.dtype)
    return (
        tl.where(up, cut, lo), tl.where(up, hi, cut), tl.where(up, f, f_lo), tl.where(up, f_hi, f),
        tl.where(up, f, w_lo * half), tl.where(up, w_hi * half, f), side,
    )  # fmt: skip


@triton.jit
def _arrive(bracket, n, few, high, low, odds, heat, FIXED: tl.constexpr):
    """The point to start from: a barrier between the last two cuts and, from the density there, a
    temperature that leaves as many scores undecided as gamma asks, or the cuts leave in doubt."""
    lo, hi, f_lo, f_hi, _, _, _ = bracket
    share = _over(f_lo, f_lo - f_hi)
    share = tl.minimum(tl.maximum(tl.where(share == share, share, 0.5), 0.0), 1.0)
    b = lo + share * (hi - lo)
    wide = tl.abs(hi - lo)
    rest = 1.0 - _over(few, n)
    soft = tl.minimum(DOUBT / tl.sqrt(few * rest), 0.5)
    if FIXED == 0:
        soft = tl.maximum(soft, _over(1.0, 1.0 + odds))
    t = _over(soft * rest / 0.75 * wide, f_lo - f_hi)
    t = tl.maximum(tl.where(t == t, t, INF), 0.3 * tl.minimum(share, 1.0 - share) * wide)
    t = tl.maximum(tl.minimum(t, high - low), 1e-7 * (high - low))
    if FIXED:
        t = tl.maximum(t, heat)
    else:
        t = t * tl.exp(-0.25 * _log(tl.minimum(odds, 1.0)))
    return _begin(b, b * 0.0, t)


@triton.jit
def _choose7(m, x, y):
    return (
        tl.where(m, x[0], y[0]), tl.where(m, x[1], y[1]), tl.where(m, x[2], y[2]),
        tl.where(m, x[3], y[3]), tl.where(m, x[4], y[4]), tl.where(m, x[5], y[5]),
        tl.where(m, x[6], y[6]),
    )  # fmt: skip


@triton.jit
def _begin(pivot, b, t):
    """A point without brackets: pivot, b, t, t_lo, t_hi, b_lo, b_hi, stride."""
    zero = t * 0.0
    return pivot, b, t, zero, zero + INF, zero - INF, zero + INF, zero + INF


@triton.jit
def _start(p_x, b_held, n_cols, stats, problem, whole, walk, team, FIXED: tl.constexpr,
           T: tl.constexpr, A: tl.constexpr, U: tl.constexpr, ROWS: tl.constexpr,
           LANES: tl.constexpr, EVEN: tl.constexpr, HELD: tl.constexpr, TEAM: tl.constexpr,
           LINES: tl.constexpr):  # fmt: skip
    """Count the scores above some cuts, in the row or what is held, and arrive at a first point."""
    p_lines, p_count, size, me, meetings = team
    mean, high, low = stats
    n, few, flip = problem[0], problem[5], problem[3] > 0.5
    bracket = (low, high, few, few, few, few, few * 0.0)
    cut = mean
    for j in range(ROUNDS + 1):
        counted = few * 0.0
        if whole:
            total = _row_count(p_x, n_cols, cut, walk, False, T, A, U, ROWS, LANES, EVEN)
            counted = _meet1(total, (p_lines, p_count, size, me, meetings), TEAM, LINES).to(T)
            meetings += 1
        elif HELD:
            counted = _held_count(b_held, cut, T, ROWS)
        counted = tl.where(flip, n - counted, counted)
        f = _log(_over(counted + 0.25, few))
        # The first count, at the mean, says on which side of it to look.
        under = f <= 0
        lo = tl.where(under, tl.where(flip, high, low), mean)
        hi = tl.where(under, mean, tl.where(flip, low, high))
        f_lo = tl.where(under, _log(_over(n, few)), f)
        f_hi = tl.where(under, f, _log(_over(0.25, few)))
        begun = (lo, hi, f_lo, f_hi, f_lo, f_hi, f * 0.0)
        bracket = _choose7(j == 0, begun, _narrow(bracket, cut, f))
        cut = _locate(bracket[0], bracket[1], bracket[4], bracket[5])
    return _arrive(bracket, n, few, high, low, problem[6], problem[8], FIXED), meetings
