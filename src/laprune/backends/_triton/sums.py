# mypy: ignore-errors
# ruff: noqa: SIM102, SIM300
"""What is summed over the scores of a row, tile by tile, or over one tile held in registers."""

import triton
import triton.language as tl

from .team import _across, _across_max, _max3, _own8, _plus, _plus_kept, _zero8
from .tiles import (
    INF,
    LOG2E,
    _columns,
    _fetch,
    _load,
    _max_y,
    _over,
    _plain,
    _stop,
    _store,
    _total,
    _v,
    _zeros,
)

BAD = tl.constexpr(2.0**40)  # what a NaN or an infinite score adds to the count of scores


@triton.jit
def _line_of(at, r_t, T: tl.constexpr):
    """y = (x/2 - pivot/2) 2 rate - c: halves of scores have no difference that overflows. The pivot
    is the barrier to the digits of T, so that c is small."""
    rate = tl.minimum(r_t * LOG2E, 1e38 if T == tl.float32 else 1e307)
    return (0.5 * at[0]).to(T), (2.0 * rate).to(T), (at[1] * rate).to(T)


@triton.jit
def _line(at, T: tl.constexpr):
    """The same, with a quick 1/t."""
    return _line_of(at, _over(0.25, 0.25 * at[2]), T)


@triton.jit
def _y(b_x, line):
    return (b_x * 0.5 - _v(line[0])) * _v(line[1]) - _v(line[2])


@triton.jit
def _tile_sums(b_x, line, T: tl.constexpr):
    """A pass's sums, in units of e and y; lo is y <= 0, hi is y > 0, w = |y|."""
    b_y = _y(b_x, line)
    b_w = tl.minimum(tl.abs(b_y), _max_y(T))
    b_e = tl.exp2(b_w * -1.0)
    b_above = tl.where(b_y > 0, 1.0, 0.0).to(T)
    b_hi = b_above * b_e
    b_lo = b_e - b_hi
    terms = (
        b_above, b_lo, b_hi, b_lo * b_w, b_hi * b_w, b_lo * b_e, b_hi * b_e, (b_e * b_w) * b_e,
    )  # fmt: skip
    return _own8(terms, T)


@triton.jit
def _tile_mask(b_x, line, T: tl.constexpr):
    b_y = _y(b_x, line)
    b_q = 0.5 * tl.exp2(tl.abs(b_y) * -1.0)
    return tl.where(b_y > 0, 1.0 - b_q, b_q)


@triton.jit
def _gate(p_v, i, n_cols, b_x, b_p, GATE: tl.constexpr, T: tl.constexpr, U: tl.constexpr,
          LANES: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """The mask, or the mask times what it gates."""
    if GATE == 1:
        b_x = _load(p_v, i, n_cols, 0.0, T, U, LANES, EVEN)
    if GATE:
        b_p = tl.where(b_p == 0, 0.0, b_p * b_x)
    return b_p


@triton.jit
def _write(p_v, p_out, i, n_cols, b_x, line, GATE: tl.constexpr, T: tl.constexpr, U: tl.constexpr,
           LANES: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Tile i of soft rows."""
    b_p = _gate(p_v, i, n_cols, b_x, _tile_mask(b_x, line, T), GATE, T, U, LANES, EVEN)
    _store(p_out, i, n_cols, b_p, U, LANES, EVEN)


@triton.jit
def _tile_seen(b_x, T: tl.constexpr):
    """The sum of 1 for an eligible score, BAD for one that is NaN or infinite."""
    return tl.sum(_plain(tl.where(b_x < INF, tl.where(b_x > -INF, 1.0, 0.0), BAD).to(T)), 2)


@triton.jit
def _tile_odd(b_x, i, n_cols, U: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr):
    """Zero, or NaN if a score of tile i is not finite."""
    b_odd = b_x * 0.0
    if EVEN != 1:
        if (i + 1) * (U * LANES * 4) > n_cols:
            b_odd = tl.where(_columns(i, U, LANES) < n_cols, b_odd, 0.0)
    return tl.sum(_plain(b_odd), 2)


@triton.jit
def _pass(p_x, p_v, p_out, n_cols, line, write, looking, walk, b_next, after,
          AHEAD: tl.constexpr, GATE: tl.constexpr, T: tl.constexpr, U: tl.constexpr,
          ROWS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """The sums at a point, and, where asked, the mask there and whether all scores are finite: zero
    if so, NaN else.

    AHEAD: there are many tiles. The next one is asked for while this one is summed, and one further
    on into the cache.
    b_next is that of the first stop; at the last one, that at `after` is asked for, where the next
    pass is to begin.
    """
    lanes = _zero8(ROWS, LANES, T)
    kept = (lanes[0], lanes[0])
    odd = tl.zeros([ROWS, LANES, 4], T)
    for j in range(walk[0], walk[1], walk[2]):
        i = _stop(j, walk)
        if AHEAD:
            b_x = b_next
            then = tl.where(j + walk[2] < walk[1], _stop(j + walk[2], walk), after)
            b_next = _load(p_x, then, n_cols, -INF, T, U, LANES, EVEN)
            if j + 3 * walk[2] < walk[1]:
                _fetch(p_x, _stop(j + 3 * walk[2], walk), n_cols, U, LANES)
        else:
            b_x = _load(p_x, i, n_cols, -INF, T, U, LANES, EVEN)
        if AHEAD:
            lanes, kept = _plus_kept(lanes, kept, _tile_sums(b_x, line, T))
        else:
            lanes = _plus(lanes, _tile_sums(b_x, line, T))
        if looking:
            odd += _tile_odd(b_x, i, n_cols, U, LANES, EVEN)
        if write:
            _write(p_v, p_out, i, n_cols, b_x, line, GATE, T, U, LANES, EVEN)
    found = _zeros(ROWS, T)
    if looking:
        found = _total(odd, T, ROWS)
    return _across(lanes, ROWS), found, b_next


@triton.jit
def _row_seen(p_x, n_cols, walk, T: tl.constexpr, S: tl.constexpr, U: tl.constexpr,
              ROWS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    seen = tl.zeros([ROWS, LANES, 4], T)
    for j in range(walk[0], walk[1], walk[2]):
        seen += _tile_seen(_load(p_x, _stop(j, walk), n_cols, -INF, T, U, LANES, EVEN), T)
    return _total(seen, S, ROWS)


@triton.jit
def _tile_spread(b_x, line, a, rest, T: tl.constexpr):
    """The sum of (p - a)^2, without cancellation where p is close to a, without rounding 1 - q."""
    b_y = _y(b_x, line)
    b_q = 0.5 * tl.exp2(tl.minimum(tl.abs(b_y), _max_y(T)) * -1.0)
    b_d = tl.where(b_y > 0, _v(rest.to(T)) - b_q, b_q - _v(a.to(T)))
    b_d = tl.where(b_x > -INF, b_d, 0.0)
    return tl.sum(_plain(b_d * b_d), 2)


@triton.jit
def _tile_near(b_x, line):
    """The nearest score below the barrier, minus the nearest above it, and minus the distance from
    the pivot to the nearest other score; all measured from the pivot."""
    b_d, m_hi = b_x - 2.0 * _v(line[0]), _y(b_x, line) > 0
    b_far = tl.abs(b_d)
    return (
        tl.max(_plain(tl.where(m_hi, -INF, b_d)), 2),
        tl.max(_plain(tl.where(m_hi, -b_d, -INF)), 2),
        tl.max(_plain(tl.where(b_far > 0, -b_far, -INF)), 2),
    )


@triton.jit
def _tile_survey(b_x, n_cols, T: tl.constexpr):
    """The number of eligible and of bad scores, their mean, the highest and minus the lowest."""
    m_ok = b_x > -INF
    share = 1.0 / n_cols
    return (
        tl.sum(_plain(tl.where(m_ok, 1.0, 0.0).to(T)), 2),
        tl.sum(_plain(tl.where(b_x < INF, 0.0, 1.0).to(T)), 2),
        tl.sum(_plain(tl.where(m_ok, b_x, 0.0) * share), 2),
        tl.max(_plain(b_x), 2),
        tl.max(_plain(tl.where(m_ok, -b_x, -INF)), 2),
    )


@triton.jit
def _row_spread(p_x, n_cols, line, a, rest, walk, T: tl.constexpr, S: tl.constexpr, U: tl.constexpr,
                ROWS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    total = tl.zeros([ROWS, LANES, 4], T)
    for j in range(walk[0], walk[1], walk[2]):
        b_x = _load(p_x, _stop(j, walk), n_cols, -INF, T, U, LANES, EVEN)
        total += _tile_spread(b_x, line, a, rest, T)
    return _total(total, S, ROWS)


@triton.jit
def _row_near(p_x, n_cols, line, walk, T: tl.constexpr, S: tl.constexpr, U: tl.constexpr,
              ROWS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    none = tl.full([ROWS, LANES, 4], -INF, T)
    most = (none, none, none)
    for j in range(walk[0], walk[1], walk[2]):
        b_x = _load(p_x, _stop(j, walk), n_cols, -INF, T, U, LANES, EVEN)
        near = _tile_near(b_x, line)
        most = _max3(most[0], most[1], most[2], near[0], near[1], near[2])
    return _across_max(most, S, ROWS)


@triton.jit
def _both(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, tl.maximum(a3, b3), tl.maximum(a4, b4)


@triton.jit
def _surveyed(ok, bad, mean, high, low, S: tl.constexpr, ROWS: tl.constexpr):
    """Per row, from numbers for each four of a thread; with them, the highest of those and minus
    the lowest."""
    found = (tl.sum(ok, 2), tl.sum(bad, 2), tl.sum(mean, 2), tl.max(high, 2), tl.max(low, 2))
    found = tl.reduce(found, 1, _both)
    if ROWS == 1:
        found = tl.reduce(found, 0, _both)
    return (
        found[0].to(S), found[1].to(S), found[2].to(S), found[3].to(S), found[4].to(S), high, low,
    )  # fmt: skip


@triton.jit
def _row_survey(p_x, n_cols, walk, T: tl.constexpr, S: tl.constexpr, U: tl.constexpr,
                ROWS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    zero, none = tl.zeros([ROWS, LANES, 4], T), tl.full([ROWS, LANES, 4], -INF, T)
    ok, bad, mean, high, low = zero, zero, zero, none, none
    for i in range(walk[0], walk[1], walk[2]):
        s = _tile_survey(_load(p_x, i, n_cols, -INF, T, U, LANES, EVEN), n_cols, T)
        ok, bad, mean = ok + s[0], bad + s[1], mean + s[2]
        high, low = tl.maximum(high, s[3]), tl.maximum(low, s[4])
    return _surveyed(ok, bad, mean, high, low, S, ROWS)


@triton.jit
def _row_count(p_x, n_cols, cut, walk, EQUAL: tl.constexpr, T: tl.constexpr, S: tl.constexpr,
               U: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
               EVEN: tl.constexpr):  # fmt: skip
    """How many scores are above a score, or equal to it."""
    total = tl.zeros([ROWS, LANES, 4], T)
    for i in range(walk[0], walk[1], walk[2]):
        b_x = _load(p_x, i, n_cols, -INF, T, U, LANES, EVEN)
        m = b_x == _v(cut) if EQUAL else b_x > _v(cut)
        total += tl.sum(_plain(tl.where(m, 1.0, 0.0).to(T)), 2)
    return _total(total, S, ROWS)


@triton.jit
def _held_survey(b_x, n_cols, T: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr,
                 LANES: tl.constexpr):  # fmt: skip
    s = _tile_survey(b_x, n_cols, T)
    return _surveyed(s[0], s[1], tl.zeros([ROWS, LANES, 4], T) + s[2], s[3], s[4], S, ROWS)


@triton.jit
def _mean_and_ends(a0, a1, a2, b0, b1, b2):
    return a0 + b0, tl.maximum(a1, b1), tl.maximum(a2, b2)


@triton.jit
def _range(mean, high, low, n_cols, ROWS: tl.constexpr):
    """What a survey finds if all scores are finite; if one is not, the count is NaN."""
    found = (tl.sum(mean, 2), tl.max(high, 2), tl.max(low, 2))
    found = tl.reduce(found, 1, _mean_and_ends)
    if ROWS == 1:
        found = tl.reduce(found, 0, _mean_and_ends)
    zero = found[0] * 0.0
    return zero + n_cols, zero, found[0], found[1], found[2], high, low


@triton.jit
def _held_range(b_x, n_cols, ROWS: tl.constexpr):
    mean, high, low = b_x * (1.0 / n_cols), b_x, b_x * -1.0
    mean, high, low = tl.sum(_plain(mean), 2), tl.max(_plain(high), 2), tl.max(_plain(low), 2)
    return _range(mean, high, low, n_cols, ROWS)


@triton.jit
def _row_range(p_x, n_cols, walk, T: tl.constexpr, U: tl.constexpr, ROWS: tl.constexpr,
               LANES: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Beyond the row's end its first score stands: the mean is nearly that of the row."""
    none = tl.full([ROWS, LANES, 4], -INF, T)
    mean, high, low = tl.zeros([ROWS, LANES, 4], T), none, none
    first, share = tl.load(p_x), 1.0 / n_cols
    for j in range(walk[0], walk[1], walk[2]):
        b_x = _load(p_x, j, n_cols, first, T, U, LANES, EVEN)
        mean += tl.sum(_plain(b_x * share), 2)
        high = tl.maximum(high, tl.max(_plain(b_x), 2))
        low = tl.maximum(low, tl.max(_plain(b_x * -1.0), 2))
    return _range(mean, high, low, n_cols, ROWS)


@triton.jit
def _held_sums(b_x, line, T: tl.constexpr, ROWS: tl.constexpr):
    return _across(_tile_sums(b_x, line, T), ROWS)


@triton.jit
def _held_spread(b_x, line, a, rest, T: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    spread = tl.zeros([ROWS, LANES, 4], T) + _tile_spread(b_x, line, a, rest, T)
    return _total(spread, T, ROWS)


@triton.jit
def _held_near(b_x, line, S: tl.constexpr, ROWS: tl.constexpr):
    return _across_max(_tile_near(b_x, line), S, ROWS)


@triton.jit
def _held_count(b_x, cut, T: tl.constexpr, ROWS: tl.constexpr):
    return _total(tl.sum(_plain(tl.where(b_x > _v(cut), 1.0, 0.0).to(T)), 2), T, ROWS)
