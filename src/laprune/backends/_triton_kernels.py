# mypy: ignore-errors
# Triton compiles these functions from their source: their arguments have no Python types.
"""The Triton kernels of the CUDA backend: two that solve and two that differentiate.

- ``rows_*``: rows that fit on chip, read once and iterated in registers;
- ``long_*``: longer rows, read in chunks, each by one program or by a team of programs. A team meets
  at a barrier after every pass: each program leaves a line of sums, reads all lines in the same order,
  and takes the same step as the others.

GATE is 0 where the mask itself is wanted, 1 where it gates values, 2 where it gates the scores.
"""

import triton
import triton.language as tl

from ._triton_solver import (
    CONSTANT,
    CONVERGED,
    HARD,
    INF,
    LN2,
    MAX_PASSES,
    NONFINITE,
    ROUGH,
    SOFT,
    STALLED,
    TIED,
    UNIFORM,
    _max_y,
    across_max,
    add8,
    affine,
    aim,
    any_of,
    begin,
    classify,
    count,
    diffuse_start,
    flat_mask,
    hard_mask,
    is_regular,
    is_soft,
    is_sparse,
    keep,
    lane_near,
    lane_spread,
    lane_sums,
    level_of,
    part_aim,
    plus,
    pose,
    scaled,
    score_at,
    select_tiles,
    settle,
    soft_mask,
    solve_tiles,
    step,
    store_row,
    tiles_stats,
    top_bit,
    warmest,
)

FEW = tl.constexpr(9)  # scores on each side of the barrier that a sample should have
RUN = tl.constexpr(8)  # neighbouring scores in a sample: one sector of memory
COLUMNS = tl.constexpr(16)  # of a program's line of sums: 0 to 11 are added, the rest are maxima
SUMS = tl.constexpr(12)
FLUSH = tl.constexpr(8)  # chunks summed in the scores' own type before they join a float64


@triton.jit
def _offsets(L: tl.constexpr):
    """Where the scores of a tile [., 4, L] are."""
    return tl.arange(0, 4)[None, :, None] + 4 * tl.arange(0, L)[None, None, :]


@triton.jit
def _load_tiles(p, base, room, T: tl.constexpr, fill: tl.constexpr, L: tl.constexpr,
                TILES: tl.constexpr):  # fmt: skip
    """Tiles from `base` on, each [ROWS]; `room` scores are there."""
    o, p_rows, m_room = _offsets(L), p + base[:, None, None], room[:, None, None]
    tiles = (tl.load(p_rows + o, mask=o < m_room, other=fill).to(T),)
    for j in tl.static_range(1, TILES):
        o_j = o + j * 4 * L
        tiles = tiles + (tl.load(p_rows + o_j, mask=o_j < m_room, other=fill).to(T),)  # noqa: RUF005
    return tiles


@triton.jit
def _store_tile(p, base, room, b, j: tl.constexpr, L: tl.constexpr):
    o = _offsets(L) + j * 4 * L
    tl.store(p + base[:, None, None] + o, b, mask=o < room[:, None, None])


@triton.jit
def _load_tile(p, base, room, j: tl.constexpr, T: tl.constexpr, L: tl.constexpr):
    o = _offsets(L) + j * 4 * L
    return tl.load(p + base[:, None, None] + o, mask=o < room[:, None, None], other=0.0).to(T)


@triton.jit
def _write_tile(b_p, b_x, p_v, p_out, base, room, j: tl.constexpr, GATE: tl.constexpr,
                T: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Write a tile of the mask, or of what it gates."""
    if GATE == 1:
        b_p = _gated(b_p, _load_tile(p_v, base, room, j, T, L))
    if GATE == 2:
        b_p = _gated(b_p, b_x)
    _store_tile(p_out, base, room, b_p, j, L)


@triton.jit
def _gated(b_p, b_v):
    return tl.where(b_p == 0, 0.0, b_p * b_v)


@triton.jit
def rows_solve(
    p_r, p_v, p_out, p_k, p_hardness, p_state, p_info, rows, n_cols, s_k, s_hardness,
    mass_tol, hardness_tol,
    GATE: tl.constexpr, FIXED: tl.constexpr, T: tl.constexpr,
    ROWS: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Solve rows on chip."""
    o_rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_rows = o_rows < rows
    base, room = o_rows * n_cols, tl.where(m_rows, n_cols, 0)
    b_xs = _load_tiles(p_r, base, room, T, -INF, L, TILES)
    k = tl.load(p_k + o_rows * s_k, mask=m_rows, other=0.0)
    hardness = tl.load(p_hardness + o_rows * s_hardness, mask=m_rows, other=0.0)

    n, bad, low, high, mean, width = tiles_stats(b_xs, T)
    status = classify(n, bad, low >= high, k, hardness, FIXED)
    running = (m_rows & (status == STALLED)).to(tl.int32)
    target = aim(hardness, FIXED)
    at = diffuse_start(n, k, target, mean, width, low, high, FIXED, T)
    at, found, passes, mean_z, mean_p = solve_tiles(
        b_xs, running, at, pose(n, k, target, hardness), (mass_tol, hardness_tol), FIXED, T
    )
    status = tl.where(running > 0, found, status)
    level = level_of(status, n, k)
    hard = m_rows & (status == HARD)
    threshold, share = tl.zeros_like(k), tl.zeros_like(k)
    if any_of(hard):
        threshold, share = select_tiles(b_xs, k, ROWS, T)

    line, left = affine(at[0], at[1], at[3], T), share
    soft = is_soft(status)[:, None, None]
    for j in tl.static_range(TILES):
        b_x = b_xs[j]
        b_p = tl.where(soft, soft_mask(b_x, line, T), flat_mask(b_x, level, status, T))
        if any_of(hard):
            b_hard, left = hard_mask(b_x, threshold, left, T)
            b_p = tl.where(hard[:, None, None], b_hard, b_p)
        _write_tile(b_p, b_x, p_v, p_out, base, room, j, GATE, T, L)
    point = settle(at, T)
    if FIXED:
        point = (point[0], point[1], tl.where(at[2] == target, hardness, point[2]))
    store_row(
        p_state, p_info, o_rows, m_rows, status, passes, point, (mean_z, mean_p), level,
        (threshold, share),
    )  # fmt: skip


@triton.jit
def _barrier(p_count, goal):
    """Every program of the team has come this far, and its stores are visible."""
    tl.debug_barrier()
    tl.atomic_add(p_count, 1, sem="acq_rel")
    while tl.atomic_add(p_count, 0, sem="acq_rel") < goal:
        pass
    tl.debug_barrier()


@triton.jit
def _pick(line, j: tl.constexpr):
    """Column j of a line, as [1]."""
    o = tl.arange(0, COLUMNS)
    return tl.sum(tl.where(o == j, line, 0.0)[None, :], 1)


@triton.jit
def _meet(values, team, TEAM: tl.constexpr, LINES: tl.constexpr):
    """The 15 values of all programs of a row together: 12 sums, then 3 maxima.

    team is (lines, counter, size, own index, meetings so far). Lines alternate between two buffers,
    so that one barrier per meeting is enough.
    """
    if TEAM:
        p_lines, p_count, size, me, meetings = team
        o = tl.arange(0, COLUMNS)
        line = tl.zeros([COLUMNS], tl.float64)
        for j in tl.static_range(15):
            line = tl.where(o == j, values[j], line)
        p_here = p_lines + (meetings % 2) * size * COLUMNS
        tl.store(p_here + me * COLUMNS + o, line)
        _barrier(p_count, (meetings + 1) * size)
        o_lanes = tl.arange(0, LINES)
        m = (o_lanes < size)[:, None]
        p_all = p_here + o_lanes[:, None] * COLUMNS + o[None, :]
        lines = tl.load(p_all, mask=m, other=0.0, cache_modifier=".cg")
        # A maximum must not see the zeros of empty lanes; an infinite one must not enter a sum.
        most = tl.max(tl.where(m, lines, -INF), 0)
        line = tl.where(o < SUMS, tl.sum(tl.where((o < SUMS)[None, :], lines, 0.0), 0), most)
        return (
            _pick(line, 0), _pick(line, 1), _pick(line, 2), _pick(line, 3), _pick(line, 4),
            _pick(line, 5), _pick(line, 6), _pick(line, 7), _pick(line, 8), _pick(line, 9),
            _pick(line, 10), _pick(line, 11), _pick(line, 12), _pick(line, 13), _pick(line, 14),
        )  # fmt: skip
    else:
        return values


@triton.jit
def _wide8(a):
    return (
        a[0].to(tl.float64), a[1].to(tl.float64), a[2].to(tl.float64), a[3].to(tl.float64),
        a[4].to(tl.float64), a[5].to(tl.float64), a[6].to(tl.float64), a[7].to(tl.float64),
    )  # fmt: skip


@triton.jit
def _zero8(L: tl.constexpr, T: tl.constexpr):
    zero = tl.zeros([1, L], T)
    return zero, zero, zero, zero, zero, zero, zero, zero


@triton.jit
def _room(start, n_cols):
    """How many scores there are from start on, as [1]; no more than 2^30 matter."""
    return (tl.zeros([1], tl.int64) + tl.minimum(n_cols - start, 1 << 30)).to(tl.int32)


@triton.jit
def _base(start):
    return tl.zeros([1], tl.int64) + start


@triton.jit
def _row_pass(p_x, p_v, p_out, n_cols, line, a, flags, order, GATE: tl.constexpr,
              T: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """One program's part of a pass over a long row; writes the mask on the way if asked to.

    flags are (write, near, counting, soft); order is (first chunk, chunks, step, one chunk in so
    many, from the end).
    """
    write, near, counting, soft = flags
    first, chunks, stride, skip, reverse = order
    sums, part = _zero8(L, tl.float64), _zero8(L, T)
    zero = tl.zeros([1, L], tl.float64)
    spread, eligible, bad = zero, zero, zero
    below = tl.full([1, L], -INF, T)
    above, gap = below, below
    held = 0
    for i in range(first, chunks, stride):
        chunk = tl.where(reverse, chunks - 1 - i, i) * skip + skip // 2
        start = chunk.to(tl.int64) * (TILES * 4 * L)
        base, room = _base(start), _room(start, n_cols)
        b_xs = _load_tiles(p_x, base, room, T, -INF, L, TILES)
        for j in tl.static_range(TILES):
            part = plus(part, lane_sums(b_xs[j], line, T))
            if write:
                b_p = soft_mask(b_xs[j], line, T)
                _write_tile(b_p, b_xs[j], p_v, p_out, base, room, j, GATE, T, L)
        held += 1
        if held == FLUSH:
            sums = plus(sums, _wide8(part))
            part = _zero8(L, T)
            held = 0
        if near:
            for j in tl.static_range(TILES):
                close = lane_near(b_xs[j], line)
                below = tl.maximum(below, close[0])
                above, gap = tl.maximum(above, close[1]), tl.maximum(gap, close[2])
        if soft:
            for j in tl.static_range(TILES):
                spread += lane_spread(b_xs[j], line, a, T).to(tl.float64)
        if counting:
            for j in tl.static_range(TILES):
                eligible += tl.sum((b_xs[j] > -INF).to(tl.float32), 1).to(tl.float64)
                bad += tl.sum(((b_xs[j] < INF) == 0).to(tl.float32), 1).to(tl.float64)
    sums = tl.reduce(plus(sums, _wide8(part)), 1, add8)
    rest = tl.zeros([1], tl.float64)
    low, high, hole = rest, rest, rest
    if near:
        low, high, hole = across_max((below, above, gap))
    return (
        sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7],
        tl.sum(spread, 1), tl.sum(eligible, 1), tl.sum(bad, 1), rest, low, -high, -hole,
    )  # fmt: skip


@triton.jit
def _row_stats(p_x, n_cols, mean, first, chunks, stride, T: tl.constexpr, L: tl.constexpr,
               TILES: tl.constexpr):  # fmt: skip
    """One program's count, broken scores, sums of x and |x - mean| over n, and extremes."""
    zero = tl.zeros([1, L], tl.float64)
    eligible, bad, total, away = zero, zero, zero, zero
    low = tl.full([1, L], -INF, T)
    high = low
    share = (1.0 / n_cols).to(T)
    for i in range(first, chunks, stride):
        start = i * (TILES * 4 * L)
        b_xs = _load_tiles(p_x, _base(start), _room(start, n_cols), T, -INF, L, TILES)
        for j in tl.static_range(TILES):
            b_x, m_ok = b_xs[j], b_xs[j] > -INF
            far = tl.abs(b_x - mean.to(T)[:, None, None])
            eligible += tl.sum(m_ok.to(tl.float32), 1).to(tl.float64)
            bad += tl.sum(((b_x < INF) == 0).to(tl.float32), 1).to(tl.float64)
            total += tl.sum(tl.where(m_ok, b_x * share, 0.0), 1).to(tl.float64)
            away += tl.sum(tl.where(m_ok, far * share, 0.0), 1).to(tl.float64)
            low = tl.maximum(low, tl.max(tl.where(m_ok, -b_x, -INF), 1))
            high = tl.maximum(high, tl.max(tl.where(m_ok, b_x, -INF), 1))
    none = tl.zeros([1], tl.float64)
    return (
        tl.sum(eligible, 1), tl.sum(bad, 1), tl.sum(total, 1), tl.sum(away, 1),
        none, none, none, none, none, none, none, none,
        tl.max(low, 1).to(tl.float64), tl.max(high, 1).to(tl.float64), none,
    )  # fmt: skip


@triton.jit
def _sample_tile(p_x, n_cols, j: tl.constexpr, T: tl.constexpr, L: tl.constexpr,
                 TILES: tl.constexpr):  # fmt: skip
    """Short runs of scores, evenly over the row."""
    o = (_offsets(L) + j * 4 * L).to(tl.int64)
    stride = tl.maximum(n_cols // (TILES * 4 * L // RUN), RUN)
    o = o // RUN * stride + o % RUN
    return tl.load(p_x + o, mask=o < n_cols, other=-INF).to(T)


@triton.jit
def _load_sample(p_x, n_cols, T: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr):
    tiles = (_sample_tile(p_x, n_cols, 0, T, L, TILES),)
    for j in tl.static_range(1, TILES):
        tiles = tiles + (_sample_tile(p_x, n_cols, j, T, L, TILES),)  # noqa: RUF005
    return tiles


@triton.jit
def _from_sample(b_s, stats, k, hardness, target, live, FIXED: tl.constexpr, T: tl.constexpr):
    """Solve a sample, roughly: its answer starts the whole row."""
    n, low, high, mean, width = stats
    goal = part_aim(hardness, k, n, FIXED)
    at = diffuse_start(n, k, goal, mean, width, low, high, False, T)
    gamma = tl.where(goal < -3.0, 0.0, 1.0)
    at, _, _, _, _ = solve_tiles(b_s, live, at, pose(n, k, goal, gamma), (ROUGH, ROUGH), False, T)
    tau = tl.maximum(at[2], target) if FIXED else at[2]
    return begin(at[0], at[1], tau)


@triton.jit
def _fill_row(p_x, p_v, p_out, n_cols, line, level, status, order, GATE: tl.constexpr,
              T: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Write one program's part of a row that is not hard."""
    first, chunks, stride, reverse = order
    soft = is_soft(status)[:, None, None]
    for i in range(first, chunks, stride):
        start = tl.where(reverse, chunks - 1 - i, i).to(tl.int64) * (TILES * 4 * L)
        base, room = _base(start), _room(start, n_cols)
        b_xs = _load_tiles(p_x, base, room, T, -INF, L, TILES)
        for j in tl.static_range(TILES):
            b_flat = flat_mask(b_xs[j], level, status, T)
            b_p = tl.where(soft, soft_mask(b_xs[j], line, T), b_flat)
            _write_tile(b_p, b_xs[j], p_v, p_out, base, room, j, GATE, T, L)


@triton.jit
def _count_row(p_x, n_cols, scores, first, last, T: tl.constexpr, L: tl.constexpr,
               TILES: tl.constexpr):  # fmt: skip
    """How many of one program's scores reach each of three, and how many equal the first."""
    none = tl.zeros([1], tl.float64)
    c0, c1, c2, same = none, none, none, none
    for i in range(first, last):
        start = i * (TILES * 4 * L)
        b_xs = _load_tiles(p_x, _base(start), _room(start, n_cols), T, -INF, L, TILES)
        c0 += count(b_xs, scores[0], "reach")
        c1 += count(b_xs, scores[1], "reach")
        c2 += count(b_xs, scores[2], "reach")
        same += count(b_xs, scores[0], "equal")
    return c0, c1, c2, same, none, none, none, none, none, none, none, none, none, none, none


@triton.jit
def _ties_before(team, column: tl.constexpr, LINES: tl.constexpr):
    """The ties of the programs before this one, from the lines of the last meeting."""
    p_lines, _, size, me, meetings = team
    o = tl.arange(0, LINES)
    p_here = p_lines + ((meetings - 1) % 2) * size * COLUMNS + column
    ties = tl.load(p_here + o * COLUMNS, mask=o < me, other=0.0, cache_modifier=".cg")
    return tl.sum(ties[None, :], 1)


@triton.jit
def _hard_row(p_x, p_v, p_out, n_cols, k, team, GATE: tl.constexpr, T: tl.constexpr,
              L: tl.constexpr, TILES: tl.constexpr, TEAM: tl.constexpr,
              LINES: tl.constexpr):  # fmt: skip
    """Select by the bits of the order, two per pass, and write the row."""
    p_lines, p_count, size, me, meetings = team
    # Contiguous parts, so that ties are counted in the order of their index.
    chunks = tl.cdiv(n_cols, TILES * 4 * L)
    part = tl.cdiv(chunks, size)
    first, last = me * part, tl.minimum(chunks, me * part + part)
    rank = tl.ceil(k)
    bit = top_bit(1, T)
    cut = bit ^ bit
    while tl.max(bit.to(tl.float32), 0) > 0:
        half = bit >> 1
        trials = (cut | half, cut | bit, cut | bit | half)
        scores = (score_at(trials[0], T), score_at(trials[1], T), score_at(trials[2], T))
        counts = _count_row(p_x, n_cols, scores, first, last, T, L, TILES)
        total = _meet(counts, (p_lines, p_count, size, me, meetings), TEAM, LINES)
        meetings += 1
        cut = tl.where(total[0] >= rank, trials[0], cut)
        cut = tl.where(total[1] >= rank, trials[1], cut)
        cut = tl.where(total[2] >= rank, trials[2], cut)
        bit = bit >> 2
    threshold = tl.where(k > 0, score_at(cut, T), INF)
    scores = (threshold, threshold, threshold)
    counts = _count_row(p_x, n_cols, scores, first, last, T, L, TILES)
    total = _meet(counts, (p_lines, p_count, size, me, meetings), TEAM, LINES)
    meetings += 1
    threshold = threshold.to(tl.float64)
    share = tl.where(k > 0, k - (total[0] - total[3]), 0.0)
    left = share
    if TEAM:
        left = share - _ties_before((p_lines, p_count, size, me, meetings), 3, LINES)
    for i in range(first, last):
        start = i * (TILES * 4 * L)
        base, room = _base(start), _room(start, n_cols)
        b_xs = _load_tiles(p_x, base, room, T, -INF, L, TILES)
        for j in tl.static_range(TILES):
            b_p, left = hard_mask(b_xs[j], threshold, left, T)
            _write_tile(b_p, b_xs[j], p_v, p_out, base, room, j, GATE, T, L)
    return threshold, share


@triton.jit
def long_solve(
    p_r, p_v, p_out, p_k, p_hardness, p_state, p_info, p_lines, p_count, n_cols, size, s_k,
    s_hardness, mass_tol, hardness_tol,
    GATE: tl.constexpr, FIXED: tl.constexpr, T: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr,
    SAMPLE: tl.constexpr, COARSE: tl.constexpr, TEAM: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Solve long rows, each by `size` programs. The way to an answer: a sample in registers, one
    chunk in COARSE where that is worth a pass, then the whole row; the pass that should be the last
    writes."""
    pid = tl.program_id(0).to(tl.int64)
    row, me = pid // size, pid % size
    p_x, p_out = p_r + row * n_cols, p_out + row * n_cols
    if GATE == 1:
        p_v = p_v + row * n_cols
    if TEAM:
        p_lines, p_count = p_lines + row * 2 * size * COLUMNS, p_count + row
    o_row = row + tl.arange(0, 1)
    k = tl.load(p_k + o_row * s_k)
    hardness = tl.load(p_hardness + o_row * s_hardness)
    target = aim(hardness, FIXED)
    n_all = tl.zeros([1], tl.float64) + n_cols
    chunks = tl.cdiv(n_cols, TILES * 4 * L).to(tl.int64)
    few = ((n_cols // (TILES * 4 * L)) // COARSE).to(tl.int64)
    meetings, counted = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    one = tl.full([], 1, tl.int64)

    b_s = _load_sample(p_x, n_cols, T, L, SAMPLE)
    n_s, bad_s, low, high, mean, width = tiles_stats(b_s, T)
    # A handful on each side of the barrier: fewer say nothing about the temperature.
    k_s = k * tl.minimum(1.0 * (SAMPLE * 4 * L) / n_all, 1.0)
    k_s = tl.minimum(tl.maximum(k_s, FEW), n_s - FEW)
    quick = (classify(n_all, bad_s, low >= high, k, hardness, FIXED) == STALLED) & (k_s > 0)
    status = tl.full([1], STALLED, tl.int32)
    n, skip = n_all, one
    if any_of(quick):
        at = _from_sample(
            b_s, (n_s, low, high, mean, width), k_s, hardness, target, quick.to(tl.int32), FIXED, T
        )
        share = tl.max(tl.minimum(k, n_all - k) / n_all, 0) * (few * (TILES * 4 * L))
        skip = tl.where(share > 16 * FEW, one * COARSE, one)
    else:
        total = _row_stats(p_x, n_cols, mean, me, chunks, size, T, L, TILES)
        total = _meet(total, (p_lines, p_count, size, me, meetings), TEAM, LINES)
        n, low, high = total[0], -total[12], total[13]
        status = classify(n, total[1] > 0, low >= high, k, hardness, FIXED)
        mean = tl.minimum(tl.maximum(total[2] * (n_all / n), low), high)
        total = _row_stats(p_x, n_cols, mean, me, chunks, size, T, L, TILES)
        total = _meet(total, (p_lines, p_count, size, me, meetings + 1), TEAM, LINES)
        width = total[3] * (n_all / n)
        at = diffuse_start(n, k, target, mean, width, low, high, FIXED, T)
        meetings += 2
        counted += 1

    running = (status == STALLED).to(tl.int32)
    none = tl.zeros([1], tl.int32)
    passes, polish, polished = none, none, none
    mean_z, mean_p = tl.zeros([1], tl.float64), tl.zeros([1], tl.float64)
    near, write, written = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    while tl.max(running, 0) > 0:
        whole = skip == 1
        counting = (counted == 0) | (skip > 1)
        k_pass = tl.where(whole, k, k * ((few * (TILES * 4 * L)).to(tl.float64) / n_all))
        goal = target
        if FIXED == 0:
            goal = tl.where(whole, target, part_aim(hardness, k_pass, n_all * (k_pass / k), FIXED))
        flags = (write > 0, near > 0, counting, any_of(hardness < SOFT) & (FIXED == 0))
        order = (me, tl.where(whole, chunks, few), size, skip, (meetings & 1) > 0)
        line = affine(at[0], at[1], at[3], T)
        total = _row_pass(p_x, p_v, p_out, n_cols, line, k / n, flags, order, GATE, T, L, TILES)
        total = _meet(total, (p_lines, p_count, size, me, meetings), TEAM, LINES)
        meetings += 1
        sums = (
            total[0], total[1], total[2], total[3], total[4], total[5], total[6], total[7],
        )  # fmt: skip
        n_pass = tl.where(counting, total[9], n)
        problem = pose(n_pass, k_pass, goal, hardness)
        below, above = total[12], -total[13]
        bound = warmest(below, above, problem, T)
        close = ((near > 0) & (running > 0), below, above, -total[14], bound)
        # Without the neighbours a step would be blind: read the row once more with them.
        blind = (near == 0) & any_of(is_sparse(sums, n_pass))
        passes += 1
        converged, tied, moved, again, tried, size_e, means = step(
            sums, total[8], close, at, (passes, polish, polished), problem,
            (mass_tol, hardness_tol), FIXED, T,
        )  # fmt: skip
        if whole:
            bad = counting & (total[10] > 0)
            verdict = classify(n_pass, bad, none > 0, k, hardness, FIXED)
            status = tl.where(verdict == STALLED, status, verdict)
            live = (status == STALLED) & (blind == 0)
            status = tl.where(live & tied, TIED, status)
            status = tl.where(live & converged, CONVERGED, status)
            mean_z, mean_p = means
            running = ((status == STALLED) & (passes < MAX_PASSES)).to(tl.int32)
            written = write
            polish, polished = tl.where(blind, polish, again), tl.where(blind, polished, tried)
            forth = (running > 0) | ((again > 0) & (written == 0) & (status == CONVERGED))
            at = keep(forth & (blind == 0), moved, at)
            write = tl.max(running * polish, 0)
            n = n_pass
            counted += 1
        else:
            sane = (moved[1] == moved[1]) & (moved[2] == moved[2]) & (k_pass < 0.999 * n_pass)
            at = keep(sane & (blind == 0), moved, at)
            enough = (size_e < 0.05) | (sane == 0) | (passes >= 6)
            if any_of(enough) & (blind == 0):
                skip = one
                passes = none
                at = begin(at[0], at[1], at[2])
        near = tl.maximum(near, blind.to(tl.int32))

    threshold, share = tl.zeros([1], tl.float64), tl.zeros([1], tl.float64)
    level = level_of(status, n, k)
    if any_of(status == HARD):
        threshold, share = _hard_row(
            p_x, p_v, p_out, n_cols, k, (p_lines, p_count, size, me, meetings),
            GATE, T, L, TILES, TEAM, LINES,
        )  # fmt: skip
    else:
        if (written == 0) | (any_of(is_soft(status)) == 0):
            order = (me, chunks, size, (meetings & 1) > 0)
            line = affine(at[0], at[1], at[3], T)
            _fill_row(p_x, p_v, p_out, n_cols, line, level, status, order, GATE, T, L, TILES)
    point = settle(at, T)
    if FIXED:
        point = (point[0], point[1], tl.where(at[2] == target, hardness, point[2]))
    m_first = o_row - row + me == 0
    store_row(
        p_state, p_info, o_row, m_first, status, passes, point, (mean_z, mean_p), level,
        (threshold, share),
    )  # fmt: skip


@triton.jit
def _grad_lanes(b_x, b_e, line, means, T: tl.constexpr):
    """What the gradient needs, per lane, centred on the means; b_e is the gradient of p."""
    b_y = scaled(b_x, line)
    m_ok = b_x > -INF
    q = tl.where(m_ok, 0.5 * tl.exp2(-tl.minimum(tl.abs(b_y), _max_y(T))), 0.0)
    v = tl.where(b_y > 0, 1.0 - q, q) - means[1].to(T)[:, None, None]
    qz = q * (tl.where(m_ok, b_y, 0.0) * LN2 - means[0].to(T)[:, None, None])
    return (
        tl.sum(m_ok.to(T), 1),
        tl.sum(q, 1),
        tl.sum(qz, 1),
        tl.sum(q * v, 1),
        tl.sum(qz * v, 1),
        tl.sum(q * b_e, 1),
        tl.sum(qz * b_e, 1),
        tl.sum(b_e, 1),
    )


@triton.jit
def _load_state(p_state, p_info, p_gstate, o_rows, m, HAS_STATE: tl.constexpr):
    """Status, point, means, the state's own gradient, and (threshold, share, level); rows that are
    not soft get a harmless point."""
    status = tl.load(p_info + o_rows * 2, mask=m, other=1)
    soft = is_soft(status)
    p_row = p_state + o_rows * 5
    pivot, b = tl.load(p_row, mask=m, other=0.0), tl.load(p_row + 1, mask=m, other=0.0)
    t = tl.load(p_row + 2, mask=m, other=1.0)
    mean_z, mean_p = tl.load(p_row + 3, mask=m, other=0.0), tl.load(p_row + 4, mask=m, other=0.0)
    gb, gt = tl.zeros_like(t), tl.zeros_like(t)
    if HAS_STATE:
        gb = tl.load(p_gstate + o_rows * 5 + 1, mask=m, other=0.0)
        gt = tl.load(p_gstate + o_rows * 5 + 2, mask=m, other=0.0)
    point = (tl.where(soft, pivot, 0.0), tl.where(soft, b, 0.0), tl.where(soft, t, 1.0))
    means = (tl.where(soft, mean_z, 0.0), tl.where(soft, mean_p, 0.0))
    return status, point, means, (gb, gt), (pivot, b, mean_p)


@triton.jit
def _coefficients(sums, status, t, means, pull, k, hardness, FIXED: tl.constexpr):
    """c0 and c1 of dr = q/t (e - c0 - c1 p), and the gradients of k and the hardness."""
    n, s0, s1, u0, cov, g0, g1, total = sums
    mean_z, mean_p = means
    gb, gt = pull
    regular, tied = is_regular(status), status == TIED
    s0 = tl.where(s0 > 0, s0, 1.0)
    z_bar, p_bar = mean_z + s1 / s0, mean_p + u0 / s0
    cov = cov - s1 * u0 / s0
    c1 = tl.zeros_like(t)
    if FIXED == 0:
        lever = g1 - s1 / s0 * g0 - t * gt + z_bar * t * gb
        two = regular & (cov > 0)
        c1 = tl.where(two, lever / tl.where(two, cov, 1.0), 0.0)
    c0 = (g0 - t * gb) / s0 - c1 * p_bar
    level = (status == UNIFORM) | (status == CONSTANT)
    dk = tl.where(regular | tied, c0, tl.where(level, total / n, 0.0))
    if FIXED:
        dh = tl.where(regular, (c0 * s1 - g1) / t - mean_z * gb + gt, 0.0)
    else:
        a = k / n
        dk = tl.where(regular, dk + 0.5 * c1 * (2 * a + (1 - 2 * a) * hardness), dk)
        dh = tl.where(regular, 0.5 * c1 * k * (1 - a), 0.0)
    broken = status == NONFINITE
    return c0, c1, tl.where(broken, float("nan"), dk), tl.where(broken, float("nan"), dh)


@triton.jit
def _grad_tile(b_x, b_g, b_e, b_hard, line, t, c, status, level,
               GATE: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The gradient of the scores through p, and g p where the row is gated."""
    b_y = scaled(b_x, line)
    m_ok = b_x > -INF
    q = 0.5 * tl.exp2(-tl.minimum(tl.abs(b_y), _max_y(T)))
    b_p = tl.where(b_y > 0, 1.0 - q, q)
    slack = (b_e - c[0].to(T)[:, None, None]) - c[1].to(T)[:, None, None] * b_p
    d = q * (1.0 / t).to(T)[:, None, None] * slack
    broken = (status == NONFINITE)[:, None, None]
    d = tl.where(broken, float("nan"), tl.where(is_regular(status)[:, None, None] & m_ok, d, 0.0))
    direct = d
    if GATE:
        b_p = tl.where(is_soft(status)[:, None, None] & m_ok, b_p, flat_mask(b_x, level, status, T))
        direct = b_g * tl.where((status == HARD)[:, None, None], b_hard, b_p)
        if GATE == 2:
            d += direct
    return d, direct


@triton.jit
def _upstream(b_x, b_g, b_v, GATE: tl.constexpr):
    """The gradient of p: g, times what p gates."""
    if GATE:
        b_g = b_g * b_v
    return tl.where(b_x > -INF, b_g, 0.0)


@triton.jit
def rows_vjp(
    p_r, p_v, p_g, p_dr, p_dv, p_k, p_hardness, p_state, p_info, p_gstate, p_dk, p_dh, rows,
    n_cols, s_k, s_hardness,
    GATE: tl.constexpr, FIXED: tl.constexpr, HAS_STATE: tl.constexpr, T: tl.constexpr,
    ROWS: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The gradient of rows on chip."""
    o_rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_rows = o_rows < rows
    base, room = o_rows * n_cols, tl.where(m_rows, n_cols, 0)
    b_xs = _load_tiles(p_r, base, room, T, -INF, L, TILES)
    b_gs = _load_tiles(p_g, base, room, T, 0.0, L, TILES)
    b_vs = b_xs
    if GATE == 1:
        b_vs = _load_tiles(p_v, base, room, T, 0.0, L, TILES)
    k = tl.load(p_k + o_rows * s_k, mask=m_rows, other=0.0)
    hardness = tl.load(p_hardness + o_rows * s_hardness, mask=m_rows, other=0.0)
    status, point, means, pull, flat = _load_state(
        p_state, p_info, p_gstate, o_rows, m_rows, HAS_STATE
    )
    line = affine(point[0], point[1], point[2], T)
    lanes = _grad_lanes(b_xs[0], _upstream(b_xs[0], b_gs[0], b_vs[0], GATE), line, means, T)
    for j in tl.static_range(1, TILES):
        b_e = _upstream(b_xs[j], b_gs[j], b_vs[j], GATE)
        lanes = plus(lanes, _grad_lanes(b_xs[j], b_e, line, means, T))
    sums = _wide8(tl.reduce(lanes, 1, add8))
    c0, c1, dk, dh = _coefficients(sums, status, point[2], means, pull, k, hardness, FIXED)

    left = flat[1]
    for j in tl.static_range(TILES):
        b_hard = b_gs[j]
        if GATE:
            if any_of(status == HARD):
                b_hard, left = hard_mask(b_xs[j], flat[0], left, T)
        b_e = _upstream(b_xs[j], b_gs[j], b_vs[j], GATE)
        b_d, b_direct = _grad_tile(
            b_xs[j], b_gs[j], b_e, b_hard, line, point[2], (c0, c1), status, flat[2], GATE, T
        )
        if GATE == 1:
            _store_tile(p_dv, base, room, b_direct, j, L)
        _store_tile(p_dr, base, room, b_d, j, L)
    tl.store(p_dk + o_rows, dk, mask=m_rows)
    tl.store(p_dh + o_rows, dh, mask=m_rows)


@triton.jit
def _row_grad_sums(p_x, p_v, p_g, n_cols, line, means, hard, order, GATE: tl.constexpr,
                   T: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """One program's part of the sums of the gradient, and its ties where the row is hard.

    hard is (whether it is, its threshold); order is (first chunk, end, step).
    """
    sums, part = _zero8(L, tl.float64), _zero8(L, T)
    none = tl.zeros([1], tl.float64)
    ties = none
    held = 0
    for i in range(order[0], order[1], order[2]):
        start = i * (TILES * 4 * L)
        base, room = _base(start), _room(start, n_cols)
        b_xs = _load_tiles(p_x, base, room, T, -INF, L, TILES)
        b_gs = _load_tiles(p_g, base, room, T, 0.0, L, TILES)
        b_vs = b_xs
        if GATE == 1:
            b_vs = _load_tiles(p_v, base, room, T, 0.0, L, TILES)
        for j in tl.static_range(TILES):
            b_e = _upstream(b_xs[j], b_gs[j], b_vs[j], GATE)
            part = plus(part, _grad_lanes(b_xs[j], b_e, line, means, T))
        held += 1
        if held == FLUSH:
            sums = plus(sums, _wide8(part))
            part = _zero8(L, T)
            held = 0
        if hard[0]:
            ties += count(b_xs, hard[1].to(T), "equal")
    sums = tl.reduce(plus(sums, _wide8(part)), 1, add8)
    return (
        sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7], ties,
        none, none, none, none, none, none,
    )  # fmt: skip


@triton.jit
def long_vjp(
    p_r, p_v, p_g, p_dr, p_dv, p_k, p_hardness, p_state, p_info, p_gstate, p_dk, p_dh, p_lines,
    p_count, n_cols, size, s_k, s_hardness,
    GATE: tl.constexpr, FIXED: tl.constexpr, HAS_STATE: tl.constexpr, T: tl.constexpr,
    L: tl.constexpr, TILES: tl.constexpr, TEAM: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The gradient of long rows in two passes: its sums, then, from the end, the gradient."""
    pid = tl.program_id(0).to(tl.int64)
    row, me = pid // size, pid % size
    p_x, p_g, p_dr = p_r + row * n_cols, p_g + row * n_cols, p_dr + row * n_cols
    if GATE == 1:
        p_v, p_dv = p_v + row * n_cols, p_dv + row * n_cols
    if TEAM:
        p_lines, p_count = p_lines + row * 2 * size * COLUMNS, p_count + row
    o_row = row + tl.arange(0, 1)
    k, hardness = tl.load(p_k + o_row * s_k), tl.load(p_hardness + o_row * s_hardness)
    status, point, means, pull, flat = _load_state(
        p_state, p_info, p_gstate, o_row, o_row >= 0, HAS_STATE
    )
    hard = any_of(status == HARD) & (GATE > 0)
    # A hard row is cut into contiguous parts, so that ties keep the order of their index.
    chunks = tl.cdiv(n_cols, TILES * 4 * L).to(tl.int64)
    part = tl.cdiv(chunks, size)
    first = tl.where(hard, me * part, me)
    last = tl.where(hard, tl.minimum(chunks, me * part + part), chunks)
    stride = tl.where(hard, 1, size)
    line = affine(point[0], point[1], point[2], T)
    total = _row_grad_sums(
        p_x, p_v, p_g, n_cols, line, means, (hard, flat[0]), (first, last, stride), GATE, T, L, TILES
    )
    total = _meet(total, (p_lines, p_count, size, me, 0), TEAM, LINES)
    sums = (
        total[0], total[1], total[2], total[3], total[4], total[5], total[6], total[7],
    )  # fmt: skip
    c0, c1, dk, dh = _coefficients(sums, status, point[2], means, pull, k, hardness, FIXED)
    left = flat[1]
    if TEAM:
        left = left - _ties_before((p_lines, p_count, size, me, 1), 8, LINES)

    for i in range(first, last, stride):
        start = tl.where(hard, i, chunks - 1 - i).to(tl.int64) * (TILES * 4 * L)
        base, room = _base(start), _room(start, n_cols)
        b_xs = _load_tiles(p_x, base, room, T, -INF, L, TILES)
        b_gs = _load_tiles(p_g, base, room, T, 0.0, L, TILES)
        b_vs = b_xs
        if GATE == 1:
            b_vs = _load_tiles(p_v, base, room, T, 0.0, L, TILES)
        for j in tl.static_range(TILES):
            b_hard = b_gs[j]
            if hard:
                b_hard, left = hard_mask(b_xs[j], flat[0], left, T)
            b_e = _upstream(b_xs[j], b_gs[j], b_vs[j], GATE)
            b_d, b_direct = _grad_tile(
                b_xs[j], b_gs[j], b_e, b_hard, line, point[2], (c0, c1), status, flat[2], GATE, T
            )
            if GATE == 1:
                _store_tile(p_dv, base, room, b_direct, j, L)
            _store_tile(p_dr, base, room, b_d, j, L)
    m_first = o_row - row + me == 0
    tl.store(p_dk + o_row, dk, mask=m_first)
    tl.store(p_dh + o_row, dh, mask=m_first)
