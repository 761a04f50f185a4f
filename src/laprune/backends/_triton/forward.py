# mypy: ignore-errors
"""The forward kernels: short rows, several to a program, and long rows, a team to each."""

import triton
import triton.language as tl

from .endpoints import (
    CONVERGED,
    HARD,
    INFEASIBLE,
    NONFINITE,
    STALLED,
    TIED,
    _classify,
    _is_soft,
    _other_mask,
    _select,
    _tile_hard,
)
from .start import _begin, _ladder, _start
from .step import SOFT, _keep, _pose, _sane, _step
from .sums import (
    BAD,
    _gate,
    _held_near,
    _held_range,
    _held_spread,
    _held_sums,
    _held_survey,
    _line,
    _pass,
    _row_near,
    _row_range,
    _row_seen,
    _row_spread,
    _row_survey,
    _tile_mask,
    _write,
)
from .team import COLUMNS, _leave, _meet, _meet1, _meet_max, _part, _wide
from .tiles import (
    INF,
    PLAIN,
    _any,
    _load,
    _my_rows,
    _number,
    _over,
    _sample,
    _starts,
    _stop,
    _store,
    _v,
    _zeros,
)

MAX_PASSES = tl.constexpr(100)
SPARSE = tl.constexpr(3e-10)  # less q per score on a side: no score there for SATURATED / 2
MIN_DOUBT = tl.constexpr(8.0)  # least k (1-a) of a sample that says anything


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


@triton.jit(do_not_specialize=PLAIN)
def solve_rows(
    p_x, p_v, p_out, p_k, p_hardness, p_state, p_info, rows, n_cols, s_k, s_hardness, k_bits,
    hardness_bits, mass_tol, hardness_tol,
    GATE: tl.constexpr, FIXED: tl.constexpr, T: tl.constexpr, U: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr,
    BY: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Solve short rows, ROWS to a program; ONCE: a tile holds all of a row."""
    f64: tl.constexpr = tl.float64
    o_rows = _my_rows(rows, ROWS)
    n_cols = n_cols // BY * BY  # which Triton sees to be a multiple of BY
    o_in, o_out = _starts(o_rows, n_cols, SINGLE)
    p_x, p_v, p_out = p_x + _v(o_in), p_v + _v(o_in), p_out + _v(o_out)
    k = _number(p_k, o_rows, s_k, k_bits)
    hardness = _number(p_hardness, o_rows, s_hardness, hardness_bits)
    walk = (0, 1 if ONCE else tl.cdiv(n_cols, U * LANES * 4), 1, 1, 0)
    alone = (p_info, p_info, 1, 0, 0)

    b_held = p_x
    if ONCE:
        b_held = _load(p_x, 0, n_cols, -INF, T, U, LANES, EVEN)
    if ONCE and EVEN != 1:
        stats = _held_survey(b_held, n_cols, T, T, ROWS, LANES)
    else:
        # Most rows are finite. Where one is not, its count says so.
        if ONCE:
            stats = _held_range(b_held, n_cols, ROWS)
        else:
            stats = _row_range(p_x, n_cols, walk, T, U, ROWS, LANES, EVEN)
        if _any(stats[0] != stats[0]):
            if ONCE:
                stats = _held_survey(b_held, n_cols, T, T, ROWS, LANES)
            else:
                stats = _row_survey(p_x, n_cols, walk, T, T, U, ROWS, LANES, EVEN)
    n, bad, mean, high, low, tops, bottoms = stats
    low, share = -low, n_cols / tl.maximum(n, 1.0)
    mean = tl.minimum(tl.maximum(mean * share, low), high)
    n = n.to(f64)
    status = _classify(n, bad, low == high, k, hardness, FIXED)
    running = (status == STALLED).to(tl.int32)
    problem = _pose(n, k, hardness, FIXED, T, T)
    cuts = _ladder(tops, bottoms, problem[5], problem[3] > 0.5, ROWS, LANES)
    at, _m = _start(p_x, b_held, n_cols, (mean, high, low), cuts, problem, not ONCE, walk, alone,
                    FIXED, T, T, U, ROWS, LANES, EVEN, ONCE, False, 1)  # fmt: skip
    heat = problem[8]

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
            sums = _pass(p_x, p_v, p_out, n_cols, line, write > 0, False, walk, b_held, 0, False,
                         GATE, T, U, ROWS, LANES, EVEN)[0]  # fmt: skip
        if soft:
            spread = _row_spread(p_x, n_cols, line, problem[3], problem[4], walk, T, T, U, ROWS,
                                 LANES, EVEN)  # fmt: skip
        passes += running
        # Row by row: what a row comes to is no matter of the rows beside it.
        bare = (running > 0) & (tl.minimum(sums[1], sums[2]) < problem[0] * SPARSE)
        sparse = _any(bare)
        tries, tolerance = (passes, polish, polished), (mass_tol, hardness_tol)
        if sparse:
            below, above, gap = _row_near(p_x, n_cols, line, walk, T, T, U, ROWS, LANES, EVEN)
            near = (bare, below, -above, -gap)
            step = _step(sums, spread, near, at, tries, problem, tolerance, FIXED, False, T)
        else:
            # What depends on the scores beside the barrier falls away.
            near = (running * 0 > 0, none.to(T), none.to(T), none.to(T))
            step = _step(sums, spread, near, at, tries, problem, tolerance, FIXED, False, T)
        converged, tied, moved, sure, again, tried, _size, shows, weights = step
        live = running > 0
        z_sum, p_sum = tl.where(live, weights[0], z_sum), tl.where(live, weights[1], p_sum)
        q_sum = tl.where(live, weights[2], q_sum)
        status = tl.where(live & tied, TIED, status)
        status = tl.where(live & converged, CONVERGED, status)
        polish, polished = again, tl.where(live, tried, polished)
        sane = _sane(moved)
        running = ((status == STALLED) & (passes < MAX_PASSES) & live & sane).to(tl.int32)
        # A short step from a point that is converged already is better still; a mask that is
        # written there is written anew where that shows.
        better = live & converged & sure & sane
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
    elif ONCE:
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


@triton.jit(do_not_specialize=PLAIN)
def solve_long(
    p_x, p_v, p_out, p_k, p_hardness, p_state, p_info, p_lines, p_count, n_cols, size, s_k,
    s_hardness, k_bits, hardness_bits, mass_tol, hardness_tol, few_tiles,
    GATE: tl.constexpr, FIXED: tl.constexpr, T: tl.constexpr, U: tl.constexpr, LANES: tl.constexpr,
    EVEN: tl.constexpr, BY: tl.constexpr, SINGLE: tl.constexpr, TEAM: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Solve long rows, each by a team: a sample first, then a few tiles of the row where that is
    worth a pass, then all of it. The pass that should be the last one writes."""
    f64: tl.constexpr = tl.float64
    W: tl.constexpr = U * LANES * 4
    row = tl.program_id(0).to(tl.int64) // size
    me = (tl.program_id(0) % size).to(tl.int64)
    n_cols = n_cols // BY * BY  # which Triton sees to be a multiple of BY
    o_in, o_out = _starts(row, n_cols, SINGLE)
    p_x, p_v, p_out = p_x + o_in, p_v + o_in, p_out + o_out
    if TEAM:
        p_lines, p_count = p_lines + row * 2 * size * COLUMNS, p_count + row * 2
    k = _number(p_k, row, s_k, k_bits)
    hardness = _number(p_hardness, row, s_hardness, hardness_bits)
    tiles = tl.cdiv(me * 0 + n_cols, W)  # in 64 bits, as me
    walk = (me, tiles, size, 1, 0)
    meetings = tl.zeros([], tl.int32)
    none, zero = tl.zeros([], tl.int32), tl.zeros([], f64)

    # The start: a sample, if it says enough; else the whole row.
    b_s = _sample(p_x, n_cols, T, U, LANES, EVEN)
    share = (zero + W) / n_cols
    n, bad, mean, high, low, tops, bottoms = _held_survey(b_s, n_cols, T, f64, 1, LANES)
    low = -low
    k_now = k * share
    doubt = k_now * (1.0 - k_now / n)
    whole = _any((doubt >= MIN_DOUBT) & (high > low) & (bad == 0)) == 0
    status = none + STALLED
    if whole:
        n, bad, mean, high, low, tops, bottoms = _row_survey(
            p_x, n_cols, walk, T, f64, U, 1, LANES, EVEN
        )
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
    cuts = (mean * 0.0 + INF, mean * 0.0 + INF, mean * 0.0 + INF)
    if whole == 0:
        cuts = _ladder(tops, bottoms, problem[5], problem[3] > 0.5, 1, LANES)
    at, meetings = _start(
        p_x, b_s, n_cols, (mean, high, low), cuts, problem, whole, walk,
        (p_lines, p_count, size, me, meetings), FIXED, T, f64, U, 1, LANES, EVEN, True, TEAM, LINES,
    )  # fmt: skip

    # The first tile is on its way while the sample is solved.
    few = (whole == 0) & (few_tiles < tiles)
    stretch = tiles // few_tiles
    ready = tl.where(few, me * stretch, me)
    b_next = _load(p_x, ready, n_cols, -INF, T, U, LANES, EVEN)
    soft = _any(hardness < SOFT) & (FIXED == 0)
    tolerance = (mass_tol, hardness_tol)
    # Then a few tiles, if few, and the row. All scores are taken to be finite until one is not.
    sampling, looking = (whole == 0).to(tl.int32), (whole == 0).to(tl.int32)
    running = (status == STALLED).to(tl.int32)
    passes, polish, polished = none, none, none
    z_sum, p_sum, q_sum = zero.to(T), zero.to(T), zero.to(T)
    write, written = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    walks = tl.zeros([], tl.int32)
    while running > 0:
        line = _line(at, T)
        # Every other pass goes backwards: it finds in the cache what the one before left there.
        last_tile = tl.where((few == 0) & ((walks & 1) > 0), tiles - 1, 0)
        path = (me, tl.where(few, few_tiles, tiles), size, tl.where(few, stretch, 1), last_tile)
        spread, below, above, gap = zero.to(T), zero.to(T), zero.to(T), zero.to(T)
        if sampling > 0:
            sums = _wide(_held_sums(b_s, line, T, 1))
            if soft:
                spread = _held_spread(b_s, line, problem[3], problem[4], T, 1, LANES)
            sparse = tl.minimum(sums[1], sums[2]) < n * SPARSE
            if sparse:
                below, above, gap = _held_near(b_s, line, T, 1)
        else:
            after = tl.where(few | ((walks & 1) > 0), me, tiles - 1 - me)
            walks += tl.where(few, 0, 1)
            if ready != _stop(me, path):
                b_next = _load(p_x, _stop(me, path), n_cols, -INF, T, U, LANES, EVEN)
            ready = after
            sums, odd, b_next = _pass(
                p_x, p_v, p_out, n_cols, line, write > 0, looking > 0, path, b_next, after, True,
                GATE, T, U, 1, LANES, EVEN,
            )  # fmt: skip
            team = (p_lines, p_count, size, me, meetings)
            sums, odd = _meet(_wide(sums), odd.to(f64), looking > 0, team, TEAM, LINES)
            meetings += 1
            if looking > 0:
                n = zero + tl.where(few, (me * 0 + few_tiles) * W, n_cols)
                bad = zero
                if odd != odd:
                    seen = _row_seen(p_x, n_cols, path, T, f64, U, 1, LANES, EVEN)
                    seen = _meet1(seen, (p_lines, p_count, size, me, meetings), TEAM, LINES)
                    meetings += 1
                    bad = tl.floor(seen / BAD)
                    n = seen - bad * BAD
                k_now = tl.where(few, k * few_tiles * W / n_cols, k)
                goal = tl.where(few, _part_goal(hardness, k_now, n, FIXED), hardness)
                problem = _pose(n, k_now, goal, FIXED, T, f64)
                if few == 0:
                    status = _classify(n, bad, none > 0, k, hardness, FIXED)
                    looking = looking * 0
            if soft:
                spread = _row_spread(p_x, n_cols, line, problem[3], problem[4], path, T, f64, U, 1,
                                     LANES, EVEN)  # fmt: skip
                team = (p_lines, p_count, size, me, meetings)
                spread = _meet1(spread, team, TEAM, LINES).to(T)
                meetings += 1
            sparse = tl.minimum(sums[1], sums[2]) < n * SPARSE
            if sparse:
                beside = _row_near(p_x, n_cols, line, path, T, f64, U, 1, LANES, EVEN)
                beside = _meet_max(beside, (p_lines, p_count, size, me, meetings), TEAM, LINES)
                meetings += 1
                below, above, gap = beside[0].to(T), beside[1].to(T), beside[2].to(T)
        passes += 1
        tries = (passes, polish, polished)
        near = (sparse, below, -above, -gap)
        step = _step(sums, spread, near, at, tries, problem, tolerance, FIXED, True, T)
        converged, tied, moved, sure, again, tried, error, shows, weights = step
        sane = _sane(moved)
        if (sampling > 0) | few:
            # A part of a row is not worth being solved to the end.
            at = _keep(sane, moved, at)
            if (error < 0.8) | (sane == 0) | (passes >= 12):
                few = few & (sampling > 0)
                sampling = sampling * 0
                passes = none
                at = _begin(at[0], at[1], at[2])
        else:
            z_sum, p_sum, q_sum = weights[0] + 0.0, weights[1] + 0.0, weights[2] + 0.0
            live = status == STALLED
            status = tl.where(live & tied, TIED, status)
            status = tl.where(live & converged, CONVERGED, status)
            running = ((status == STALLED) & (passes < MAX_PASSES) & sane).to(tl.int32)
            better = live & converged & sure & sane
            at = _keep((running > 0) | better, moved, at)
            polish, polished = again, tried
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
