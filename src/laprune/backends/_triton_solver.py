# mypy: ignore-errors
# Triton compiles these functions from their source: their arguments have no Python types.
"""The two-equation solver in Triton, for tiles of rows. ``reference`` explains the mathematics.

Scores are tiles ``[ROWS, 4, LANES]``: a thread has four neighbouring scores of one row, and sums them
without talking to other threads. A row, or a chunk of one, is a tuple of such tiles, worked on one
after the other to bound the registers in use. What belongs to a row is a vector ``[ROWS]``: the point
in float64, Newton's ratios in the type ``T`` of the scores.

The exponent is kept in base two: ``y = z log2(e)`` and ``e = 2^-|y| = 2q``.
"""

import triton
import triton.language as tl

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
SOFT = tl.constexpr(0.05)  # below this gamma, sum (p - a)^2 needs its own sum
# Sums of e per score below this: one side of the barrier is empty for at least SATURATED / 2.
SPARSE = tl.constexpr(2e-10)
ROUGH = tl.constexpr(1e-2)  # tolerance of a solution that only starts another
EXTREME = tl.constexpr(64.0)  # budgets with k (1-a) below this start in a tail


@triton.jit
def _max_y(T: tl.constexpr):
    """|y| is cut here, before the exponential underflows."""
    return 1009.8865286222744 if T == tl.float64 else 115.41560327111707


@triton.jit
def affine(pivot, b, t, T: tl.constexpr):
    """y = (x - pivot) rate - c. The pivot is close to the barrier, so that c is small or q is."""
    rate = 1.0 / t.to(T) * LOG2E
    return pivot.to(T), rate, (b * rate.to(tl.float64)).to(T)


@triton.jit
def settle(at, T: tl.constexpr):
    """The point as `affine` rounds it: what the mask is written with, and the gradient reads."""
    _, rate, c = affine(at[0], at[1], at[3], T)
    rate = rate.to(tl.float64)
    return at[0], c.to(tl.float64) / rate, 1.0 / rate * LOG2E


@triton.jit
def scaled(b_x, line):
    pivot, rate, c = line
    return (b_x - pivot[:, None, None]) * rate[:, None, None] - c[:, None, None]


@triton.jit
def lane_sums(b_x, line, T: tl.constexpr):
    """The sums of one pass per lane, in units of e and y; lo is y <= 0, hi is y > 0, w = |y|."""
    b_y = scaled(b_x, line)
    w = tl.minimum(tl.abs(b_y), _max_y(T))
    e = tl.exp2(-w)
    above = tl.where(b_y > 0, 1.0, 0.0).to(T)
    hi = e * above
    lo = e - hi
    return (
        tl.sum(above, 1),
        tl.sum(lo, 1),
        tl.sum(hi, 1),
        tl.sum(lo * w, 1),
        tl.sum(hi * w, 1),
        tl.sum(lo * e, 1),
        tl.sum(hi * e, 1),
        tl.sum((e * w) * e, 1),
    )


@triton.jit
def add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def plus(a, b):
    """Two sets of eight sums together."""
    return add8(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7],
        b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7],
    )  # fmt: skip


@triton.jit
def _max3(a0, a1, a2, b0, b1, b2):
    return tl.maximum(a0, b0), tl.maximum(a1, b1), tl.maximum(a2, b2)


@triton.jit
def lane_spread(b_x, line, a, T: tl.constexpr):
    """sum (p - a)^2 per lane, without cancellation where p is close to a."""
    pivot, rate, c = line
    # -y rather than y: shared with the other sums, a whole row of y would stay in registers.
    b_y = (pivot[:, None, None] - b_x) * rate[:, None, None] + c[:, None, None]
    q = 0.5 * tl.exp2(-tl.minimum(tl.abs(b_y), _max_y(T)))
    d = tl.where(b_y < 0, 1.0 - q, q) - a.to(T)[:, None, None]
    d = tl.where(b_x > -INF, d, 0.0)
    return tl.sum(d * d, 1)


@triton.jit
def lane_near(b_x, line):
    """Per lane: the nearest score below the barrier, and minus the nearest above it and minus the
    distance from the pivot to another score."""
    pivot, rate, c = line
    b_d = pivot[:, None, None] - b_x
    m_hi = b_d * rate[:, None, None] + c[:, None, None] < 0
    far = tl.abs(b_d)
    return (
        tl.max(tl.where(m_hi, -INF, b_x), 1),
        tl.max(tl.where(m_hi, -b_x, -INF), 1),
        tl.max(tl.where(far > 0, -far, -INF), 1),
    )


@triton.jit
def across_max(lanes):
    below, above, gap = tl.reduce(lanes, 1, _max3)
    return below.to(tl.float64), -above.to(tl.float64), -gap.to(tl.float64)


@triton.jit
def soft_mask(b_x, line, T: tl.constexpr):
    b_y = scaled(b_x, line)
    w = tl.abs(b_y)
    q = tl.where(w < _max_y(T), 0.5 * tl.exp2(-tl.minimum(w, _max_y(T))), 0.0)
    return tl.where(b_y > 0, 1.0 - q, q)


@triton.jit
def _log_ratio(x, y, T: tl.constexpr):
    """log(x/y) for positive x and y whose ratio may leave the range of T."""
    return tl.log(tl.minimum(tl.maximum(x / y, 1e-37), 1e37)) if T == tl.float32 else tl.log(x / y)


@triton.jit
def _budget(P, M, excess, T: tl.constexpr):
    """log(P/M), to the digits of P - M where they are close."""
    if T == tl.float64:
        return tl.log(P / M)
    else:
        x = excess.to(T) / M
        series = x * (1.0 - x * (0.5 - x * (0.33333333 - 0.25 * x)))
        return tl.where(tl.abs(x) < 0.01, series, _log_ratio(P, M, T))


@triton.jit
def _growth(x):
    """exp(x) - 1."""
    series = x * (1.0 + x * (0.5 + x * (0.16666667163372 + x * 0.041666667)))
    return tl.where(tl.abs(x) < 0.004, series, tl.exp(x) - 1.0)


@triton.jit
def pose(n, k, target, hardness):
    """A row's problem: everything a step needs to know that does not move."""
    return n, k, k / n, (n - k) / n, target, hardness, hardness < SOFT


@triton.jit
def warmest(below, above, problem, T: tl.constexpr):
    """In the right gap V <= sqrt(k (n-k)) exp(-gap/2t): log t must not be below this."""
    a, rest, target = problem[2], problem[3], problem[4]
    reach = tl.log(1.0 + tl.exp(target.to(T))) - 0.5 * tl.log((a * rest).to(T))
    return tl.log((above - below).to(T) * 0.5 / reach).to(tl.float64)


@triton.jit
def _hardness(sums, spread, excess, problem, e1, e1_b, e1_t, T: tl.constexpr):
    """e2, and the residual and slope in log t of the hardness on the budget."""
    N, lo, hi, w_lo, w_hi, ee_lo, ee_hi, eew = sums
    n, k, a, rest, target, _, soft = problem
    f64: tl.constexpr = tl.float64
    shift = excess / n
    closed = 0.25 * (ee_lo.to(f64) + ee_hi.to(f64)) + a * (a * (n - N) - lo.to(f64))
    closed = closed + rest * (rest * N - hi.to(f64))
    C = tl.where(soft, spread, tl.maximum(closed, 1e-6 * k * rest)) - excess * shift
    C = tl.maximum(C.to(T), 1e-37)
    mean, off = (a + shift).to(T), (rest - shift).to(T)
    s_lo, s_hi, r_lo, r_hi = 0.5 * lo.to(T), 0.5 * hi.to(T), 0.25 * ee_lo.to(T), 0.25 * ee_hi.to(T)
    sw_lo, sw_hi, rw = w_lo.to(T) * (0.5 * LN2), w_hi.to(T) * (0.5 * LN2), eew.to(T) * (0.25 * LN2)
    V = (s_lo - r_lo) + (s_hi - r_hi)
    c_b = -2 * ((r_lo - mean * s_lo) + (off * s_hi - r_hi))
    c_t = 2 * (rw - mean * sw_lo - off * sw_hi)
    v_b = (s_hi - 2 * r_hi) - (s_lo - 2 * r_lo)
    v_t = sw_lo + sw_hi - 2 * rw
    r_C, r_V = 1.0 / C, 1.0 / V
    e2_b, e2_t = c_b * r_C - v_b * r_V, c_t * r_C - v_t * r_V
    e2 = _log_ratio(C, V, T) - target.to(T)
    pull = e2_b / e1_b
    return e2, e2 - pull * e1, e2_t - pull * e1_t


@triton.jit
def step(sums, spread, near, at, tries, problem, tolerance, FIXED: tl.constexpr, T: tl.constexpr):
    """Judge the sums at a point and propose the next one, row by row."""
    lo, hi, w_lo, w_hi = sums[1], sums[2], sums[3], sums[4]
    seen, below, above, gap, bound = near
    pivot, b, tau, t, tau_lo, tau_hi, b_lo, b_hi, stride = at
    passes, polish, polished = tries
    n, k, target, hardness = problem[0], problem[1], problem[4], problem[5]
    mass_tol, hardness_tol = tolerance
    noise = 1e-11 if T == tl.float64 else 1e-7
    blur = 1e-7 if T == tl.float64 else 2e-6
    f64: tl.constexpr = tl.float64

    N = sums[0].to(f64)
    over_k = N - k
    q_lo, q_hi = 0.5 * lo.to(T), 0.5 * hi.to(T)
    excess = 0.5 * (lo.to(f64) - hi.to(f64)) + over_k
    P, M = q_lo + tl.maximum(over_k, 0.0).to(T), q_hi + tl.maximum(-over_k, 0.0).to(T)
    e1 = _budget(P, M, excess, T)
    r_P, r_M = 1.0 / P, 1.0 / M
    e1_b = -(q_lo * r_P + q_hi * r_M)
    e1_t = (w_lo.to(T) * r_P - w_hi.to(T) * r_M) * (0.5 * LN2)
    if FIXED:
        e2 = target - tau
        residual = e2.to(T)
        slope = tl.zeros_like(residual) - 1.0
        close = tl.zeros_like(residual)
    else:
        e2, residual, slope = _hardness(sums, spread, excess, problem, e1, e1_b, e1_t, T)
        close = tl.zeros_like(residual) + hardness_tol

    off, miss = tl.abs(excess), tl.abs(e2)
    budget_holds = off <= mass_tol * tl.minimum(k, n - k)
    converged = budget_holds & (miss <= close)
    # Rounding may keep a solved row from the last digit: after some tries, twice the error passes,
    # and the mass may err relative to k alone.
    polished += polish
    nearly = (polished > 4) & (off <= 2 * mass_tol * k) & (miss <= 2 * close)
    converged = converged | nearly
    # All weight on one score, or on equal ones: a smaller t changes nothing any more.
    pinned = seen & (t < gap / SATURATED) & (tl.abs(b) < 0.5 * gap) & (e2 < 0) & (over_k != 0)
    tied = pinned & budget_holds & (FIXED == 0)

    u = -e1 / e1_b
    size = tl.maximum(tl.abs(e1), tl.abs(residual))
    steep = slope <= -0.2
    solved = tl.abs(e1) <= tl.maximum(0.1 * tl.minimum(tl.abs(residual), 1.0), noise)
    solved = solved & (steep | (tl.abs(u) <= 0.003))
    ratio = residual / slope
    newton = tau - ratio.to(f64)
    promising = steep & (newton > tau_lo) & (newton < tau_hi) & (passes < PATIENCE)
    if FIXED:
        may_cool = e2 != 0
    else:
        may_cool = pinned == 0
    both = (tl.abs(e1) <= 1.0) & may_cool & (solved | promising)

    fine = tl.abs(residual) <= blur
    certain = both & solved & (fine == 0)
    # In the right gap, and too cold.
    sharp = seen & (over_k == 0) & (tau < bound) & (FIXED == 0)
    cold = sharp | (certain & (residual > 0))
    tau_lo = tl.where(cold, tl.maximum(tau_lo, tau), tau_lo)
    tau_hi = tl.where(certain & (cold == 0), tl.minimum(tau_hi, tau), tau_hi)
    crossed = tau_lo >= tau_hi
    tau_lo, tau_hi = tl.where(crossed, -INF, tau_lo), tl.where(crossed, INF, tau_hi)
    d = tl.where(slope < 0, -ratio, tl.where(residual > 0, MAX_STEP, -MAX_STEP)).to(f64)
    if FIXED:
        d = e2
    down = tl.maximum(tl.log(tl.maximum(tl.abs(u), 1e-15) * 0.33333333), -MAX_STEP)
    d = tl.where(pinned, d, tl.minimum(tl.maximum(d, down.to(f64)), MAX_STEP))
    warmer = tau + d
    if FIXED:
        warmer = tl.where(tl.abs(target - warmer) < 1e-9, target, warmer)
    bracketed = (tau_lo > -INF) & (tau_hi < INF) & (fine == 0)
    # Steps that leave the bracket, or do not shrink inside it, bisect.
    shrinks = tl.abs(warmer - tau) <= 0.75 * stride
    outside = bracketed & (((warmer > tau_lo) & (warmer < tau_hi) & shrinks) == 0)
    warmer = tl.where(outside, 0.5 * (tau_lo + tau_hi), warmer)
    # Newton's own step from close by lands on the answer, to the square of the error.
    sure = both & (outside == 0)
    warmer = tl.where(both, warmer, tau)
    stride = tl.where(both & (sharp == 0), tl.abs(warmer - tau), stride)
    warmer = tl.where(sharp, bound, warmer)
    growth = _growth((warmer - tau).to(T))
    b_both = b + t * (u - e1_t / e1_b * growth).to(f64)

    b_lo, b_hi = tl.where(excess > 0, b, b_lo), tl.where(excess > 0, b_hi, b)
    under, over = b - (below - pivot), (above - pivot) - b
    max_z: tl.constexpr = 700.0 if T == tl.float64 else 80.0
    blind = seen & (tl.minimum(under, over) > 0.9 * max_z * t)
    b_only = tl.where(blind, tl.where(excess > 0, b + over, b - under), b + t * u.to(f64))
    bracketed = (b_lo > -INF) & (b_hi < INF)
    outside = bracketed & (((b_only > b_lo) & (b_only < b_hi)) == 0)
    b_only = tl.where(outside, 0.5 * (b_lo + b_hi), b_only)
    if FIXED:
        sure = (e2 == 0) & (outside == 0)
    sure = sure & (10 * size * size <= mass_tol) & (sharp == 0)

    b = tl.where(both, b_both, b_only)
    b = tl.where(sharp, 0.5 * ((below - pivot) + (above - pivot)), b)
    b_lo, b_hi = tl.where(both | sharp, -INF, b_lo), tl.where(both | sharp, INF, b_hi)
    t = t + t * growth.to(f64)
    if FIXED:
        t = tl.where(warmer == target, hardness, t)
    # Keep b small beside t: measure it from the rounded barrier, or from a score right beside it,
    # which all weight may come to rest on.
    closest = tl.where((above - pivot) - b < b - (below - pivot), above, below)
    beside = seen & (tl.abs(b - (closest - pivot)) <= 4 * t)
    origin = tl.where(beside, closest, (pivot + b).to(T).to(f64))
    shift = origin - pivot
    better = beside | ((tl.abs(b) > 2 * t) & (tl.abs(b - shift) < 0.5 * tl.abs(b)))
    pivot, shift = tl.where(better, origin, pivot), tl.where(better, shift, 0.0)
    moved = (pivot, b - shift, warmer, t, tau_lo, tau_hi, b_lo - shift, b_hi - shift, stride)
    r_q = 1.0 / (q_lo + q_hi)
    mean_z = (w_hi.to(T) - w_lo.to(T)) * (0.5 * LN2) * r_q
    mean_p = (q_hi + 0.25 * (sums[5].to(T) - sums[6].to(T))) * r_q
    means = (mean_z.to(f64), mean_p.to(f64))
    return converged, tied, moved, sure.to(tl.int32), polished, size, means


@triton.jit
def begin(pivot, b, tau):
    """A point without brackets."""
    low, high = tl.zeros_like(tau) - INF, tl.zeros_like(tau) + INF
    return pivot, b, tau, tl.exp(tau), low, high, low, high, high


@triton.jit
def keep(m, new, old):
    """The new point where m, the old one elsewhere."""
    return (
        tl.where(m, new[0], old[0]), tl.where(m, new[1], old[1]),
        tl.where(m, new[2], old[2]), tl.where(m, new[3], old[3]),
        tl.where(m, new[4], old[4]), tl.where(m, new[5], old[5]),
        tl.where(m, new[6], old[6]), tl.where(m, new[7], old[7]),
        tl.where(m, new[8], old[8]),
    )  # fmt: skip


@triton.jit
def any_of(m):
    return tl.max(m.to(tl.int32), 0) > 0


@triton.jit
def is_sparse(sums, n):
    return tl.minimum(sums[1], sums[2]) < n * SPARSE


@triton.jit
def _tiles_sums(b_xs, line, T: tl.constexpr):
    lanes = lane_sums(b_xs[0], line, T)
    for j in tl.static_range(1, len(b_xs)):
        lanes = plus(lanes, lane_sums(b_xs[j], line, T))
    return tl.reduce(lanes, 1, add8)


@triton.jit
def tiles_near(b_xs, line):
    lanes = lane_near(b_xs[0], line)
    for j in tl.static_range(1, len(b_xs)):
        more = lane_near(b_xs[j], line)
        lanes = _max3(lanes[0], lanes[1], lanes[2], more[0], more[1], more[2])
    return across_max(lanes)


@triton.jit
def _tiles_spread(b_xs, line, a, T: tl.constexpr):
    lanes = lane_spread(b_xs[0], line, a, T)
    for j in tl.static_range(1, len(b_xs)):
        lanes += lane_spread(b_xs[j], line, a, T)
    return tl.sum(lanes, 1).to(tl.float64)


@triton.jit
def solve_tiles(b_xs, running, at, problem, tolerance, FIXED: tl.constexpr, T: tl.constexpr):
    """Iterate rows on chip until each is done; finished rows stay where they are."""
    n, a, soft = problem[0], problem[2], problem[6]
    zero = tl.zeros_like(n)
    status = tl.zeros_like(running) + STALLED
    passes, polish, polished = tl.zeros_like(running), tl.zeros_like(running), tl.zeros_like(running)
    mean_z, mean_p = zero, zero
    while tl.max(running, 0) > 0:
        line = affine(at[0], at[1], at[3], T)
        sums = _tiles_sums(b_xs, line, T)
        live = running > 0
        seen = live & is_sparse(sums, n)
        below, above, gap, bound, spread = zero, zero, zero, zero, zero
        # Few rows need these; most passes skip them.
        if any_of(seen):
            below, above, gap = tiles_near(b_xs, line)
            bound = warmest(below, above, problem, T)
        if FIXED == 0:
            if any_of(live & soft):
                spread = _tiles_spread(b_xs, line, a, T)
        passes += running
        near, tries = (seen, below, above, gap, bound), (passes, polish, polished)
        converged, tied, moved, polish, polished, _, means = step(
            sums, spread, near, at, tries, problem, tolerance, FIXED, T
        )
        mean_z, mean_p = tl.where(live, means[0], mean_z), tl.where(live, means[1], mean_p)
        status = tl.where(live & tied, TIED, status)
        status = tl.where(live & (converged | (polish > 0)), CONVERGED, status)
        running = (live & (status == STALLED) & (passes < MAX_PASSES)).to(tl.int32)
        at = keep((running > 0) | (live & (polish > 0)), moved, at)
    return at, status, passes, mean_z, mean_p


@triton.jit
def aim(hardness, FIXED: tl.constexpr):
    """The target: logit(gamma), or log(temperature)."""
    if FIXED:
        return tl.log(hardness)
    else:
        return tl.log(hardness) - tl.log(1.0 - hardness)


@triton.jit
def part_aim(hardness, k, n, FIXED: tl.constexpr):
    """The target of a part of a row. It knows the count above a barrier only to sqrt(k (1-a)): a
    temperature that leaves fewer scores undecided is no start for the row."""
    hardest = 1.0 - tl.rsqrt(k * ((n - k) / n))
    if FIXED:
        return aim(hardest, False)
    else:
        return aim(tl.minimum(hardness, hardest), False)


@triton.jit
def diffuse_start(n, k, target, mean, width, low, high, FIXED: tl.constexpr, T: tl.constexpr):
    """A temperature of the size of the spread, from where the way down is smooth."""
    a, rest = k / n, (n - k) / n
    # The barrier of an extreme budget lies in a tail, which may be far longer than the spread.
    tail = tl.where(a < 0.5, high - mean, mean - low)
    width = tl.where(k * rest < EXTREME, tl.maximum(width, 0.1 * tail), width)
    tau = tl.log(width)
    if FIXED:
        tau = tl.maximum(tau, target)
    else:
        tau = tau - 0.25 * tl.minimum(target, 0.0)
    t = tl.exp(tau)
    b = tl.where(a < 0.5, -t * tl.log(2 * a), t * tl.log(2 * rest))
    barrier = tl.minimum(tl.maximum(mean + b, low), high)
    pivot = barrier.to(T).to(tl.float64)
    return begin(pivot, barrier - pivot, tau)


@triton.jit
def tiles_stats(b_xs, T: tl.constexpr):
    """Eligible count, whether the row is broken, extremes, mean and mean deviation."""
    f64: tl.constexpr = tl.float64
    count, bad, low, high = _tile_look(b_xs[0])
    for j in tl.static_range(1, len(b_xs)):
        more = _tile_look(b_xs[j])
        count, bad = count + more[0], bad | more[1]
        low, high = tl.maximum(low, more[2]), tl.maximum(high, more[3])
    count, bad = tl.sum(count, 1), tl.max(bad, 1) > 0
    low, high = -tl.max(low, 1), tl.max(high, 1)
    share = 1.0 / tl.maximum(count, 1).to(T)
    total = _tile_away(b_xs[0], share, tl.zeros_like(low), False)
    for j in tl.static_range(1, len(b_xs)):
        total += _tile_away(b_xs[j], share, tl.zeros_like(low), False)
    mean = tl.minimum(tl.maximum(tl.sum(total, 1), low), high)
    total = _tile_away(b_xs[0], share, mean, True)
    for j in tl.static_range(1, len(b_xs)):
        total += _tile_away(b_xs[j], share, mean, True)
    width = tl.sum(total, 1)
    return count.to(f64), bad, low.to(f64), high.to(f64), mean.to(f64), width.to(f64)


@triton.jit
def _tile_look(b_x):
    m_ok = b_x > -INF
    return (
        tl.sum(m_ok.to(tl.int32), 1),
        tl.max((b_x < INF).to(tl.int32) ^ 1, 1),
        tl.max(tl.where(m_ok, -b_x, -INF), 1),
        tl.max(tl.where(m_ok, b_x, -INF), 1),
    )


@triton.jit
def _tile_away(b_x, share, mean, AWAY: tl.constexpr):
    """Sums over n per lane, of x or of its distance from the mean; scaled first: no overflow."""
    b_d = tl.abs(b_x - mean[:, None, None]) if AWAY else b_x
    return tl.sum(tl.where(b_x > -INF, b_d * share[:, None, None], 0.0), 1)


@triton.jit
def classify(n, bad, constant, k, hardness, FIXED: tl.constexpr):
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
def is_soft(status):
    return (status == CONVERGED) | (status == TIED) | (status == STALLED)


@triton.jit
def is_regular(status):
    return (status == CONVERGED) | (status == STALLED)


@triton.jit
def top_bit(ROWS: tl.constexpr, T: tl.constexpr):
    if T == tl.float64:
        return tl.full([ROWS], 1 << 63, tl.uint64)
    else:
        return tl.full([ROWS], 1 << 31, tl.uint32)


@triton.jit
def score_at(key, T: tl.constexpr):
    """The score at a place in the order of all scores, an unsigned integer."""
    if T == tl.float64:
        bits = (key ^ (1 << 63)).to(tl.int64, bitcast=True)
        return (bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    else:
        bits = (key ^ (1 << 31)).to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _compare(b_x, cut, HOW: tl.constexpr):
    if HOW == "equal":
        m = b_x == cut
    elif HOW == "above":
        m = b_x > cut
    else:
        m = b_x >= cut
    return tl.sum(m.to(tl.int32), 1)


@triton.jit
def count(b_xs, score, HOW: tl.constexpr):
    """How many scores of each row equal one, are "above" it or "reach" it."""
    lanes = _compare(b_xs[0], score[:, None, None], HOW)
    for j in tl.static_range(1, len(b_xs)):
        lanes += _compare(b_xs[j], score[:, None, None], HOW)
    return tl.sum(lanes, 1).to(tl.float64)


@triton.jit
def select_tiles(b_xs, k, ROWS: tl.constexpr, T: tl.constexpr):
    """The ceil(k)-th largest score and what is left for scores equal to it, bit by bit."""
    rank = tl.ceil(k)
    bit = top_bit(ROWS, T)
    cut = bit ^ bit
    while tl.max(bit.to(tl.float32), 0) > 0:
        trial = cut | bit
        cut = tl.where(count(b_xs, score_at(trial, T), "reach") >= rank, trial, cut)
        bit = bit >> 1
    threshold = tl.where(k > 0, score_at(cut, T), INF)
    left = tl.where(k > 0, k - count(b_xs, threshold, "above"), 0.0)
    return threshold.to(tl.float64), left


@triton.jit
def hard_mask(b_x, threshold, left, T: tl.constexpr):
    """Zeros and ones, and what is left after this tile; scores equal to the threshold are served
    in the order of their index."""
    cut = threshold.to(T)[:, None, None]
    tied = (b_x == cut).to(tl.int32)
    per_lane = tl.sum(tied, 1)
    turn = tl.cumsum(tied, 1) + (tl.cumsum(per_lane, 1) - per_lane)[:, None, :]
    share = tl.minimum(tl.maximum(left, 0.0), 1e9)
    full = tl.floor(share)
    rest = (share - full).to(T)[:, None, None]
    full = full.to(tl.int32)[:, None, None]
    served = tl.where(turn <= full, 1.0, tl.where(turn == full + 1, rest, 0.0))
    b_p = tl.where(b_x == cut, served, tl.where(b_x > cut, 1.0, 0.0)).to(T)
    return b_p, left - tl.sum(per_lane, 1).to(tl.float64)


@triton.jit
def flat_mask(b_x, level, status, T: tl.constexpr):
    """The mask of a row without a barrier."""
    b_p = tl.where(b_x > -INF, level.to(T)[:, None, None], 0.0)
    return tl.where((status == NONFINITE)[:, None, None], float("nan"), b_p)


@triton.jit
def store_row(p_state, p_info, o_rows, m, status, passes, point, means, level, hard):
    """State and info of rows, whatever their status."""
    soft, binary, broken = is_soft(status), status == HARD, status == NONFINITE
    zero = tl.where(broken, float("nan"), tl.zeros_like(level))
    p_row = p_state + o_rows * 5
    tl.store(p_row, tl.where(soft, point[0], tl.where(binary, hard[0], zero)), mask=m)
    tl.store(p_row + 1, tl.where(soft, point[1], tl.where(binary, hard[1], zero)), mask=m)
    rest = tl.where(binary, 0.0, tl.where(broken, float("nan"), zero + INF))
    tl.store(p_row + 2, tl.where(soft, point[2], rest), mask=m)
    tl.store(p_row + 3, tl.where(soft, means[0], zero), mask=m)
    tl.store(p_row + 4, tl.where(soft, means[1], tl.where(binary, 0.0, level)), mask=m)
    tl.store(p_info + o_rows * 2, status, mask=m)
    tl.store(p_info + o_rows * 2 + 1, tl.where(soft, passes, 1), mask=m)


@triton.jit
def level_of(status, n, k):
    """What every eligible entry of a row without a barrier gets."""
    level = tl.where(status == INFEASIBLE, 1.0, k / n)
    return tl.where(status == NONFINITE, float("nan"), level)
