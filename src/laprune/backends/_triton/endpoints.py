# mypy: ignore-errors
# ruff: noqa: SIM300
"""Rows that need no iteration, their statuses, and the hard mask."""

import triton
import triton.language as tl

from .sums import _row_count
from .team import _meet1, _part, _ties_before
from .tiles import INF, _any, _plain, _row, _tile, _v, _zeros

# The values of laprune.Status.
CONVERGED, UNIFORM, HARD, CONSTANT = (tl.constexpr(i) for i in range(4))
TIED, INFEASIBLE, NONFINITE, STALLED = (tl.constexpr(i) for i in range(4, 8))


@triton.jit
def _classify(n, bad, constant, k, hardness, FIXED: tl.constexpr):
    """The status of rows that need no iteration; STALLED for the others."""
    if FIXED:
        uniform, binary, valid = hardness == INF, hardness == 0, hardness >= 0
    else:
        uniform, binary = hardness == 0, hardness == 1
        valid = (hardness >= 0) & (hardness <= 1)
    status = tl.where(constant, CONSTANT, STALLED)
    status = tl.where(uniform, UNIFORM, status)
    status = tl.where(binary | (k == 0) | (k == n), HARD, status)
    status = tl.where(k > n, INFEASIBLE, status)
    return tl.where(valid & (k >= 0) & (bad == 0), status, NONFINITE)


@triton.jit
def _is_soft(status):
    return (status == CONVERGED) | (status == TIED) | (status == STALLED)


@triton.jit
def _is_regular(status):
    return (status == CONVERGED) | (status == STALLED)


@triton.jit
def _top_bit(ROWS: tl.constexpr, T: tl.constexpr):
    if T == tl.float64:
        return _zeros(ROWS, tl.uint64) + (1 << 63)
    else:
        return _zeros(ROWS, tl.uint32) + (1 << 31)


@triton.jit
def _score_at(key, T: tl.constexpr):
    """The score at a place in the order of all scores, an unsigned integer."""
    if T == tl.float64:
        bits = (key ^ (1 << 63)).to(tl.int64, bitcast=True)
        return (bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    else:
        bits = (key ^ (1 << 31)).to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _tile_hard(b_x, threshold, left, T: tl.constexpr, ROWS: tl.constexpr):
    """Zeros and ones, and what is left after this tile; scores equal to the threshold are served
    in the order of their index."""
    cut = _v(threshold.to(T))
    tied = _plain((b_x == cut).to(tl.int32))
    four = tl.sum(tied, 3)
    part = tl.sum(four, 1)
    before = (tl.cumsum(four, 1) - four) + (tl.cumsum(part, 1) - part)[:, None, :]
    turn = _tile(tl.cumsum(tied, 3) + before[:, :, :, None])
    share = tl.minimum(tl.maximum(left, 0.0), 1e9)
    full = tl.floor(share)
    rest = _v((share - full).to(T))
    full = _v(full.to(tl.int32))
    served = tl.where(turn <= full, 1.0, tl.where(turn == full + 1, rest, 0.0))
    b_p = tl.where(b_x == cut, served, tl.where(b_x > cut, 1.0, 0.0)).to(T)
    return b_p, left - _row(tl.sum(part, 1), ROWS).to(tl.float64)


@triton.jit
def _select(p_x, n_cols, k, team, T: tl.constexpr, S: tl.constexpr, U: tl.constexpr,
            ROWS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr, TEAM: tl.constexpr,
            LINES: tl.constexpr):  # fmt: skip
    """The ceil(k)-th largest score, bit by bit, what the scores equal to it share, and what of that
    is left for this program's part."""
    p_lines, p_count, size, me, meetings = team
    walk = _part(tl.cdiv(me * 0 + n_cols, U * LANES * 4), me, size)
    rank = tl.ceil(k)
    bit = _top_bit(ROWS, T)
    key = bit ^ bit
    while _any(bit > 0):
        # As many scores above the trial's predecessor as reach the trial.
        trial = key | bit
        cut = _score_at(trial - 1, T)
        above = _row_count(p_x, n_cols, cut, walk, False, T, S, U, ROWS, LANES, EVEN)
        above = _meet1(above, (p_lines, p_count, size, me, meetings), TEAM, LINES)
        meetings += 1
        key = tl.where(above.to(tl.float64) >= rank, trial, key)
        bit = bit >> 1
    threshold = tl.where(k > 0, _score_at(key, T), INF)
    above = _row_count(p_x, n_cols, threshold, walk, False, T, S, U, ROWS, LANES, EVEN)
    above = _meet1(above, (p_lines, p_count, size, me, meetings), TEAM, LINES)
    share = tl.where(k > 0, k - above.to(tl.float64), 0.0)
    left = share
    if TEAM:
        equal = _row_count(p_x, n_cols, threshold, walk, True, T, S, U, ROWS, LANES, EVEN)
        team = (p_lines, p_count, size, me, meetings + 1)
        _meet1(equal, team, TEAM, LINES)
        left = share - _ties_before(team, LINES)
    return threshold.to(tl.float64), share, left


@triton.jit
def _other_mask(b_x, level, status, T: tl.constexpr):
    """The mask of a row without a barrier."""
    b_p = tl.where(b_x > -INF, _v(level.to(T)), 0.0)
    return tl.where(_v(status == NONFINITE), float("nan"), b_p)
