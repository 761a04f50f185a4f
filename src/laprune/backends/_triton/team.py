# mypy: ignore-errors
"""Sums over a thread's scores, over the threads of a program, and over the programs of a team."""

import triton
import triton.language as tl

from .tiles import INF, _plain

COLUMNS = tl.constexpr(16)  # numbers a program shows its team


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
def _plus_kept(a, kept, b):
    """_plus, but what rounding takes from the sums that all rests on, the second and the third, is
    kept for the next time: of equal terms, as ties have, it would add up."""
    lo, hi = b[1] - kept[0], b[2] - kept[1]
    sums = _plus(a, (b[0], lo, hi, b[3], b[4], b[5], b[6], b[7]))
    return sums, ((sums[1] - a[1]) - lo, (sums[2] - a[2]) - hi)


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


@triton.jit
def _ties_before(team, LINES: tl.constexpr):
    """Column 1 of the programs before this one."""
    p_lines, _, size, me, meetings = team
    o = tl.arange(0, LINES)
    p_here = p_lines + ((meetings % 2) * COLUMNS + 1) * size
    return tl.sum(tl.load(p_here + o, mask=o < me, other=0.0, cache_modifier=".cg"), 0)


@triton.jit
def _part(tiles, me, size):
    """A program's tiles as one piece of the row, so that ties keep the order of their index."""
    each = tl.cdiv(tiles, size)
    return me * each, tl.minimum(tiles, me * each + each), 1, 1, 0
