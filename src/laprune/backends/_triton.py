# mypy: ignore-errors
# ruff: noqa: SIM102, SIM108, SIM300
# Triton compiles these functions from their source: their arguments have no Python types.
"""The solver and its gradient in Triton. ``reference`` explains the mathematics in the same words.

A program holds ROWS short rows, or a part of one long row that a team of programs solves together.
It walks over its scores in tiles of four dimensions, LANES, ROWS, U and 4: a thread has U times
four neighbouring scores of one row, and sums them up alone. Every pass reads the scores again,
from the cache if they fit there; rows of a single tile stay in registers. What belongs to a row is
a vector ``[ROWS]``, or a scalar if ROWS is one, of the type T of the scores (float32 for half
types). A program adds in T, a team in float64 and in the order of its programs.

The exponent is kept in base two: ``y = z log2(e)``, and ``e = 2^-|y| = 2 q``.
"""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))

# The values of laprune.Status.
CONVERGED, UNIFORM, HARD, CONSTANT = (tl.constexpr(i) for i in range(4))
TIED, INFEASIBLE, NONFINITE, STALLED = (tl.constexpr(i) for i in range(4, 8))

MAX_PASSES = tl.constexpr(100)
PATIENCE = tl.constexpr(16)  # passes after which a temperature step needs a solved barrier
MAX_STEP = tl.constexpr(3.0)  # largest step in log t
SATURATED = tl.constexpr(45.0)  # exp(-45) is nothing beside 1
SOFT = tl.constexpr(0.05)  # below this gamma, sum (p - a)^2 is summed by itself
SPARSE = tl.constexpr(3e-10)  # less q per score on a side: no score there for SATURATED / 2
ROUNDS = tl.constexpr(4)  # counts that locate the barrier
MIN_DOUBT = tl.constexpr(8.0)  # least k (1-a) of a sample that says anything
BAD = tl.constexpr(1e12)  # what a NaN or an infinite score adds to the count of scores
MOSTLY = tl.constexpr(2)  # EVEN: all tiles but the last are whole
COLUMNS = tl.constexpr(16)  # numbers a program shows its team
# Threads go to the last dimensions first, before Triton 3.7 to the first ones; U, which is to stay
# in registers, stands where none are left for it: tiles are [U, ROWS, LANES, 4], or, there,
# [LANES, ROWS, U, 4].
U_FIRST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7))
# The interpreter has no libdevice.
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def _v(x):
    """A number per row, beside a tile."""
    return x if len(x.shape) == 0 else x[None, :, None, None]


@triton.jit
def _row(x, ROWS: tl.constexpr):
    """What belongs to a single row is a scalar."""
    return tl.max(x, 0) if ROWS == 1 else x


@triton.jit
def _zeros(ROWS: tl.constexpr, T: tl.constexpr):
    return tl.zeros([], T) if ROWS == 1 else tl.zeros([ROWS], T)


@triton.jit
def _any(m):
    return m if len(m.shape) == 0 else tl.max(m.to(tl.int32), 0) > 0


@triton.jit
def _total(b_x, S: tl.constexpr, ROWS: tl.constexpr):
    """The sum over threads, row by row, of a sum for each of their fours."""
    return _row(tl.sum(tl.sum(b_x, 2), 1), ROWS).to(S)


@triton.jit
def _max_y(T: tl.constexpr):
    """|y| is cut here, before the exponential underflows."""
    return 1009.8865286222744 if T == tl.float64 else 115.41560327111707


@triton.jit
def _over(x, y):
    """x / y; for float32 without care for subnormal numbers, in 2 instructions instead of 9."""
    if COMPILED and y.dtype == tl.float32:
        return libdevice.fast_dividef(x, y)
    else:
        return x / y


@triton.jit
def _log(x):
    """The logarithm; for float32 to 2e-7, in 2 instructions instead of 20."""
    if COMPILED and x.dtype == tl.float32:
        return libdevice.fast_logf(x)
    else:
        return tl.log(x)


# --- where the scores are ----------------------------------------------------------------------


@triton.jit
def _fours(across, along, U: tl.constexpr, LANES: tl.constexpr):
    """The place of each four of a tile: lanes are `across` apart, and U of them `along`."""
    if U_FIRST:
        o = tl.arange(0, LANES)[None, None, :, None] * across
        return o + tl.arange(0, U)[:, None, None, None] * along
    else:
        o = tl.arange(0, LANES)[:, None, None, None] * across
        return o + tl.arange(0, U)[None, None, :, None] * along


@triton.jit
def _plain(b_x):
    """A tile as [ROWS, LANES, U, 4]."""
    return tl.permute(b_x, 1, 2, 0, 3) if U_FIRST else tl.permute(b_x, 1, 0, 2, 3)


@triton.jit
def _tile(b_x):
    """Back from there."""
    return tl.permute(b_x, 2, 0, 1, 3) if U_FIRST else tl.permute(b_x, 1, 0, 2, 3)


@triton.jit
def _columns(i, U: tl.constexpr, LANES: tl.constexpr):
    """The columns of tile i of a row: the threads' fours lie side by side, U times over."""
    o = _fours(4, LANES * 4, U, LANES) + tl.arange(0, 4)[None, None, None, :]
    return i * (U * LANES * 4) + o


@triton.jit
def _load(p, i, n_cols, other, T: tl.constexpr, U: tl.constexpr, LANES: tl.constexpr,
          EVEN: tl.constexpr):  # fmt: skip
    o = _columns(i, U, LANES)
    if EVEN == 1:
        return tl.load(p + o).to(T)
    elif EVEN == MOSTLY:
        if (i + 1) * (U * LANES * 4) <= n_cols:
            b_x = tl.load(p + o).to(T)
        else:
            b_x = tl.load(p + o, mask=o < n_cols, other=other).to(T)
        return b_x
    else:
        return tl.load(p + o, mask=o < n_cols, other=other).to(T)


@triton.jit
def _store(p, i, n_cols, b_x, U: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr):
    o = _columns(i, U, LANES)
    b_x = b_x.to(p.dtype.element_ty)
    if EVEN == 1:
        tl.store(p + o, b_x)
    else:
        tl.store(p + o, b_x, mask=o < n_cols)


@triton.jit
def _sample(p_x, n_cols, T: tl.constexpr, U: tl.constexpr, LANES: tl.constexpr):
    """A tile whose fours are spread evenly over a long row."""
    every = n_cols // (U * LANES * 4)
    o = _fours(1, LANES, U, LANES).to(tl.int64)
    return tl.load(p_x + o * every * 4 + tl.arange(0, 4)[None, None, None, :]).to(T)


@triton.jit
def _stop(j, walk):
    """Stop j of a walk (first, end, step, stretch, last): from the end if there is a last stop."""
    i = j * walk[3]
    return tl.where(walk[4] > 0, walk[4] - i, i)


# --- sums over rows ------------------------------------------------------------------------------


@triton.jit
def _add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def _plus(a, b):
    return _add8(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7],
        b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7],
    )  # fmt: skip


@triton.jit
def _own8(terms, T: tl.constexpr):
    """Sums per row and thread of a tile's terms: four at once, which rounds less than one by one.

    A product that is added to another thread's right away is fused with the addition, unrounded in
    the one thread and rounded in the other, and they disagree: a lone one is added to zero first.
    """
    t = (
        _plain(terms[0]), _plain(terms[1]), _plain(terms[2]), _plain(terms[3]), _plain(terms[4]),
        _plain(terms[5]), _plain(terms[6]), _plain(terms[7]),
    )  # fmt: skip
    lone: tl.constexpr = t[0].shape[2] == 1
    t = tl.reduce(t, 2, _add8)
    if lone:
        z = tl.zeros(t[0].shape, T)
        t = _plus((z, z, z, z, z, z, z, z), t)
    return tl.reduce(t, 2, _add8)


@triton.jit
def _max3(a0, a1, a2, b0, b1, b2):
    return tl.maximum(a0, b0), tl.maximum(a1, b1), tl.maximum(a2, b2)


@triton.jit
def _zero8(ROWS: tl.constexpr, LANES: tl.constexpr, T: tl.constexpr):
    z = tl.zeros([ROWS, LANES], T)
    return z, z, z, z, z, z, z, z


@triton.jit
def _across(lanes, ROWS: tl.constexpr):
    """Sums per row from sums per thread."""
    sums = tl.reduce(lanes, 1, _add8)
    return tl.reduce(sums, 0, _add8) if ROWS == 1 else sums


@triton.jit
def _wide(sums):
    f64: tl.constexpr = tl.float64
    return (
        sums[0].to(f64), sums[1].to(f64), sums[2].to(f64), sums[3].to(f64), sums[4].to(f64),
        sums[5].to(f64), sums[6].to(f64), sums[7].to(f64),
    )  # fmt: skip


@triton.jit
def _across_max(lanes, S: tl.constexpr, ROWS: tl.constexpr):
    most = (tl.max(lanes[0], 2), tl.max(lanes[1], 2), tl.max(lanes[2], 2))
    most = tl.reduce(most, 1, _max3)
    if ROWS == 1:
        most = tl.reduce(most, 0, _max3)
    return most[0].to(S), most[1].to(S), most[2].to(S)


@triton.jit
def _barrier(p_count, goal):
    """Every program of the team has come this far, and its stores are visible."""
    tl.debug_barrier()
    tl.atomic_add(p_count, 1, sem="release")
    while tl.atomic_add(p_count, 0, sem="acquire") < goal:
        pass
    tl.debug_barrier()


@triton.jit
def _leave(p_count, size):
    """The last program to leave the team puts both its counters back to zero."""
    if tl.atomic_add(p_count + 1, 1, sem="acq_rel") == size - 1:
        tl.store(p_count, 0)
        tl.store(p_count + 1, 0)


@triton.jit
def _shown(team, j: tl.constexpr, empty: tl.constexpr, LINES: tl.constexpr):
    """What the team shows in column j."""
    p_lines, _, size, _, meetings = team
    o = tl.arange(0, LINES)
    p_here = p_lines + ((meetings % 2) * COLUMNS + j) * size
    return tl.load(p_here + o, mask=o < size, other=empty, cache_modifier=".cg")


@triton.jit
def _meet(sums, seen, asked, team, TEAM: tl.constexpr, LINES: tl.constexpr):
    """A program's 8 sums become the team's, added in the order of its programs, and a ninth one
    where it is asked for.

    team is (lines, counter, size, own index, meetings so far). Lines alternate between two buffers,
    so that one barrier per meeting is enough.
    """
    if TEAM:
        p_lines, p_count, size, me, meetings = team
        p_own = p_lines + (meetings % 2) * size * COLUMNS + me
        for j in tl.static_range(8):
            tl.store(p_own + j * size, sums[j])
        if asked:
            tl.store(p_own + 8 * size, seen)
        _barrier(p_count, (meetings + 1) * size)
        if asked:
            seen = tl.sum(_shown(team, 8, 0.0, LINES), 0)
        shown = (
            _shown(team, 0, 0.0, LINES), _shown(team, 1, 0.0, LINES), _shown(team, 2, 0.0, LINES),
            _shown(team, 3, 0.0, LINES), _shown(team, 4, 0.0, LINES), _shown(team, 5, 0.0, LINES),
            _shown(team, 6, 0.0, LINES), _shown(team, 7, 0.0, LINES),
        )  # fmt: skip
        return tl.reduce(shown, 0, _add8), seen
    else:
        return sums, seen


@triton.jit
def _meet1(x, team, TEAM: tl.constexpr, LINES: tl.constexpr):
    """The same for one sum; it is shown in column 1."""
    if TEAM:
        p_lines, p_count, size, me, meetings = team
        tl.store(p_lines + (meetings % 2) * size * COLUMNS + size + me, x)
        _barrier(p_count, (meetings + 1) * size)
        return tl.sum(_shown(team, 1, 0.0, LINES), 0)
    else:
        return x


@triton.jit
def _meet_max(most, team, TEAM: tl.constexpr, LINES: tl.constexpr):
    """The same for 3 maxima."""
    if TEAM:
        p_lines, p_count, size, me, meetings = team
        p_own = p_lines + (meetings % 2) * size * COLUMNS + me
        for j in tl.static_range(3):
            tl.store(p_own + j * size, most[j])
        _barrier(p_count, (meetings + 1) * size)
        shown = (
            _shown(team, 0, -INF, LINES), _shown(team, 1, -INF, LINES), _shown(team, 2, -INF, LINES)
        )  # fmt: skip
        return tl.reduce(shown, 0, _max3)
    else:
        return most


# --- what is summed ------------------------------------------------------------------------------


@triton.jit
def _line(at, T: tl.constexpr):
    """y = (x - pivot) rate - c. The pivot is the barrier to the digits of T, so that c is small."""
    rate = tl.minimum(1.0 / at[2] * LOG2E, 1e38 if T == tl.float32 else 1e307)
    return at[0].to(T), rate.to(T), (at[1] * rate).to(T)


@triton.jit
def _y(b_x, line):
    return (b_x - _v(line[0])) * _v(line[1]) - _v(line[2])


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
    b_w = tl.abs(b_y)
    b_q = tl.where(b_w < _max_y(T), 0.5 * tl.exp2(tl.minimum(b_w, _max_y(T)) * -1.0), 0.0)
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
def _pass(p_x, p_v, p_out, n_cols, line, write, counting, walk, b_next, after,
          AHEAD: tl.constexpr, GATE: tl.constexpr, T: tl.constexpr, U: tl.constexpr,
          ROWS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """The sums at a point, and, where asked, the mask there and how many scores are eligible (BAD
    for each bad one).

    AHEAD: the next tile is asked for while this one is summed. b_next is that of the first stop; at
    the last one, that at `after` is asked for, where the next pass is to begin.
    """
    lanes = _zero8(ROWS, LANES, T)
    seen = tl.zeros([ROWS, LANES, 4], T)
    for j in range(walk[0], walk[1], walk[2]):
        i = _stop(j, walk)
        if AHEAD:
            b_x = b_next
            then = tl.where(j + walk[2] < walk[1], _stop(j + walk[2], walk), after)
            b_next = _load(p_x, then, n_cols, -INF, T, U, LANES, EVEN)
        else:
            b_x = _load(p_x, i, n_cols, -INF, T, U, LANES, EVEN)
        lanes = _plus(lanes, _tile_sums(b_x, line, T))
        if counting:
            seen += _tile_seen(b_x, T)
        if write:
            _write(p_v, p_out, i, n_cols, b_x, line, GATE, T, U, LANES, EVEN)
    total = _zeros(ROWS, T)
    if counting:
        total = _total(seen, T, ROWS)
    return _across(lanes, ROWS), total, b_next


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
    b_d = b_x - _v(line[0])
    m_hi = b_d * _v(line[1]) - _v(line[2]) > 0
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
    """Per row, from numbers for each four of a thread."""
    found = (tl.sum(ok, 2), tl.sum(bad, 2), tl.sum(mean, 2), tl.max(high, 2), tl.max(low, 2))
    found = tl.reduce(found, 1, _both)
    if ROWS == 1:
        found = tl.reduce(found, 0, _both)
    return found[0].to(S), found[1].to(S), found[2].to(S), found[3].to(S), found[4].to(S)


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


# --- the same over one tile that is held in registers --------------------------------------------


@triton.jit
def _held_survey(b_x, n_cols, T: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr,
                 LANES: tl.constexpr):  # fmt: skip
    s = _tile_survey(b_x, n_cols, T)
    return _surveyed(s[0], s[1], tl.zeros([ROWS, LANES, 4], T) + s[2], s[3], s[4], S, ROWS)


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


# --- the start -----------------------------------------------------------------------------------


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
    soft = tl.minimum(1.0 / tl.sqrt(few * rest), 0.5)
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
def _keep(m, new, old):
    """The new point where m, the old one elsewhere."""
    return (
        tl.where(m, new[0], old[0]), tl.where(m, new[1], old[1]), tl.where(m, new[2], old[2]),
        tl.where(m, new[3], old[3]), tl.where(m, new[4], old[4]), tl.where(m, new[5], old[5]),
        tl.where(m, new[6], old[6]), tl.where(m, new[7], old[7]),
    )  # fmt: skip


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


# --- the step ------------------------------------------------------------------------------------


@triton.jit
def _log_ratio(x, d):
    """log x, to all digits of d = x - 1 where x is close to 1."""
    near = d * (1.0 - d * (0.5 - d * (0.33333333333333 - d * (0.25 - d * 0.2))))
    return tl.where(tl.abs(d) < 1e-3, near, _log(tl.maximum(x, 1e-37)))


@triton.jit
def _growth(d):
    """exp(d) - 1."""
    near = d * (1.0 + d * (0.5 + d * (0.16666666666667 + d * 0.041666666666667)))
    return tl.where(tl.abs(d) < 1e-3, near, tl.exp(d) - 1.0)


@triton.jit
def _pose(n, k, hardness, FIXED: tl.constexpr, S: tl.constexpr, A: tl.constexpr):
    """A row's problem, from float64: n, floor of k, the rest of k, a, 1 - a, min(k, n-k), odds of
    gamma, reach, heat."""
    # A team divides in float64, a program alone in the type of its scores.
    size = n.to(A)
    a, rest = _over(k.to(A), size).to(S), _over((n - k).to(A), size).to(S)
    if FIXED:
        odds, heat = a * 0.0 + 1.0, hardness.to(S)
    else:
        odds, heat = _over(hardness.to(A), (1.0 - hardness).to(A)).to(S), a * 0.0
    # In the right gap V <= sqrt(k (n-k)) exp(-gap/2t), and so t >= gap reach.
    reach = _over(0.5, _log(1.0 + odds) - 0.5 * _log(a * rest))
    floor = tl.floor(k)
    few = tl.minimum(k, n - k)
    return (
        n.to(S), floor.to(A), (k - floor).to(S), a, rest, few.to(S), odds, reach, heat,
    )  # fmt: skip


@triton.jit
def _step(sums, spread, near, at, tries, problem, tolerance, FIXED: tl.constexpr,
          S: tl.constexpr):  # fmt: skip
    """Judge the sums at a point and propose the next one, row by row.

    Returns whether the point is converged or tied, the next point, whether it is sure to be better,
    whether it should be the answer, the tries to polish, the size of the error, whether the next
    point is so much better that the mask should be its, and the sums of q z, q p and q.
    """
    above, lo, hi, w_lo, w_hi, ee_lo, ee_hi, eew = sums
    seen, below_d, above_d, gap = near
    pivot, b, t, t_lo, t_hi, b_lo, b_hi, stride = at
    passes, polish, polished = tries
    n, k, k_rest, a, rest, few, odds, reach, heat = problem
    mass_tol, hardness_tol = tolerance
    f32: tl.constexpr = S == tl.float32
    noise = 1e-7 if f32 else 1e-11
    blur = 2e-6 if f32 else 1e-7

    # Budget. The difference of large sums is taken before they are rounded.
    over_k = (above - k).to(S) - k_rest
    excess = (0.5 * (lo - hi) + (above - k)).to(S) - k_rest
    above, lo, hi = above.to(S), lo.to(S), hi.to(S)
    q_lo, q_hi = 0.5 * lo, 0.5 * hi
    qw_lo, qw_hi = w_lo.to(S) * (0.5 * LN2), w_hi.to(S) * (0.5 * LN2)
    P, M = q_lo + tl.maximum(over_k, 0.0), q_hi + tl.maximum(-over_k, 0.0)
    P, M = tl.maximum(P, 1e-37), tl.maximum(M, 1e-37)
    r_P, r_M = _over(1.0, P), _over(1.0, M)
    e1 = _log_ratio(P * r_M, excess * r_M)
    e1_b, e1_t = -(q_lo * r_P + q_hi * r_M), qw_lo * r_P - qw_hi * r_M
    r_e1_b = _over(1.0, e1_b)
    u = -e1 * r_e1_b
    q = tl.maximum(q_lo + q_hi, 1e-37)

    # Hardness, reduced to the barrier that holds the budget.
    if FIXED:
        e2 = tl.where(t == heat, 0.0, tl.log(heat / t))
        residual, slope = e2, t * 0.0 - 1.0
        close = t * 0.0
    else:
        qq_lo, qq_hi, qqw = 0.25 * ee_lo.to(S), 0.25 * ee_hi.to(S), eew.to(S) * (0.25 * LN2)
        shift = _over(excess, n)
        closed = (qq_lo + a * (a * (n - above) - lo)) + (qq_hi + rest * (rest * above - hi))
        C = tl.where(odds < SOFT, spread, closed) - excess * shift
        C = tl.maximum(C, 1e-12 * few)
        V = tl.maximum((q_lo - qq_lo) + (q_hi - qq_hi), 1e-37)
        mean, off = a + shift, rest - shift
        r_C, r_V = _over(1.0, C), _over(1.0, V)
        e2_b = ((q_lo - 2.0 * qq_lo) - (q_hi - 2.0 * qq_hi)) * r_V
        e2_b -= 2.0 * ((qq_lo - mean * q_lo) + (off * q_hi - qq_hi)) * r_C
        e2_t = 2.0 * (qqw - mean * qw_lo - off * qw_hi) * r_C - (qw_lo + qw_hi - 2.0 * qqw) * r_V
        r_wanted = _over(1.0, V * odds)
        e2 = _log_ratio(C * r_wanted, (C - V * odds) * r_wanted)
        residual, slope = e2 + e2_b * u, e2_t - e2_b * e1_t * r_e1_b
        close = t * 0.0 + hardness_tol

    # What the step would still move an entry of the mask by: that of the barrier alone, and that of
    # log t, which takes the barrier along.
    share = tl.minimum(_over(0.5, q), 1.0)
    by_b = share * q * tl.abs(u)
    by_t = tl.minimum(qw_lo + qw_hi, 0.19) + share * tl.abs(qw_hi - qw_lo)
    by_t *= _over(tl.abs(residual), tl.maximum(slope * -1.0, 1e-3))

    off_by, miss = tl.abs(excess), tl.abs(e2)
    budget_holds = off_by <= mass_tol * few
    # Close enough for the step that follows to leave nothing, where few scores carry the mass.
    near_by = (tl.abs(e1) <= 1e-3) & (by_b <= 1e-3) & (by_t <= 1e-3)
    converged = budget_holds & (miss <= close) & near_by
    # Rounding may keep a solved row from the last digit: after some tries close by, twice the error
    # passes, and the mass may err relative to k alone.
    polished += polish
    late = (near_by & (polished > 4)) | (passes > 2 * PATIENCE)
    nearly_holds = budget_holds | (late & (off_by <= 2 * mass_tol * k.to(S)))
    converged = converged | (late & nearly_holds & (miss <= 2 * close))
    # All weight on one score, or on equal ones: a smaller t changes nothing any more.
    pinned = seen & (t * SATURATED < gap) & (tl.abs(b) < 0.5 * gap) & (e2 < 0) & (over_k != 0)
    tied = pinned & nearly_holds & ((by_b <= 1e-6) | late) & (FIXED == 0)

    # Newton's step in log t, inside its bracket; b follows linearly in t, and its own step is in
    # units of the new t. A short step in t means little beside a long one in b. Where e2 hardly
    # depends on t, a small e2 is a large error of t: close by, the step needs no steep slope.
    size = tl.maximum(tl.abs(e1), tl.abs(residual))
    steep = slope <= -0.05
    solved = tl.abs(e1) <= tl.maximum(0.1 * tl.minimum(tl.abs(residual), 1.0), noise)
    solved = solved & (steep | (tl.abs(u) <= 0.003))
    d = tl.where(slope < 0, _over(-residual, slope), tl.where(residual > 0, MAX_STEP, -MAX_STEP))
    newton = t * tl.exp(tl.minimum(tl.maximum(d, -20.0), 20.0))
    promising = (steep & (passes < PATIENCE)) | (near_by & (slope < 0))
    promising = promising & (newton > t_lo) & (newton < t_hi)
    may_cool = e2 != 0 if FIXED else pinned == 0
    both = (tl.abs(e1) <= 1.0) & may_cool & (solved | promising)
    fine = tl.abs(residual) <= blur
    certain = both & solved & (fine == 0)
    t_lo = tl.where(certain & (residual > 0), tl.maximum(t_lo, t), t_lo)
    t_hi = tl.where(certain & (residual <= 0), tl.minimum(t_hi, t), t_hi)
    crossed = t_lo >= t_hi
    t_lo, t_hi = tl.where(crossed, 0.0, t_lo), tl.where(crossed, INF, t_hi)
    down = tl.maximum(_log(tl.maximum(tl.abs(u), 1e-15) * 0.33333333333333), -MAX_STEP)
    held = tl.where(pinned, d, tl.minimum(tl.maximum(d, down), MAX_STEP))
    growth = _growth(held)
    warmer = t + t * growth
    bracketed = (t_lo > 0) & (t_hi < INF) & (fine == 0)
    inside = (warmer > t_lo) & (warmer < t_hi) & (tl.abs(held) <= 0.75 * stride)
    outside = bracketed & (inside == 0)
    r_t = _over(1.0, t)
    middle = tl.sqrt(tl.maximum(t_lo * r_t, 1e-18)) * tl.sqrt(tl.minimum(t_hi * r_t, 1e18))
    growth = tl.where(outside, middle - 1.0, growth)
    length = tl.abs(tl.where(outside, _log(middle), held))
    warmer = t + t * growth
    if FIXED:
        warmer = tl.where((held == d) & (outside == 0), heat, warmer)
    b_both = b + t * (u + (u - e1_t * r_e1_b) * growth)

    # Newton's step in b alone, inside its bracket; where no score is in sight, on to the next, and
    # not past it.
    b_lo, b_hi = tl.where(excess > 0, b, b_lo), tl.where(excess > 0, b_hi, b)
    under, over = b - below_d, above_d - b
    max_z: tl.constexpr = 700.0 if S == tl.float64 else 80.0
    beyond = (tl.abs(u) > SATURATED) & (t * tl.abs(u) > tl.where(excess > 0, over, under))
    blind = seen & ((tl.minimum(under, over) > 0.9 * max_z * t) | beyond)
    b_only = tl.where(blind, tl.where(excess > 0, above_d, below_d), b + t * u)
    off_limits = (b_lo > -INF) & (b_hi < INF) & (((b_only > b_lo) & (b_only < b_hi)) == 0)
    b_only = tl.where(off_limits, 0.5 * (b_lo + b_hi), b_only)

    # So few scores are seen that many counts are missing: the start was far too cold. Once t has
    # made a step of its own, it is ties that look so.
    lost = (both == 0) & (tl.abs(over_k) > 1.0 + 4.0 * q) & (stride == INF) & (FIXED == 0)

    # In the gap that parts the k largest from the others: a t that is too small is raised at once,
    # a given one is taken where the gap is saturated.
    if FIXED:
        warmest = heat
        sharp = (heat <= t) & (e2 != 0) & (above_d - below_d > t * (2 * SATURATED))
    else:
        warmest = (above_d - below_d) * reach
        sharp = t < warmest
    sharp = sharp & seen & (over_k == 0)
    if FIXED == 0:
        t_lo = tl.where(sharp, tl.maximum(t_lo, t), t_lo)
    plain = tl.where(both, outside == 0, (off_limits == 0) & (blind == 0) & (lost == 0))
    plain = plain & (sharp == 0)
    stride = tl.where(both & (sharp == 0), tl.maximum(length, tl.abs(u)), stride)
    t = tl.where(sharp, warmest, tl.where(both, warmer, tl.where(lost, 8.0 * t, t)))
    b = tl.where(sharp, 0.5 * (below_d + above_d), tl.where(both, b_both, b_only))
    anew = both | sharp | lost
    b_lo, b_hi = tl.where(anew, -INF, b_lo), tl.where(anew, INF, b_hi)
    # Newton's own step from close by lands on the answer, to a fraction of the square of its length
    # (sigma'' is no larger than sigma'). Where that is nothing, the row has converged; where it is
    # little, the pass there writes, and another one will if that was too early.
    last = plain & (t == heat if FIXED else both)
    far = tl.maximum(size, tl.maximum(tl.abs(u), tl.where(both, length, 0.0)))
    sure = plain & (far * far <= mass_tol)
    shows = (converged == 0) | (by_b + by_t > 0.1 * hardness_tol)
    converged = converged | (last & sure)
    last = last & (size * size <= tl.minimum(25 * mass_tol, 0.2 * hardness_tol))

    # The pivot becomes the barrier, rounded, or the score right beside it, on which all weight may
    # come to rest; b is what is left. The sum is exact.
    origin = pivot + b
    back = origin - pivot
    left = (pivot - (origin - back)) + (b - back)
    beside_d = tl.where(above_d - b < b - below_d, above_d, below_d)
    beside = seen & (tl.abs(b - beside_d) <= t * (0.5 * SATURATED))
    origin = tl.where(beside, pivot + beside_d, origin)
    back = tl.where(beside, beside_d, back)
    b = tl.where(beside, b - beside_d, left)
    moved = (origin, b, t, t_lo, t_hi, b_lo - back, b_hi - back, stride)
    weights = (qw_hi - qw_lo, q_hi + 0.25 * (ee_lo - ee_hi).to(S), q)
    return converged, tied, moved, sure, last.to(tl.int32), polished, size, shows, weights


# --- the other rows ------------------------------------------------------------------------------


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
def _part(tiles, me, size):
    """A program's tiles as one piece of the row, so that ties keep the order of their index."""
    each = tl.cdiv(tiles, size)
    return me * each, tl.minimum(tiles, me * each + each), 1, 1, 0


@triton.jit
def _ties_before(team, LINES: tl.constexpr):
    """Column 1 of the programs before this one."""
    p_lines, _, size, me, meetings = team
    o = tl.arange(0, LINES)
    p_here = p_lines + ((meetings % 2) * COLUMNS + 1) * size
    return tl.sum(tl.load(p_here + o, mask=o < me, other=0.0, cache_modifier=".cg"), 0)


@triton.jit
def _select(p_x, n_cols, k, team, T: tl.constexpr, S: tl.constexpr, U: tl.constexpr,
            ROWS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr, TEAM: tl.constexpr,
            LINES: tl.constexpr):  # fmt: skip
    """The ceil(k)-th largest score, bit by bit, what the scores equal to it share, and what of that
    is left for this program's part."""
    p_lines, p_count, size, me, meetings = team
    walk = _part(tl.cdiv(n_cols, U * LANES * 4), me, size)
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


# --- the kernels ---------------------------------------------------------------------------------

# Numbers whose value is no reason to compile anew.
PLAIN = ["rows", "size", "s_k", "s_hardness", "k_bits", "hardness_bits", "few_tiles"]


@triton.jit
def _fill(p_x, p_v, p_out, n_cols, line, level, status, threshold, left, walk, GATE: tl.constexpr,
          T: tl.constexpr, U: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
          EVEN: tl.constexpr):  # fmt: skip
    """Write rows of any status."""
    some_hard = _any(status == HARD)
    for j in range(walk[0], walk[1], walk[2]):
        b_x = _load(p_x, j, n_cols, -INF, T, U, LANES, EVEN)
        b_p = _other_mask(b_x, level, status, T)
        b_p = tl.where(_v(_is_soft(status)), _tile_mask(b_x, line, T), b_p)
        if some_hard:
            b_hard, left = _tile_hard(b_x, threshold, left, T, ROWS)
            b_p = tl.where(_v(status == HARD), b_hard, b_p)
        b_p = _gate(p_v, j, n_cols, b_x, b_p, GATE, T, U, LANES, EVEN)
        _store(p_out, j, n_cols, b_p, U, LANES, EVEN)


@triton.jit
def _finish(p_state, p_info, o_rows, status, passes, at, means, level, hard, heat, hardness,
            FIXED: tl.constexpr):  # fmt: skip
    """State and info of rows, whatever their status."""
    f64: tl.constexpr = tl.float64
    soft, binary, broken = _is_soft(status), status == HARD, status == NONFINITE
    zero = tl.where(broken, float("nan"), tl.zeros_like(level))
    t = at[2].to(f64)
    if FIXED:
        t = tl.where(at[2] == heat, hardness, t)
    p_row = p_state + o_rows * 5
    tl.store(p_row, tl.where(soft, at[0].to(f64), tl.where(binary, hard[0], zero)))
    tl.store(p_row + 1, tl.where(soft, at[1].to(f64), tl.where(binary, hard[1], zero)))
    flat = tl.where(broken, float("nan"), tl.where(binary, 0.0, INF))
    tl.store(p_row + 2, tl.where(soft, t, flat))
    tl.store(p_row + 3, tl.where(soft, means[0].to(f64), zero))
    tl.store(p_row + 4, tl.where(soft, means[1].to(f64), tl.where(binary, 0.0, level)))
    tl.store(p_info + o_rows * 2, status)
    tl.store(p_info + o_rows * 2 + 1, tl.where(soft, passes, 1))


@triton.jit
def _number(p, o_rows, stride, bits):
    """A number per row, or, with a negative stride, one for all rows, given by its bits."""
    shared = bits.to(tl.int64).to(tl.float64, bitcast=True)
    return tl.where(stride < 0, shared, tl.load(p + o_rows * tl.maximum(stride, 0)))


@triton.jit
def _my_rows(rows, ROWS: tl.constexpr):
    """A program's rows; where there are no more, the last one again."""
    pid = tl.program_id(0).to(tl.int64)
    return pid if ROWS == 1 else tl.minimum(pid * ROWS + tl.arange(0, ROWS), rows - 1)


@triton.jit(do_not_specialize=PLAIN)
def solve_rows(
    p_x, p_v, p_out, p_k, p_hardness, p_state, p_info, rows, n_cols, s_k, s_hardness, k_bits,
    hardness_bits, mass_tol, hardness_tol,
    GATE: tl.constexpr, FIXED: tl.constexpr, T: tl.constexpr, U: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Solve short rows, ROWS to a program; ONCE: a tile holds all of a row."""
    f64: tl.constexpr = tl.float64
    o_rows = _my_rows(rows, ROWS)
    base = _v(o_rows * n_cols)
    p_x, p_v, p_out = p_x + base, p_v + base, p_out + base
    k = _number(p_k, o_rows, s_k, k_bits)
    hardness = _number(p_hardness, o_rows, s_hardness, hardness_bits)
    walk = (0, 1 if ONCE else tl.cdiv(n_cols, U * LANES * 4), 1, 1, 0)
    alone = (p_info, p_info, 1, 0, 0)

    b_held = p_x
    if ONCE:
        b_held = _load(p_x, 0, n_cols, -INF, T, U, LANES, EVEN)
        n, bad, mean, high, low = _held_survey(b_held, n_cols, T, T, ROWS, LANES)
    else:
        n, bad, mean, high, low = _row_survey(p_x, n_cols, walk, T, T, U, ROWS, LANES, EVEN)
    low, share = -low, n_cols / tl.maximum(n, 1.0)
    mean = tl.minimum(tl.maximum(mean * share, low), high)
    n = n.to(f64)
    status = _classify(n, bad, low == high, k, hardness, FIXED)
    running = (status == STALLED).to(tl.int32)
    problem = _pose(n, k, hardness, FIXED, T, T)
    heat = problem[8]
    at, _m = _start(p_x, b_held, n_cols, (mean, high, low), problem, not ONCE, walk, alone, FIXED,
                    T, T, U, ROWS, LANES, EVEN, ONCE, False, 1)  # fmt: skip

    none = _zeros(ROWS, tl.int32)
    passes, polish, polished = none, none, none
    nil = heat * 0.0
    z_sum, p_sum, q_sum = nil, nil, nil + 1.0
    write, written = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    soft = _any((hardness < SOFT) & (running > 0)) & (FIXED == 0)
    while _any(running > 0):
        line = _line(at, T)
        spread = nil
        if ONCE:
            sums = _held_sums(b_held, line, T, ROWS)
        else:
            sums = _pass(p_x, p_v, p_out, n_cols, line, write > 0, False, walk, b_held, 0, 0, GATE,
                         T, U, ROWS, LANES, EVEN)[0]  # fmt: skip
        if soft:
            spread = _row_spread(p_x, n_cols, line, problem[3], problem[4], walk, T, T, U, ROWS,
                                 LANES, EVEN)  # fmt: skip
        passes += running
        sparse = _any((running > 0) & (tl.minimum(sums[1], sums[2]) < problem[0] * SPARSE))
        tries, tolerance = (passes, polish, polished), (mass_tol, hardness_tol)
        if sparse:
            below, above, gap = _row_near(p_x, n_cols, line, walk, T, T, U, ROWS, LANES, EVEN)
            near = (running > 0, below, -above, -gap)
            step = _step(sums, spread, near, at, tries, problem, tolerance, FIXED, T)
        else:
            # What depends on the scores beside the barrier falls away.
            near = (running * 0 > 0, none.to(T), none.to(T), none.to(T))
            step = _step(sums, spread, near, at, tries, problem, tolerance, FIXED, T)
        converged, tied, moved, sure, again, tried, _size, shows, weights = step
        live = running > 0
        z_sum, p_sum = tl.where(live, weights[0], z_sum), tl.where(live, weights[1], p_sum)
        q_sum = tl.where(live, weights[2], q_sum)
        status = tl.where(live & tied, TIED, status)
        status = tl.where(live & converged, CONVERGED, status)
        polish, polished = again, tl.where(live, tried, polished)
        running = ((status == STALLED) & (passes < MAX_PASSES) & live).to(tl.int32)
        # A short step from a point that is converged already is better still; a mask that is
        # written there is written anew where that shows.
        better = live & converged & sure
        at = _keep((running > 0) | better, moved, at)
        if ONCE == 0:
            written = tl.where(_any(better & shows), 0, write)
            write = 1 - _any((running > 0) & (polish == 0)).to(tl.int32)

    level, threshold, share, left = n * 0.0, n * 0.0, n * 0.0, n * 0.0
    others = _any(_is_soft(status) == 0)
    if others:
        level = tl.where(status == INFEASIBLE, 1.0, k / n)
        level = tl.where(status == NONFINITE, float("nan"), level)
    if _any(status == HARD):
        threshold, share, left = _select(
            p_x, n_cols, k, alone, T, T, U, ROWS, LANES, EVEN, False, 1
        )
    if ONCE:
        if others == 0:
            _write(p_v, p_out, 0, n_cols, b_held, _line(at, T), GATE, T, U, LANES, EVEN)
            written += 1
    if (written == 0) | others:
        _fill(p_x, p_v, p_out, n_cols, _line(at, T), level, status, threshold, left, walk, GATE,
              T, U, ROWS, LANES, EVEN)  # fmt: skip
    means = (_over(z_sum, q_sum), _over(p_sum, q_sum))
    _finish(p_state, p_info, o_rows, status, passes, at, means, level, (threshold, share), heat,
            hardness, FIXED)  # fmt: skip


@triton.jit
def _part_goal(hardness, k, n, FIXED: tl.constexpr):
    """A sample knows the count above a barrier to sqrt(k (1-a)): it aims no higher than that."""
    if FIXED:
        return hardness
    else:
        return tl.minimum(hardness, 1.0 - 1.0 / tl.sqrt(tl.maximum(k * (1.0 - k / n), 1.1)))


@triton.jit
def _sampled(step, at, passes):
    """The next point of a part of a row, and whether its sums are wanted: a part is not worth being
    solved to the end."""
    moved, error = step[2], step[6]
    sane = (moved[1] == moved[1]) & (moved[2] == moved[2]) & (moved[2] > 0)
    enough = (error < 0.3) | (sane == 0) | (passes >= 12)
    return _keep(sane, moved, at), (enough == 0).to(tl.int32)


@triton.jit(do_not_specialize=PLAIN)
def solve_long(
    p_x, p_v, p_out, p_k, p_hardness, p_state, p_info, p_lines, p_count, n_cols, size, s_k,
    s_hardness, k_bits, hardness_bits, mass_tol, hardness_tol, few_tiles,
    GATE: tl.constexpr, FIXED: tl.constexpr, T: tl.constexpr, U: tl.constexpr, LANES: tl.constexpr,
    EVEN: tl.constexpr, TEAM: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Solve long rows, each by a team: a sample first, then a few tiles of the row where that is
    worth a pass, then all of it. The pass that should be the last one writes."""
    f64: tl.constexpr = tl.float64
    W: tl.constexpr = U * LANES * 4
    row = tl.program_id(0).to(tl.int64) // size
    me = (tl.program_id(0) % size).to(tl.int64)
    base = row * n_cols
    p_x, p_v, p_out = p_x + base, p_v + base, p_out + base
    if TEAM:
        p_lines, p_count = p_lines + row * 2 * size * COLUMNS, p_count + row * 2
    k = _number(p_k, row, s_k, k_bits)
    hardness = _number(p_hardness, row, s_hardness, hardness_bits)
    tiles = tl.cdiv(n_cols, W).to(tl.int64)
    walk = (me, tiles, size, 1, 0)
    meetings = tl.zeros([], tl.int32)
    none, zero = tl.zeros([], tl.int32), tl.zeros([], f64)

    # The start: a sample, if it says enough; else the whole row.
    b_s = _sample(p_x, n_cols, T, U, LANES)
    share = (zero + W) / n_cols
    n, bad, mean, high, low = _held_survey(b_s, n_cols, T, f64, 1, LANES)
    low = -low
    k_now = k * share
    doubt = k_now * (1.0 - k_now / n)
    whole = _any((doubt >= MIN_DOUBT) & (high > low) & (bad == 0)) == 0
    status = none + STALLED
    if whole:
        n, bad, mean, high, low = _row_survey(p_x, n_cols, walk, T, f64, U, 1, LANES, EVEN)
        team = (p_lines, p_count, size, me, meetings)
        total = (n, bad, mean, zero, zero, zero, zero, zero)
        total, _seen = _meet(total, zero, False, team, TEAM, LINES)
        n, bad, mean = total[0], total[1], total[2]
        team = (p_lines, p_count, size, me, meetings + 1)
        ends = _meet_max((high, low, zero), team, TEAM, LINES)
        high, low = ends[0], ends[1]
        meetings += 2
        low, k_now = -low, k
        status = _classify(n, bad, low == high, k, hardness, FIXED)
    mean, high, low = (mean * (n_cols / tl.maximum(n, 1.0))).to(T), high.to(T), low.to(T)
    mean = tl.minimum(tl.maximum(mean, low), high)
    goal = hardness
    if whole == 0:
        goal = _part_goal(hardness, k_now, n, FIXED)
    problem = _pose(n, k_now, goal, FIXED, T, f64)
    at, meetings = _start(
        p_x, b_s, n_cols, (mean, high, low), problem, whole, walk,
        (p_lines, p_count, size, me, meetings), FIXED, T, f64, U, 1, LANES, EVEN, True, TEAM, LINES,
    )  # fmt: skip

    # The first tile is on its way while the sample is solved.
    few = (whole == 0) & (few_tiles < tiles)
    ready = tl.where(few, me * (tiles // few_tiles), me)
    b_next = _load(p_x, ready, n_cols, -INF, T, U, LANES, EVEN)
    soft = _any(hardness < SOFT) & (FIXED == 0)
    tolerance = (mass_tol, hardness_tol)
    nowhere = (none > 0, zero.to(T), zero.to(T), zero.to(T))
    passes, sampling = none, (whole == 0).to(tl.int32)
    while sampling > 0:
        line = _line(at, T)
        sums = _held_sums(b_s, line, T, 1)
        spread = zero.to(T)
        if soft:
            spread = _held_spread(b_s, line, problem[3], problem[4], T, 1, LANES)
        passes += 1
        tries = (passes, none, none)
        if tl.minimum(sums[1], sums[2]) < n * SPARSE:
            below, above, gap = _held_near(b_s, line, T, 1)
            near = (none == 0, below, -above, -gap)
            step = _step(sums, spread, near, at, tries, problem, tolerance, FIXED, T)
        else:
            step = _step(sums, spread, nowhere, at, tries, problem, tolerance, FIXED, T)
        at, sampling = _sampled(step, at, passes)

    # Then a few tiles, if few, and the row.
    at = _begin(at[0], at[1], at[2])
    counting = (whole == 0).to(tl.int32)
    running = (status == STALLED).to(tl.int32)
    passes, polish, polished = none, none, none
    z_sum, p_sum, q_sum = zero.to(T), zero.to(T), zero.to(T)
    write, written = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    passes_all = tl.zeros([], tl.int32)
    while running > 0:
        line = _line(at, T)
        # Every other pass goes backwards: it finds in the cache what the one before left there.
        last_tile = tl.where((few == 0) & ((passes_all & 1) > 0), tiles - 1, 0)
        end, stretch = tl.where(few, few_tiles, tiles), tl.where(few, tiles // few_tiles, 1)
        path = (me, end, size, stretch, last_tile)
        passes_all += 1
        after = tl.where((passes_all & 1) > 0, tiles - 1 - me, me)
        if ready != _stop(me, path):
            b_next = _load(p_x, _stop(me, path), n_cols, -INF, T, U, LANES, EVEN)
        ready = after
        sums, seen, b_next = _pass(
            p_x, p_v, p_out, n_cols, line, write > 0, counting > 0, path, b_next, after, True, GATE,
            T, U, 1, LANES, EVEN,
        )  # fmt: skip
        team = (p_lines, p_count, size, me, meetings)
        sums, seen = _meet(_wide(sums), seen.to(f64), counting > 0, team, TEAM, LINES)
        meetings += 1
        if counting > 0:
            bad = tl.floor(seen / BAD)
            n = seen - bad * BAD
            k_now = tl.where(few, k * few_tiles * W / n_cols, k)
            goal = tl.where(few, _part_goal(hardness, k_now, n, FIXED), hardness)
            problem = _pose(n, k_now, goal, FIXED, T, f64)
            if few == 0:
                status = _classify(n, bad, none > 0, k, hardness, FIXED)
                counting = counting * 0
        spread = zero
        if soft:
            spread = _row_spread(p_x, n_cols, line, problem[3], problem[4], path, T, f64, U, 1,
                                 LANES, EVEN)  # fmt: skip
            spread = _meet1(spread, (p_lines, p_count, size, me, meetings), TEAM, LINES)
            meetings += 1
        spread = spread.to(T)
        passes += 1
        tries = (passes, polish, polished)
        if tl.minimum(sums[1], sums[2]) < n * SPARSE:
            beside = _row_near(p_x, n_cols, line, path, T, f64, U, 1, LANES, EVEN)
            beside = _meet_max(beside, (p_lines, p_count, size, me, meetings), TEAM, LINES)
            meetings += 1
            near = (none == 0, beside[0].to(T), -beside[1].to(T), -beside[2].to(T))
            step = _step(sums, spread, near, at, tries, problem, tolerance, FIXED, T)
        else:
            step = _step(sums, spread, nowhere, at, tries, problem, tolerance, FIXED, T)
        if few:
            at, going = _sampled(step, at, passes)
            if going == 0:
                few = few & (none > 0)
                passes = none
                at = _begin(at[0], at[1], at[2])
        else:
            converged, tied, moved, sure, polish, polished, _size, shows, weights = step
            live = status == STALLED
            z_sum, p_sum, q_sum = weights[0] + 0.0, weights[1] + 0.0, weights[2] + 0.0
            status = tl.where(live & tied, TIED, status)
            status = tl.where(live & converged, CONVERGED, status)
            running = ((status == STALLED) & (passes < MAX_PASSES)).to(tl.int32)
            better = live & converged & sure
            at = _keep((running > 0) | better, moved, at)
            written = tl.where(better & shows, 0, write)
            write = running * polish

    level = tl.where(status == INFEASIBLE, 1.0, k / n)
    level = tl.where(status == NONFINITE, float("nan"), level)
    threshold, share, left = zero, zero, zero
    binary = _any(status == HARD)
    first, last, step = me, tiles, size
    if binary:
        threshold, share, left = _select(
            p_x, n_cols, k, (p_lines, p_count, size, me, meetings), T, f64, U, 1, LANES, EVEN,
            TEAM, LINES,
        )  # fmt: skip
        part = _part(tiles, me, size)
        first, last, step = part[0], part[1], part[2]
    if (written == 0) | (_any(_is_soft(status) == 0)):
        _fill(p_x, p_v, p_out, n_cols, _line(at, T), level, status, threshold, left,
              (first, last, step), GATE, T, U, 1, LANES, EVEN)  # fmt: skip
    if me == 0:
        _finish(p_state, p_info, row, status, passes, at, (z_sum / q_sum, p_sum / q_sum), level,
                (threshold, share), problem[8], hardness, FIXED)  # fmt: skip
    if TEAM:
        _leave(p_count, size)


@triton.jit
def _grad_tile(b_x, b_e, line, means, ASKED: tl.constexpr, T: tl.constexpr):
    """The gradient's sums, centred on the means; b_e is the gradient of p. ASKED: so are the count
    of the scores and the sum of b_e, which only gradients of k and hardness take."""
    b_y = _y(b_x, line)
    m_ok = b_x > -INF
    b_q = tl.where(m_ok, 0.5 * tl.exp2(tl.minimum(tl.abs(b_y), _max_y(T)) * -1.0), 0.0)
    b_p = tl.where(b_y > 0, (1.0 - _v(means[1])) - b_q, b_q - _v(means[1]))
    b_z = b_q * (tl.minimum(tl.maximum(b_y, -_max_y(T)), _max_y(T)) * LN2 - _v(means[0]))
    b_n, b_t = tl.zeros_like(b_q), tl.zeros_like(b_q)
    if ASKED:
        b_n, b_t = tl.where(m_ok, 1.0, 0.0).to(T), b_e
    terms = (b_n, b_q, b_z, b_q * b_p, b_z * b_p, b_q * b_e, b_z * b_e, b_t)
    return _own8(terms, T)


@triton.jit
def _upstream(p_v, i, n_cols, b_x, b_g, GATE: tl.constexpr, T: tl.constexpr, U: tl.constexpr,
              LANES: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """The gradient of p: the gradient that arrives, times what p gates."""
    if GATE == 1:
        b_g = b_g * _load(p_v, i, n_cols, 0.0, T, U, LANES, EVEN)
    if GATE == 2:
        b_g = b_g * b_x
    return tl.where(b_x > -INF, b_g, 0.0)


@triton.jit
def _coefficients(sums, status, t, means, pull, k, hardness, FIXED: tl.constexpr,
                  ASKED: tl.constexpr):  # fmt: skip
    """The means and c1 of dr = q/t ((e - mean e) - c1 (p - mean p)), and the gradients of k and the
    hardness."""
    n, s0, s1, u0, cov, g0, g1, total = sums
    mean_z, mean_p = means
    gb, gt = pull
    regular, tied = _is_regular(status), status == TIED
    r_s0 = _over(1.0, tl.where(s0 > 0, s0, 1.0))
    off_z, off_p = s1 * r_s0, u0 * r_s0
    p_bar = mean_p + off_p
    cov = cov - off_z * u0
    c1 = tl.zeros_like(t)
    if FIXED == 0:
        lever = g1 - off_z * g0 - t * gt + (mean_z + off_z) * t * gb
        two = regular & (cov > 0)
        c1 = tl.where(two, _over(lever, tl.where(two, cov, 1.0)), 0.0)
    e_bar = (g0 - t * gb) * r_s0
    if ASKED == 0:
        return e_bar, c1, p_bar, e_bar, e_bar
    c0, r_n = e_bar - c1 * p_bar, 1.0 / n
    flat = (status == UNIFORM) | (status == CONSTANT)
    dk = tl.where(regular | tied, c0, tl.where(flat, total * r_n, 0.0))
    if FIXED:
        # sum q z (c0 - e) / t, with z measured from mean_z and the budget's own part put back.
        dh = tl.where(regular, (c0 * s1 - g1) / t - mean_z * gb + gt, 0.0)
    else:
        a = k * r_n
        dk = tl.where(regular, dk + 0.5 * c1 * (2 * a + (1 - 2 * a) * hardness), dk)
        dh = tl.where(regular, 0.5 * c1 * k * (1 - a), 0.0)
    broken = status == NONFINITE
    return e_bar, c1, p_bar, tl.where(broken, float("nan"), dk), tl.where(broken, float("nan"), dh)


@triton.jit(do_not_specialize=PLAIN)
def vjp(
    p_x, p_v, p_g, p_dx, p_dv, p_k, p_hardness, p_state, p_info, p_pull, p_dk, p_dh, p_lines,
    p_count, rows, n_cols, size, s_k, s_hardness, k_bits, hardness_bits,
    GATE: tl.constexpr, FIXED: tl.constexpr, PULL: tl.constexpr, ASKED: tl.constexpr,
    T: tl.constexpr, S: tl.constexpr, U: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    EVEN: tl.constexpr, TEAM: tl.constexpr, LINES: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """The gradient of rows in two passes: its sums, then, backwards, the gradient itself. ONCE: a
    tile holds all of a row."""
    f64: tl.constexpr = tl.float64
    if TEAM:
        row = tl.program_id(0).to(tl.int64) // size
        me = (tl.program_id(0) % size).to(tl.int64)
        o_rows = row
        base = row * n_cols
        p_lines, p_count = p_lines + row * 2 * size * COLUMNS, p_count + row * 2
    else:
        me = 0
        o_rows = _my_rows(rows, ROWS)
        base = _v(o_rows * n_cols)
    p_x, p_v, p_g, p_dx, p_dv = p_x + base, p_v + base, p_g + base, p_dx + base, p_dv + base
    k = _number(p_k, o_rows, s_k, k_bits)
    hardness = _number(p_hardness, o_rows, s_hardness, hardness_bits)
    status = tl.load(p_info + o_rows * 2)
    soft = _is_soft(status)
    p_row = p_state + o_rows * 5
    pivot, b, t = tl.load(p_row).to(S), tl.load(p_row + 1), tl.load(p_row + 2).to(S)
    mean_z, level = tl.load(p_row + 3).to(S), tl.load(p_row + 4).to(S)
    # Rows that are not soft get a harmless point.
    at = (tl.where(soft, pivot, 0.0), tl.where(soft, b, 0.0).to(S), tl.where(soft, t, 1.0))
    means = (tl.where(soft, mean_z, 0.0), tl.where(soft, level, 0.0))
    gb, gt = tl.zeros_like(t), tl.zeros_like(t)
    if PULL:
        gb, gt = tl.load(p_pull + o_rows * 5 + 1).to(S), tl.load(p_pull + o_rows * 5 + 2).to(S)
    line = _line(at, T)
    centre = (means[0].to(T), means[1].to(T))
    centred = (centre[0].to(S), centre[1].to(S))
    tiles = 1 if ONCE else tl.cdiv(n_cols, U * LANES * 4)
    if TEAM:
        tiles = tiles.to(tl.int64)
    team = (p_lines, p_count, size, me, 0)
    b_x = _load(p_x, me, n_cols, -INF, T, U, LANES, EVEN)
    b_g = _load(p_g, me, n_cols, 0.0, T, U, LANES, EVEN)
    b_xn, b_gn = b_x, b_g

    lanes = _zero8(ROWS, LANES, T)
    for j in range(me, tiles, 1 if ONCE else size):
        if ONCE == 0:
            # The next tile is asked for while this one is summed; at the end, that which the second
            # pass begins with.
            b_x, b_g = b_xn, b_gn
            then = tl.where(j + size < tiles, j + size, tiles - 1 - me)
            b_xn = _load(p_x, then, n_cols, -INF, T, U, LANES, EVEN)
            b_gn = _load(p_g, then, n_cols, 0.0, T, U, LANES, EVEN)
        b_e = _upstream(p_v, j, n_cols, b_x, b_g, GATE, T, U, LANES, EVEN)
        lanes = _plus(lanes, _grad_tile(b_x, b_e, line, centre, ASKED, T))
    if S == f64:
        lanes = _wide(lanes)
    sums = _across(lanes, ROWS)
    sums, _seen = _meet(sums, sums[0], False, team, TEAM, LINES)
    e_bar, c1, p_bar, dk, dh = _coefficients(
        sums, status, at[2], centred, (gb, gt), k.to(S), hardness.to(S), FIXED, ASKED
    )

    # A gated hard row needs its mask: in pieces, so that ties keep the order of their index.
    first, end, step, last = me, tiles, 1 if ONCE else size, tiles - 1
    binary = _any(status == HARD) & (GATE > 0)
    left = b
    if binary:
        part = _part(tiles, me, size)
        first, end, step = part[0], part[1], part[2]
        last = last * 0
        if TEAM:
            piece = (first, end, 1, 1, 0)
            equal = _row_count(p_x, n_cols, pivot.to(T), piece, True, T, f64, U, ROWS, LANES, EVEN)
            team = (p_lines, p_count, size, me, 1)
            _meet1(equal, team, TEAM, LINES)
            left = b - _ties_before(team, LINES)
        if ONCE == 0:
            b_xn = _load(p_x, first, n_cols, -INF, T, U, LANES, EVEN)
            b_gn = _load(p_g, first, n_cols, 0.0, T, U, LANES, EVEN)
    e_bar, c1, rate = e_bar.to(T), c1.to(T), (1.0 / at[2]).to(T)
    under, over = p_bar.to(T), (1.0 - p_bar).to(T)
    # What only a regular row has a gradient of, and what a broken one adds to it.
    least = tl.where(_is_regular(status), -INF, INF).to(T)
    poison = tl.where(status == NONFINITE, float("nan"), 0.0).to(T)
    for j in range(first, end, step):
        if ONCE:
            i = 0
        else:
            walk = (first, end, step, 1, last)
            i = _stop(j, walk)
            b_x, b_g = b_xn, b_gn
            then = _stop(tl.where(j + step < end, j + step, j), walk)
            b_xn = _load(p_x, then, n_cols, -INF, T, U, LANES, EVEN)
            b_gn = _load(p_g, then, n_cols, 0.0, T, U, LANES, EVEN)
        b_e = _upstream(p_v, i, n_cols, b_x, b_g, GATE, T, U, LANES, EVEN)
        b_y = _y(b_x, line)
        b_q = 0.5 * tl.exp2(tl.minimum(tl.abs(b_y), _max_y(T)) * -1.0)
        b_p = tl.where(b_y > 0, 1.0 - b_q, b_q)
        b_off = tl.where(b_y > 0, _v(over) - b_q, b_q - _v(under))
        b_d = b_q * _v(rate) * ((b_e - _v(e_bar)) - _v(c1) * b_off)
        b_d = tl.where(b_x > _v(least), b_d, 0.0) + _v(poison)
        if GATE:
            m_ok = b_x > -INF
            b_m = tl.where(_v(soft) & m_ok, b_p, _other_mask(b_x, level, status, T))
            if binary:
                b_hard, left = _tile_hard(b_x, pivot, left, T, ROWS)
                b_m = tl.where(_v(status == HARD), b_hard, b_m)
            if GATE == 1:
                _store(p_dv, i, n_cols, b_g * b_m, U, LANES, EVEN)
            else:
                b_d += b_g * b_m
        _store(p_dx, i, n_cols, b_d, U, LANES, EVEN)
    if me == 0:
        # A number that all rows share has no gradient.
        if s_k >= 0:
            tl.store(p_dk + o_rows, dk)
        if s_hardness >= 0:
            tl.store(p_dh + o_rows, dh)
    if TEAM:
        _leave(p_count, size)
