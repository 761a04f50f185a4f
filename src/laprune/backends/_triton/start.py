# mypy: ignore-errors
# ruff: noqa: SIM108
"""The first point: scores above some cuts are counted, and the barrier lies between two of them."""

import triton
import triton.language as tl

from .sums import _held_count, _row_count
from .team import _meet1
from .tiles import INF, _exp, _log, _over, _row

ROUNDS = tl.constexpr(4)  # counts that locate the barrier
# Scores above the lowest of the highest scores of 256, 128, ... 2 groups: the median.
ABOVE = tl.constexpr((1513.0, 668.0, 290.0, 123.0, 51.0, 20.0, 7.3, 2.5))
DOUBT = tl.constexpr(0.7)  # a count knows the barrier to so many times its standard deviation


@triton.jit
def _between(lo, hi, share):
    """lo + share (hi - lo), where hi - lo may overflow."""
    return (1.0 - share) * lo + share * hi


@triton.jit
def _locate(lo, hi, w_lo, w_hi):
    """Where a line through two log counts, of which one is positive, would be zero."""
    share = _over(w_lo, w_lo - w_hi)
    share = tl.where(share == share, share, 0.5)
    return _between(lo, hi, tl.minimum(tl.maximum(share, 0.02), 0.98))


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
    b = _between(lo, hi, share)
    most = 1e308 if lo.dtype == tl.float64 else 1e38
    wide, span = tl.minimum(tl.abs(hi - lo), most), tl.minimum(high - low, most)
    rest = 1.0 - _over(few, n)
    soft = tl.minimum(DOUBT / tl.sqrt(few * rest), 0.5)
    if FIXED == 0:
        soft = tl.maximum(soft, _over(1.0, 1.0 + odds))
    t = _over(soft * rest / 0.75 * wide, f_lo - f_hi)
    t = tl.maximum(tl.where(t == t, t, INF), 0.3 * tl.minimum(share, 1.0 - share) * wide)
    t = tl.minimum(t, span)
    # Scores as close as they can be told apart, or all equal: an outlier says nothing about those.
    t = tl.maximum(t, 1e-7 * tl.minimum(tl.maximum(tl.abs(b), wide), span))
    t = tl.where(t > 0, t, 1e-7 * span)
    if FIXED:
        t = tl.maximum(t, heat)
    else:
        t = t * _exp(-0.25 * _log(tl.minimum(odds, 1.0)))
    return _begin(b, b * 0.0, tl.minimum(t, most))


@triton.jit
def _begin(pivot, b, t):
    """A point without brackets: pivot, b, t, t_lo, t_hi, b_lo, b_hi, stride."""
    zero = t * 0.0
    return pivot, b, t, zero, zero + INF, zero - INF, zero + INF, zero + INF


@triton.jit
def _rung(rungs, groups, few, m: tl.constexpr, above: tl.constexpr, ROWS: tl.constexpr):
    """The rungs with the lowest of the highest scores of m groups, where `above` are expected."""
    lo, hi, under = rungs
    rung = _row(tl.min(groups, 1), ROWS)
    under, lo = tl.where(above > few, lo, under), tl.where(above > few, rung, lo)
    return lo, tl.where((above < few) & (hi == INF), rung, hi), under


@triton.jit
def _ladder(tops, bottoms, few, flip, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Two cuts: as a rule, more than `few` scores lie above the first one, less above the second.
    A third one lies below both, for rows to which the first is an exception.

    Put the scores into m groups. The highest scores of the groups differ, and above the lowest of
    these lie some m (log m + 0.37) scores of the row, however the scores are distributed. First
    every lane has a group or four, which then become one by one; a cut is infinite if none will do.
    """
    groups = tl.where(flip[:, None, None] if ROWS > 1 else flip, bottoms, tops)
    FINE: tl.constexpr = LANES <= 16
    groups = tl.reshape(groups, [ROWS, LANES * 4]) if FINE else tl.max(groups, 2)
    if LANES > 256:
        groups = tl.max(tl.reshape(groups, [ROWS, 256, LANES // 256]), 2)
    rungs = (few * 0.0 - INF, few * 0.0 + INF, few * 0.0 - INF)
    for i in tl.static_range(8):
        if (256 >> i) <= (LANES * 4 if FINE else LANES):
            rungs = _rung(rungs, groups, few, 256 >> i, ABOVE[i], ROWS)
            if i < 7:
                groups = tl.max(tl.reshape(groups, [ROWS, 128 >> i, 2]), 2)
    sign = tl.where(flip, -1.0, 1.0).to(few.dtype)
    return rungs[0] * sign, rungs[1] * sign, rungs[2] * sign


@triton.jit
def _start(p_x, b_held, n_cols, stats, cuts, problem, whole, walk, team, FIXED: tl.constexpr,
           T: tl.constexpr, A: tl.constexpr, U: tl.constexpr, ROWS: tl.constexpr,
           LANES: tl.constexpr, EVEN: tl.constexpr, HELD: tl.constexpr, TEAM: tl.constexpr,
           LINES: tl.constexpr):  # fmt: skip
    """Count the scores above some cuts, in the row or what is held, and arrive at a first point."""
    p_lines, p_count, size, me, meetings = team
    mean, high, low = stats
    n, few, flip = problem[0], problem[5], problem[3] > 0.5
    f_lo, f_hi = _log(_over(n, few)), _log(_over(0.25, few))
    lo, hi = tl.where(flip, high, low), tl.where(flip, low, high)
    bracket = (lo, hi, f_lo, f_hi, f_lo, f_hi, few * 0.0)
    cut = tl.where(tl.abs(cuts[0]) < INF, cuts[0], mean)
    for j in range(ROUNDS):
        counted = few * 0.0
        if whole:
            total = _row_count(p_x, n_cols, cut, walk, False, T, A, U, ROWS, LANES, EVEN)
            counted = _meet1(total, (p_lines, p_count, size, me, meetings), TEAM, LINES).to(T)
            meetings += 1
        elif HELD:
            counted = _held_count(b_held, cut, T, ROWS)
        counted = tl.where(flip, n - counted, counted)
        bracket = _narrow(bracket, cut, _log(_over(counted + 0.25, few)))
        cut = _locate(bracket[0], bracket[1], bracket[4], bracket[5])
        lesser, larger = tl.minimum(bracket[0], bracket[1]), tl.maximum(bracket[0], bracket[1])
        for known in tl.static_range(1, 3):
            within = (cuts[known] > lesser) & (cuts[known] < larger)
            cut = tl.where(within & (j == 0), cuts[known], cut)
    return _arrive(bracket, n, few, high, low, problem[6], problem[8], FIXED), meetings
