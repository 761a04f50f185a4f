# mypy: ignore-errors
# Triton compiles these functions from their source: their arguments have no Python types.
"""The Triton kernels of the CUDA backend. ``reference`` explains the mathematics, with the same names.

Scores are held as tiles ``[U, ROWS, C]``: score ``u C + c`` of each row, so that a thread keeps
several scores of one row in registers and sums over U without talking to its neighbours. What belongs
to a row is a vector ``[ROWS]``, in float64. Two kernels solve and two differentiate:

- ``rows_*``: rows that fit on chip, read once and iterated in registers;
- ``long_*``: longer rows, read in chunks, each by one program or by a team of programs. A team meets
  at a barrier after every pass: each program leaves a line of sums, reads all lines in the same order,
  and takes the same step as the others.

The exponent is kept in base two: ``y = z log2(e)`` and ``e = 2^-|y| = 2q``.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))

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
ROUGH = tl.constexpr(1e-3)  # tolerance of a solution that only starts another
RUN = tl.constexpr(8)  # neighbouring scores in a sample: one sector of memory
COLUMNS = tl.constexpr(16)  # of a program's line of sums: 0 to 11 are added, the rest are maxima
SUMS = tl.constexpr(12)


@triton.jit
def _max_y(T: tl.constexpr):
    """|y| is cut here, before the exponential underflows."""
    return 1009.8865286222744 if T == tl.float64 else 115.41560327111707


@triton.jit
def _affine(pivot, b, t, T: tl.constexpr):
    """y = (x - pivot) rate - c_hi - c_lo; two pieces keep the digits of b/t in float32."""
    rate = (LOG2E / t).to(T)
    c = b * rate.to(tl.float64)
    c_hi = c.to(T)
    return pivot.to(T), rate, c_hi, (c - c_hi.to(tl.float64)).to(T)


@triton.jit
def _scaled(b_x, line):
    pivot, rate, c_hi, c_lo = line
    b_y = (b_x - pivot[None, :, None]) * rate[None, :, None] - c_hi[None, :, None]
    return b_y - c_lo[None, :, None]


@triton.jit
def _lane_sums(b_x, line, T: tl.constexpr):
    """The sums of one pass per lane, in units of e and y; lo is y <= 0, hi is y > 0, w = |y|."""
    b_y = _scaled(b_x, line)
    w = tl.minimum(tl.abs(b_y), _max_y(T))
    e = tl.exp2(-w)
    m_hi = b_y > 0
    lo, hi, ew = tl.where(m_hi, 0.0, e), tl.where(m_hi, e, 0.0), e * w
    return (
        tl.sum(tl.where(m_hi, 1.0, 0.0).to(T), 0),
        tl.sum(lo, 0),
        tl.sum(hi, 0),
        tl.sum(lo * w, 0),
        tl.sum(hi * w, 0),
        tl.sum(lo * e, 0),
        tl.sum(hi * e, 0),
        tl.sum(lo * ew, 0),
        tl.sum(hi * ew, 0),
    )


@triton.jit
def _lane_spread(b_x, line, a, T: tl.constexpr):
    """sum (p - a)^2 per lane, without cancellation where p is close to a."""
    p = _soft_mask(b_x, line, T)
    d = tl.where(b_x > -INF, p - a.to(T)[None, :, None], 0.0)
    return tl.sum(d * d, 0)


@triton.jit
def _lane_near(b_x, line):
    """The nearest scores on both sides of the barrier, and from the pivot to another score."""
    m_hi = _scaled(b_x, line) > 0
    far = tl.abs(b_x - line[0][None, :, None])
    return (
        tl.max(tl.where(m_hi, -INF, b_x), 0),
        tl.max(tl.where(m_hi, -b_x, -INF), 0),
        tl.max(tl.where(far > 0, -far, -INF), 0),
    )


@triton.jit
def _soft_mask(b_x, line, T: tl.constexpr):
    b_y = _scaled(b_x, line)
    w = tl.abs(b_y)
    q = tl.where(w < _max_y(T), 0.5 * tl.exp2(-tl.minimum(w, _max_y(T))), 0.0)
    return tl.where(b_y > 0, 1.0 - q, q)


@triton.jit
def _log_ratio(P, M, excess, T: tl.constexpr):
    """log(P/M), to the digits of P - M where they are close."""
    if T == tl.float64:
        return tl.log(P / M)
    else:
        x = excess.to(T) / M.to(T)
        series = x * (1.0 - x * (0.5 - x * (0.33333333 - 0.25 * x)))
        return tl.where(tl.abs(x) < 0.01, series, tl.log(P.to(T)) - tl.log(M.to(T)))


@triton.jit
def _expm1(x):
    series = x * (1.0 + x * (0.5 + x * (0.16666667163372 + x * 0.041666667)))
    return tl.where(tl.abs(x) < 0.004, series, tl.exp(x) - 1.0)


@triton.jit
def _hardness(sums, spread, excess, n, k, target, soft, e1, e1_b, e1_t, T: tl.constexpr):
    """e2, and the residual and slope in log t of the hardness on the budget."""
    N, lo, hi, w_lo, w_hi, ee_lo, ee_hi, eew_lo, eew_hi = sums
    q_lo, q_hi, qq_lo, qq_hi = 0.5 * lo, 0.5 * hi, 0.25 * ee_lo, 0.25 * ee_hi
    a, rest = k / n, (n - k) / n
    shift = excess / n
    mean, off = (a + shift).to(T), (rest - shift).to(T)
    closed = (qq_lo - 2 * a * q_lo + a * a * (n - N)) + (qq_hi - 2 * rest * q_hi + rest * rest * N)
    floor = tl.where(soft, 1e-37, 1e-6 * k * rest)
    C = tl.maximum(tl.where(soft, spread, closed) - excess * shift, floor).to(T)
    V = (q_lo + q_hi - qq_lo - qq_hi).to(T)
    s_lo, s_hi, r_lo, r_hi = q_lo.to(T), q_hi.to(T), qq_lo.to(T), qq_hi.to(T)
    sw_lo, sw_hi = (0.5 * LN2 * w_lo).to(T), (0.5 * LN2 * w_hi).to(T)
    rw_lo, rw_hi = (0.25 * LN2 * eew_lo).to(T), (0.25 * LN2 * eew_hi).to(T)
    c_b = -2 * ((r_lo - mean * s_lo) + (off * s_hi - r_hi))
    c_t = 2 * ((rw_lo - mean * sw_lo) - (off * sw_hi - rw_hi))
    v_b = (s_hi - 2 * r_hi) - (s_lo - 2 * r_lo)
    v_t = sw_lo + sw_hi - 2 * (rw_lo + rw_hi)
    e2_b, e2_t = c_b / C - v_b / V, c_t / C - v_t / V
    e2 = (tl.log(C) - tl.log(V)) - target.to(T)
    pull = e2_b / e1_b
    return e2, e2 - pull * e1, e2_t - pull * e1_t


@triton.jit
def _step(sums, spread, near, at, tries, problem, tolerance, FIXED: tl.constexpr, T: tl.constexpr):
    """Judge the sums at a point and propose the next one, row by row.

    The quantities of the point are float64; Newton's ratios need only the relative accuracy of the
    scores' own type.
    """
    N, lo, hi, w_lo, w_hi = sums[0], sums[1], sums[2], sums[3], sums[4]
    seen, below, above, gap = near
    pivot, b, tau, t, tau_lo, tau_hi, b_lo, b_hi = at
    passes, polish, polished = tries
    n, k, target, soft = problem
    mass_tol, hardness_tol = tolerance
    noise = 1e-11 if T == tl.float64 else 1e-7
    blur = 1e-7 if T == tl.float64 else 2e-6

    q_lo, q_hi = 0.5 * lo, 0.5 * hi
    P, M = q_lo + tl.maximum(N - k, 0.0), q_hi + tl.maximum(k - N, 0.0)
    excess = P - M
    e1 = _log_ratio(P, M, excess, T)
    r_P, r_M = 1.0 / P.to(T), 1.0 / M.to(T)
    e1_b = -(q_lo.to(T) * r_P + q_hi.to(T) * r_M)
    e1_t = (0.5 * LN2 * w_lo).to(T) * r_P - (0.5 * LN2 * w_hi).to(T) * r_M
    if FIXED:
        e2 = target - tau
        residual = e2.to(T)
        slope = tl.zeros_like(residual) - 1.0
        close = tl.zeros_like(residual)
    else:
        e2, residual, slope = _hardness(
            sums, spread, excess, n, k, target, soft, e1, e1_b, e1_t, T
        )
        close = tl.zeros_like(residual) + hardness_tol

    off, miss = tl.abs(excess), tl.abs(e2)
    converged = (off <= mass_tol * k) & (miss <= close)
    # Rounding may keep a solved row from the last digit: after some tries, twice the error passes.
    polished += polish
    converged = converged | (
        (polished > 4) & (off <= 2 * mass_tol * k) & (miss <= 2 * close)
    )
    pinned = seen & (t < gap / SATURATED) & (tl.abs(b) < 0.5 * gap) & (e2 < 0) & (N != k)
    tied = pinned & (off <= mass_tol * k)

    u = -e1 / e1_b
    size = tl.maximum(tl.abs(e1), tl.abs(residual))
    polish = (10 * size * size <= mass_tol).to(tl.int32)
    flat = slope > -0.2
    solved = tl.abs(e1) <= tl.maximum(0.1 * tl.minimum(tl.abs(residual), 1.0), noise)
    solved = solved & ((slope <= -0.2) | (tl.abs(u) <= 0.003))
    newton = tau - (residual / slope).to(tl.float64)
    promising = (slope <= -0.2) & (newton > tau_lo) & (newton < tau_hi) & (passes < PATIENCE)
    if FIXED:
        may_cool = e2 != 0
    else:
        may_cool = pinned == 0
    both = (tl.abs(e1) <= 1.0) & may_cool & (solved | promising)

    fine = tl.abs(residual) <= blur
    certain = both & solved & (fine == 0)
    tau_lo = tl.where(certain & (residual > 0), tl.maximum(tau_lo, tau), tau_lo)
    tau_hi = tl.where(certain & (residual <= 0), tl.minimum(tau_hi, tau), tau_hi)
    crossed = tau_lo >= tau_hi
    tau_lo, tau_hi = tl.where(crossed, -INF, tau_lo), tl.where(crossed, INF, tau_hi)
    if FIXED:
        d = e2
    else:
        jump = tl.where(residual > 0, MAX_STEP, -MAX_STEP)
        d = tl.where(slope < 0, -residual / slope, jump).to(tl.float64)
    down = tl.maximum(tl.log(tl.maximum(tl.abs(u), 1e-15) * 0.33333333), -MAX_STEP).to(tl.float64)
    d = tl.where(pinned, d, tl.minimum(tl.maximum(d, down), MAX_STEP))
    warmer = tau + d
    if FIXED:
        warmer = tl.where(tl.abs(target - warmer) < 1e-9, target, warmer)
    bracketed = (tau_lo > -INF) & (tau_hi < INF) & (fine == 0)
    inside = (warmer > tau_lo) & (warmer < tau_hi)
    warmer = tl.where(bracketed & (inside == 0), 0.5 * (tau_lo + tau_hi), warmer)
    warmer = tl.where(both, warmer, tau)
    lead = u - e1_t / e1_b * _expm1((warmer - tau).to(T))
    b_both = b + t * lead.to(tl.float64)

    b_lo, b_hi = tl.where(excess > 0, b, b_lo), tl.where(excess > 0, b_hi, b)
    under, over = b - (below - pivot), (above - pivot) - b
    max_z: tl.constexpr = 700.0 if T == tl.float64 else 80.0
    blind = seen & (tl.minimum(under, over) > 0.9 * max_z * t)
    b_only = tl.where(blind, tl.where(excess > 0, b + over, b - under), b + t * u.to(tl.float64))
    bracketed = (b_lo > -INF) & (b_hi < INF)
    inside = (b_only > b_lo) & (b_only < b_hi)
    b_only = tl.where(bracketed & (inside == 0), 0.5 * (b_lo + b_hi), b_only)

    b = tl.where(both, b_both, b_only)
    b_lo, b_hi = tl.where(both, -INF, b_lo), tl.where(both, INF, b_hi)
    t = tl.exp(warmer)
    # Measure from the score nearest to the barrier once b is large beside t.
    closest = tl.where((above - pivot) - b < b - (below - pivot), above, below)
    shift = closest - pivot
    better = seen & (tl.abs(b) > 2 * t) & (tl.abs(b - shift) < 0.5 * tl.abs(b))
    shift = tl.where(better, shift, 0.0)
    pivot = tl.where(better, closest, pivot)
    moved = (pivot, b - shift, warmer, t, tau_lo, tau_hi, b_lo - shift, b_hi - shift)
    q = (q_lo + q_hi).to(T)
    mean_z = (0.5 * LN2 * (w_hi - w_lo)).to(T) / q
    mean_p = (0.25 * sums[5] + q_hi - 0.25 * sums[6]).to(T) / q
    means = (mean_z.to(tl.float64), mean_p.to(tl.float64))
    return converged, tied, moved, polish, polished, size, means


@triton.jit
def _start(pivot, b, tau):
    """A point without brackets."""
    low, high = tl.zeros_like(tau) - INF, tl.zeros_like(tau) + INF
    return pivot, b, tau, tl.exp(tau), low, high, low, high


@triton.jit
def _keep(m, new, old):
    """The new point where m, the old one elsewhere."""
    return (
        tl.where(m, new[0], old[0]),
        tl.where(m, new[1], old[1]),
        tl.where(m, new[2], old[2]),
        tl.where(m, new[3], old[3]),
        tl.where(m, new[4], old[4]),
        tl.where(m, new[5], old[5]),
        tl.where(m, new[6], old[6]),
        tl.where(m, new[7], old[7]),
    )


@triton.jit
def _across(lanes):
    """Nine sums per lane to nine per row."""
    return (
        tl.sum(lanes[0], 1).to(tl.float64),
        tl.sum(lanes[1], 1).to(tl.float64),
        tl.sum(lanes[2], 1).to(tl.float64),
        tl.sum(lanes[3], 1).to(tl.float64),
        tl.sum(lanes[4], 1).to(tl.float64),
        tl.sum(lanes[5], 1).to(tl.float64),
        tl.sum(lanes[6], 1).to(tl.float64),
        tl.sum(lanes[7], 1).to(tl.float64),
        tl.sum(lanes[8], 1).to(tl.float64),
    )


@triton.jit
def _any(m):
    return tl.max(m.to(tl.int32), 0) > 0


@triton.jit
def _sparse(sums, n):
    return tl.minimum(sums[1], sums[2]) < SPARSE * n


@triton.jit
def _tile_near(b_x, line):
    below, above, gap = _lane_near(b_x, line)
    below, above, gap = tl.max(below, 1), -tl.max(above, 1), -tl.max(gap, 1)
    return below.to(tl.float64), above.to(tl.float64), gap.to(tl.float64)


@triton.jit
def _solve_tile(b_x, running, at, problem, tolerance, FIXED: tl.constexpr, T: tl.constexpr):
    """Iterate all rows of a tile until each is done; finished rows stay where they are."""
    n, k, target, soft = problem
    a = k / n
    zero = tl.zeros_like(n)
    status = tl.zeros_like(running) + STALLED
    passes, polish, polished = tl.zeros_like(running), tl.zeros_like(running), tl.zeros_like(running)
    mean_z, mean_p = zero, zero
    while tl.max(running, 0) > 0:
        line = _affine(at[0], at[1], at[3], T)
        sums = _across(_lane_sums(b_x, line, T))
        live = running > 0
        seen = live & (_sparse(sums, n) | (tl.abs(at[1]) > 2 * at[3]))
        below, above, gap, spread = zero, zero, zero, zero
        # Few rows need these; most passes skip them.
        if _any(seen):
            below, above, gap = _tile_near(b_x, line)
        if FIXED == 0:
            if _any(live & soft):
                spread = tl.sum(_lane_spread(b_x, line, a, T), 1).to(tl.float64)
        passes += running
        converged, tied, moved, polish, polished, _, means = _step(
            sums,
            spread,
            (seen, below, above, gap),
            at,
            (passes, polish, polished),
            problem,
            tolerance,
            FIXED,
            T,
        )
        mean_z, mean_p = tl.where(live, means[0], mean_z), tl.where(live, means[1], mean_p)
        status = tl.where(live & tied, TIED, status)
        status = tl.where(live & converged, CONVERGED, status)
        running = (live & (status == STALLED) & (passes < MAX_PASSES)).to(tl.int32)
        at = _keep(running > 0, moved, at)
    return at, status, passes, mean_z, mean_p


@triton.jit
def _target(hardness, FIXED: tl.constexpr):
    if FIXED:
        return tl.log(hardness)
    else:
        return tl.log(hardness) - tl.log(1.0 - hardness)


@triton.jit
def _diffuse_start(n, k, target, mean, width, low, high, FIXED: tl.constexpr):
    """A temperature of the size of the spread, from where the way down is smooth."""
    tau = tl.log(width)
    if FIXED:
        tau = tl.maximum(tau, target)
    else:
        tau = tau - 0.25 * tl.minimum(target, 0.0)
    a, rest, t = k / n, (n - k) / n, tl.exp(tau)
    b = tl.where(a < 0.5, -t * tl.log(2 * a), t * tl.log(2 * rest))
    return mean, tl.minimum(tl.maximum(b, low - mean), high - mean), tau


@triton.jit
def _tile_stats(b_x, T: tl.constexpr):
    """Eligible count, whether the row is broken, extremes, mean and mean deviation."""
    m_ok = b_x > -INF
    count = tl.sum(tl.sum(m_ok.to(tl.int32), 0), 1)
    bad = tl.max(tl.max((b_x < INF).to(tl.int32) ^ 1, 0), 1) > 0
    low = -tl.max(tl.max(tl.where(m_ok, -b_x, -INF), 0), 1)
    high = tl.max(tl.max(tl.where(m_ok, b_x, -INF), 0), 1)
    share = 1.0 / tl.maximum(count, 1).to(T)
    mean = tl.sum(tl.sum(tl.where(m_ok, b_x * share[None, :, None], 0.0), 0), 1)
    mean = tl.minimum(tl.maximum(mean, low), high)
    away = tl.abs(b_x - mean[None, :, None]) * share[None, :, None]
    width = tl.sum(tl.sum(tl.where(m_ok, away, 0.0), 0), 1)
    f64: tl.constexpr = tl.float64
    return count.to(f64), bad, low.to(f64), high.to(f64), mean.to(f64), width.to(f64)


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
def _level(status, n, k):
    """What every eligible entry of a row without a barrier gets."""
    level = tl.where(status == INFEASIBLE, 1.0, k / n)
    return tl.where(status == NONFINITE, NAN, level)


@triton.jit
def _is_soft(status):
    return (status == CONVERGED) | (status == TIED) | (status == STALLED)


@triton.jit
def _store_row(p_state, p_info, o_rows, m, status, passes, at, mean_z, mean_p, level, cut, share):
    """State and info of rows, whatever their status."""
    soft, hard, broken = _is_soft(status), status == HARD, status == NONFINITE
    zero = tl.where(broken, NAN, tl.zeros_like(level))
    p_row = p_state + o_rows * 5
    tl.store(p_row, tl.where(soft, at[0], tl.where(hard, cut, zero)), mask=m)
    tl.store(p_row + 1, tl.where(soft, at[1], tl.where(hard, share, zero)), mask=m)
    rest = tl.where(hard, 0.0, tl.where(broken, NAN, zero + INF))
    tl.store(p_row + 2, tl.where(soft, at[3], rest), mask=m)
    tl.store(p_row + 3, tl.where(soft, mean_z, zero), mask=m)
    tl.store(p_row + 4, tl.where(soft, mean_p, tl.where(hard, 0.0, level)), mask=m)
    tl.store(p_info + o_rows * 2, status, mask=m)
    tl.store(p_info + o_rows * 2 + 1, tl.where(soft, passes, 1), mask=m)


@triton.jit
def _key(b_x, T: tl.constexpr):
    """Unsigned integers in the order of the scores; -0 counts as 0."""
    b_x = b_x + 0.0
    if T == tl.float64:
        bits = b_x.to(tl.int64, bitcast=True)
        bits = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
        return bits.to(tl.uint64, bitcast=True) ^ (1 << 63)
    else:
        bits = b_x.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return bits.to(tl.uint32, bitcast=True) ^ (1 << 31)


@triton.jit
def _unkey(key, T: tl.constexpr):
    if T == tl.float64:
        bits = (key ^ (1 << 63)).to(tl.int64, bitcast=True)
        return (bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    else:
        bits = (key ^ (1 << 31)).to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _top_bit(ROWS: tl.constexpr, T: tl.constexpr):
    if T == tl.float64:
        return tl.full([ROWS], 1 << 63, tl.uint64)
    else:
        return tl.full([ROWS], 1 << 31, tl.uint32)


@triton.jit
def _count(m):
    """How many in each row of a tile."""
    return tl.sum(tl.sum(m.to(tl.int32), 0), 1)


@triton.jit
def _select_tile(b_x, k, ROWS: tl.constexpr, T: tl.constexpr):
    """The ceil(k)-th largest score and what is left for scores equal to it, bit by bit."""
    key = _key(b_x, T)
    rank = tl.ceil(k)
    bit = _top_bit(ROWS, T)
    cut = bit ^ bit
    while tl.max(bit.to(tl.float32), 0) > 0:
        trial = cut | bit
        enough = _count(key >= trial[None, :, None]).to(tl.float64) >= rank
        cut = tl.where(enough, trial, cut)
        bit = bit >> 1
    larger = _count(key > cut[None, :, None]).to(tl.float64)
    empty = k <= 0
    threshold = tl.where(empty, INF, _unkey(cut, T))
    return threshold.to(tl.float64), tl.where(empty, 0.0, k - larger)


@triton.jit
def _hard_mask(b_x, threshold, share, T: tl.constexpr):
    """Zeros and ones; scores equal to the threshold are served in the order of their index."""
    cut = threshold.to(T)[None, :, None]
    m_tied = b_x == cut
    tied = m_tied.to(tl.int32)
    row_ties = tl.sum(tied, 2)
    earlier = tl.cumsum(row_ties, 0) - row_ties
    turn = (tl.cumsum(tied, 2) - tied) + earlier[:, :, None]
    left = share[None, :, None] - turn.to(tl.float64)
    served = tl.minimum(tl.maximum(left, 0.0), 1.0).to(T)
    return tl.where(m_tied, served, tl.where(b_x > cut, 1.0, 0.0).to(T))


@triton.jit
def _gate(b_p, b_v, GATE: tl.constexpr):
    return tl.where(b_p == 0, 0.0, b_p * b_v) if GATE else b_p


@triton.jit
def _tile_offsets(U: tl.constexpr, C: tl.constexpr):
    return (tl.arange(0, U) * C)[:, None, None] + tl.arange(0, C)[None, None, :]


@triton.jit
def rows_solve(
    p_r, p_v, p_out, p_k, p_hardness, p_state, p_info, rows, n_cols, s_k, s_hardness,
    mass_tol, hardness_tol,
    GATE: tl.constexpr, FIXED: tl.constexpr, T: tl.constexpr,
    U: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Rows on chip. GATE: 0 writes the mask, 1 times the values, 2 times the scores."""
    o_rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_cols = _tile_offsets(U, C)
    m_rows = o_rows < rows
    m = m_rows[None, :, None] & (o_cols < n_cols)
    o = o_rows[None, :, None] * n_cols + o_cols
    b_x = tl.load(p_r + o, mask=m, other=-INF).to(T)
    k = tl.load(p_k + o_rows * s_k, mask=m_rows, other=0.0)
    hardness = tl.load(p_hardness + o_rows * s_hardness, mask=m_rows, other=0.0)

    n, bad, low, high, mean, width = _tile_stats(b_x, T)
    status = _classify(n, bad, low >= high, k, hardness, FIXED)
    running = (m_rows & (status == STALLED)).to(tl.int32)
    target = _target(hardness, FIXED)
    pivot, b, tau = _diffuse_start(n, k, target, mean, width, low, high, FIXED)
    problem = (n, k, target, hardness < SOFT)
    at, found, passes, mean_z, mean_p = _solve_tile(
        b_x, running, _start(pivot, b, tau), problem, (mass_tol, hardness_tol), FIXED, T
    )
    status = tl.where(running > 0, found, status)
    level = _level(status, n, k)

    soft = _is_soft(status)[None, :, None]
    b_p = tl.where(b_x > -INF, level.to(T)[None, :, None], 0.0)
    b_p = tl.where((status == NONFINITE)[None, :, None], NAN, b_p)
    b_p = tl.where(soft, _soft_mask(b_x, _affine(at[0], at[1], at[3], T), T), b_p)
    hard = m_rows & (status == HARD)
    threshold, share = tl.zeros_like(k), tl.zeros_like(k)
    if _any(hard):
        threshold, share = _select_tile(b_x, k, ROWS, T)
        b_p = tl.where(hard[None, :, None], _hard_mask(b_x, threshold, share, T), b_p)
    if GATE == 1:
        b_p = _gate(b_p, tl.load(p_v + o, mask=m, other=0.0).to(T), True)
    if GATE == 2:
        b_p = _gate(b_p, b_x, True)
    tl.store(p_out + o, b_p, mask=m)
    _store_row(
        p_state, p_info, o_rows, m_rows, status, passes, at, mean_z, mean_p, level, threshold, share
    )


@triton.jit
def _barrier(p_count, goal):
    """Every program of the team has come this far, and its stores are visible."""
    tl.debug_barrier()
    tl.atomic_add(p_count, 1, sem="acq_rel")
    while tl.atomic_add(p_count, 0, sem="acq_rel") < goal:
        pass
    tl.debug_barrier()


@triton.jit
def _line(values):
    """Up to 15 numbers, each [1], as one line [COLUMNS]."""
    o = tl.arange(0, COLUMNS)
    line = tl.zeros([COLUMNS], tl.float64)
    for j in tl.static_range(len(values)):
        line = tl.where(o == j, values[j].to(tl.float64), line)
    return line


@triton.jit
def _meet(values, team, TEAM: tl.constexpr, LANES: tl.constexpr):
    """The values of all programs together: sums first, then maxima from column SUMS on.

    team is (lines, counter, size, own index, meetings so far). Lines alternate between two buffers,
    so that one barrier per meeting is enough.
    """
    line = _line(values)
    if TEAM:
        p_lines, p_count, size, me, meetings = team
        o = tl.arange(0, COLUMNS)
        p_here = p_lines + (meetings % 2) * size * COLUMNS
        tl.store(p_here + me * COLUMNS + o, line)
        _barrier(p_count, (meetings + 1) * size)
        o_lanes = tl.arange(0, LANES)
        m = (o_lanes < size)[:, None]
        p_all = p_here + o_lanes[:, None] * COLUMNS + o[None, :]
        lines = tl.load(p_all, mask=m, other=0.0, cache_modifier=".cg")
        # A maximum must not see the zeros of empty lanes; an infinite one must not enter a sum.
        most = tl.max(tl.where(m, lines, -INF), 0)
        line = tl.where(o < SUMS, tl.sum(tl.where((o < SUMS)[None, :], lines, 0.0), 0), most)
    return line


@triton.jit
def _pick(line, j: tl.constexpr):
    """Column j of a line, as [1]."""
    o = tl.arange(0, COLUMNS)
    return tl.sum(tl.where(o == j, line, 0.0)[None, :], 1)


@triton.jit
def _fold(lanes, C: tl.constexpr):
    """Sums of neighbouring lanes that live in one thread."""
    return tl.sum(tl.reshape(lanes, [1, C // 4, 4]), 2).to(tl.float64)


@triton.jit
def _crest(lanes, C: tl.constexpr):
    return tl.max(tl.reshape(lanes, [1, C // 4, 4]), 2)


@triton.jit
def _chunk_start(i, chunks, reverse, CHUNK: tl.constexpr):
    return tl.where(reverse, chunks - 1 - i, i).to(tl.int64) * CHUNK


@triton.jit
def _load_chunk(p, start, n_cols, o, T: tl.constexpr, fill: tl.constexpr):
    m = o < tl.minimum(n_cols - start, 1 << 30).to(tl.int32)
    return tl.load(p + start + o, mask=m, other=fill).to(T)


@triton.jit
def _store_chunk(p, start, n_cols, o, value):
    m = o < tl.minimum(n_cols - start, 1 << 30).to(tl.int32)
    tl.store(p + start + o, value, mask=m)
