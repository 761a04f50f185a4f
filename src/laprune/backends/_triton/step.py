# mypy: ignore-errors
# ruff: noqa: SIM300
"""Newton's step in barrier and log temperature, inside brackets; ``reference`` derives it."""

import triton
import triton.language as tl

from .tiles import INF, LN2, _exp, _log, _over

PATIENCE = tl.constexpr(16)  # passes after which a temperature step needs a solved barrier
MAX_STEP = tl.constexpr(3.0)  # largest step in log t
SATURATED = tl.constexpr(45.0)  # exp(-45) is nothing beside 1
SOFT = tl.constexpr(0.05)  # below this gamma, sum (p - a)^2 is summed by itself


@triton.jit
def _log_ratio(x, d):
    """log x, to all digits of d = x - 1 where x is close to 1."""
    near = d * (1.0 - d * (0.5 - d * (0.33333333333333 - d * (0.25 - d * 0.2))))
    return tl.where(tl.abs(d) < 1e-3, near, _log(tl.maximum(x, 1e-37)))


@triton.jit
def _growth(d):
    """exp(d) - 1."""
    near = d * (1.0 + d * (0.5 + d * (0.16666666666667 + d * 0.041666666666667)))
    return tl.where(tl.abs(d) < 1e-3, near, _exp(d) - 1.0)


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
def _sane(at):
    """Whether a point is one: of scores at both ends of their type, a step may overflow."""
    return (tl.abs(at[0]) < INF) & (tl.abs(at[1]) < INF) & (at[2] > 0) & (at[2] < INF)


@triton.jit
def _keep(m, new, old):
    """The new point where m, the old one elsewhere."""
    return (
        tl.where(m, new[0], old[0]), tl.where(m, new[1], old[1]), tl.where(m, new[2], old[2]),
        tl.where(m, new[3], old[3]), tl.where(m, new[4], old[4]), tl.where(m, new[5], old[5]),
        tl.where(m, new[6], old[6]), tl.where(m, new[7], old[7]),
    )  # fmt: skip


@triton.jit
def _curve(q_lo, q_hi, qw_lo, qw_hi, qq_lo, qq_hi, qqw, over, short):
    """Newton's step of b/t and of t, relative to t, for plain sums that are `over` k and `short` of
    the hardness, with what their curvature adds, as docs/mathematics.md derives it; and about what
    is left after that.

    A score moves by dz = -v - d z + v d + d^2 z. What z and q are not summed up for, d^2 and half
    of v d, is that of scores whose density changes linearly over a few temperatures: the mean of
    |z| is near 1 then, and that of z near 0. Elsewhere what is left is anything.
    """
    q, w, lean = q_lo + q_hi, qw_lo + qw_hi, qw_hi - qw_lo
    # Rows that gain by it are well within these bounds, rows that it led astray far beyond.
    linear = (tl.abs(w - q) < 0.4 * q) & (tl.abs(lean) < 0.65 * q)
    tilt = (q_lo - 2.0 * qq_lo) - (q_hi - 2.0 * qq_hi)
    rise = 2.0 * qqw - w
    r_det = _over(1.0, tl.minimum(q * rise - lean * tilt, -1e-37))
    v, d = (over * rise - lean * short) * r_det, (q * short - tilt * over) * r_det
    over = v * (d * (q - w) + 0.5 * v * (q_lo - q_hi)) - 0.5 * lean * d * d
    short = v * (d * (tilt + 0.75 * lean) + v * (0.5 * q - 2.0 * (qq_lo + qq_hi)))
    v_more, d_more = (over * rise - lean * short) * r_det, (q * short - tilt * over) * r_det
    size = tl.abs(v) + tl.abs(d)
    more = tl.abs(v_more) + tl.abs(d_more)
    left = tl.where(linear, 0.3 * size * more + 0.05 * d * d, INF)
    return v + v_more, d + d_more, size, more, left


@triton.jit
def _sides(sums, problem, S: tl.constexpr):
    """The sums of a pass on both sides of the barrier, in units of q and z, after how many scores
    lie above it and how many and how much mass are over k. The difference of large sums is taken
    before they are rounded."""
    above, lo, hi, w_lo, w_hi, ee_lo, ee_hi, eew = sums
    k, k_rest = problem[1], problem[2]
    over_k = (above - k).to(S) - k_rest
    excess = (0.5 * (lo - hi) + (above - k)).to(S) - k_rest
    return (
        above.to(S), over_k, excess, 0.5 * lo.to(S), 0.5 * hi.to(S), w_lo.to(S) * (0.5 * LN2),
        w_hi.to(S) * (0.5 * LN2), 0.25 * ee_lo.to(S), 0.25 * ee_hi.to(S), eew.to(S) * (0.25 * LN2),
    )  # fmt: skip


@triton.jit
def _budget(sides):
    """e1 = log P - log M, its derivative in log t and, inverted, in b/t, and Newton's step u."""
    _, over_k, excess, q_lo, q_hi, qw_lo, qw_hi, _, _, _ = sides
    P, M = q_lo + tl.maximum(over_k, 0.0), q_hi + tl.maximum(-over_k, 0.0)
    P, M = tl.maximum(P, 1e-37), tl.maximum(M, 1e-37)
    r_P, r_M = _over(1.0, P), _over(1.0, M)
    e1 = _log_ratio(P * r_M, excess * r_M)
    e1_b, e1_t = -(q_lo * r_P + q_hi * r_M), qw_lo * r_P - qw_hi * r_M
    r_e1_b = _over(1.0, e1_b)
    return e1, e1_t, r_e1_b, -e1 * r_e1_b


@triton.jit
def _hardness(sides, budget, spread, t, problem, FIXED: tl.constexpr):
    """e2 = log C - log V - logit gamma, the same reduced to the barrier that holds the budget, and
    the slope of that in log t; what V odds lacks of C, and by how much the mean of p is off a."""
    if FIXED:
        heat, zero = problem[8], t * 0.0
        e2 = tl.where(t == heat, 0.0, tl.log(heat / t))
        return e2, e2, zero - 1.0, zero, zero
    else:
        above, _, excess, q_lo, q_hi, qw_lo, qw_hi, qq_lo, qq_hi, qqw = sides
        _, e1_t, r_e1_b, u = budget
        n, _, _, a, rest, few, odds, _, _ = problem
        shift = _over(excess, n)
        closed = qq_lo + a * (a * (n - above) - 2.0 * q_lo)
        closed += qq_hi + rest * (rest * above - 2.0 * q_hi)
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
        return e2, e2 + e2_b * u, e2_t - e2_b * e1_t * r_e1_b, V * odds - C, shift


@triton.jit
def _judge(sides, budget, hardness, near, at, tries, problem, tolerance, FIXED: tl.constexpr,
           S: tl.constexpr):  # fmt: skip
    """Whether a point is converged or tied, whether all weight is pinned to one score or equal ones
    and whether the answer is near by; the tries so far; what a step would move an entry by."""
    _, over_k, excess, q_lo, q_hi, qw_lo, qw_hi, _, _, _ = sides
    e1, _, _, u = budget
    e2, residual, slope, _, _ = hardness
    seen, _, _, gap = near
    passes, polish, polished = tries
    mass_tol, hardness_tol = tolerance
    t, few = at[2], problem[5]
    q = tl.maximum(q_lo + q_hi, 1e-37)
    close = t * 0.0 if FIXED else t * 0.0 + hardness_tol

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
    # passes, and the mass may err relative to k alone, by what is promised of it.
    polished += polish
    late = (near_by & (polished > 4)) | (passes > 2 * PATIENCE)
    k = problem[1].to(S) + problem[2]
    nearly_holds = budget_holds | (late & (off_by <= 2.5 * mass_tol * k))
    converged = converged | (late & nearly_holds & (miss <= 2 * close))
    # All weight on one score, or on equal ones: a smaller t changes nothing any more.
    pinned = seen & (t * SATURATED < gap) & (tl.abs(at[1]) < 0.5 * gap) & (e2 < 0) & (over_k != 0)
    tied = pinned & nearly_holds & ((by_b <= 1e-6) | late) & (FIXED == 0)
    return converged, tied, pinned, near_by, polished, by_b + by_t


@triton.jit
def _move_both(sides, budget, hardness, at, passes, pinned, near_by, problem, FIXED: tl.constexpr,
               DENSE: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Newton's step in log t, inside its bracket; b follows linearly in t, and its own step is in
    units of the new t.

    Returns whether it is the one to take, b, t, the bracket, whether it bisects, its length, and
    about what is left after it.
    """
    _, _, excess, q_lo, q_hi, qw_lo, qw_hi, qq_lo, qq_hi, qqw = sides
    e1, e1_t, r_e1_b, u = budget
    e2, residual, slope, lack, shift = hardness
    _, b, t, t_lo, t_hi, _, _, stride = at
    _, _, _, a, rest, _, odds, _, heat = problem
    f32: tl.constexpr = S == tl.float32
    noise = 1e-7 if f32 else 1e-11
    blur = 2e-6 if f32 else 1e-7
    # Where e2 hardly depends on t, a small e2 is a large error of t: close by, the step needs no
    # steep slope.
    steep = slope <= -0.05
    solved = tl.abs(e1) <= tl.maximum(0.1 * tl.minimum(tl.abs(residual), 1.0), noise)
    solved = solved & (steep | (tl.abs(u) <= 0.003))
    d = tl.where(slope < 0, _over(-residual, slope), tl.where(residual > 0, MAX_STEP, -MAX_STEP))
    newton = t * _exp(tl.minimum(tl.maximum(d, -20.0), 20.0))
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
    # Where e2 is small and flat, it grows steeper below: Newton would go too far.
    down = tl.where((slope > -0.15) & (residual > -0.25), tl.maximum(down, -1.2), down)
    held = tl.where(pinned, d, tl.minimum(tl.maximum(d, down), MAX_STEP))
    growth = _growth(held)
    warmer = t + t * growth
    bracketed = (t_lo > 0) & (t_hi < INF) & (fine == 0)
    inside = (warmer > t_lo) & (warmer < t_hi) & (tl.abs(held) <= 0.75 * stride)
    outside = bracketed & (inside == 0)
    r_t = _over(1.0, t)
    middle = tl.sqrt(tl.maximum(t_lo * r_t, 1e-18) * tl.minimum(t_hi * r_t, 1e18))
    growth = tl.where(outside, middle - 1.0, growth)
    length = tl.abs(tl.where(outside, _log(middle), held))
    warmer = t + t * growth
    if FIXED:
        warmer = tl.where((held == d) & (outside == 0), heat, warmer)
    b_both = b + t * (u + (u - e1_t * r_e1_b) * growth)
    left = t * 0.0 + INF
    if DENSE and FIXED == 0:
        # Close by, the plain sums are closer to linear than their logarithms.
        short = _over(lack + excess * ((rest - a) - shift), 1.0 + odds)
        v, grown, moves, more, left = _curve(
            q_lo, q_hi, qw_lo, qw_hi, qq_lo, qq_hi, qqw, excess, short
        )
        smooth = (moves < 0.6) & (more < 0.2 * moves) & (left < INF)
        smooth = smooth & (outside == 0) & (held == d)
        growth, b_both = tl.where(smooth, grown, growth), tl.where(smooth, b + t * v, b_both)
        warmer, left = t + t * growth, tl.where(smooth, left, INF)
    return both, b_both, warmer, t_lo, t_hi, outside, length, left


@triton.jit
def _move_barrier(excess, u, near, at, S: tl.constexpr):
    """Newton's step in b alone, inside its bracket; where no score is in sight, on to the next, and
    not past it. Returns b, its bracket, and whether the step is Newton's own."""
    seen, below_d, above_d, _ = near
    _, b, t, _, _, b_lo, b_hi, _ = at
    b_lo, b_hi = tl.where(excess > 0, b, b_lo), tl.where(excess > 0, b_hi, b)
    under, over = b - below_d, above_d - b
    max_z: tl.constexpr = 700.0 if S == tl.float64 else 80.0
    beyond = (tl.abs(u) > SATURATED) & (t * tl.abs(u) > tl.where(excess > 0, over, under))
    blind = seen & ((tl.minimum(under, over) > 0.9 * max_z * t) | beyond)
    b_only = tl.where(blind, tl.where(excess > 0, above_d, below_d), b + t * u)
    off_limits = (b_lo > -INF) & (b_hi < INF) & (((b_only > b_lo) & (b_only < b_hi)) == 0)
    b_only = tl.where(off_limits, 0.5 * (b_lo + b_hi), b_only)
    return b_only, b_lo, b_hi, (off_limits == 0) & (blind == 0)


@triton.jit
def _sharp_gap(over_k, e2, near, t, problem, FIXED: tl.constexpr):
    """In the gap that parts the k largest from the others a t that is too small is raised at once,
    a given one is taken where the gap is saturated. Returns whether it is so, and that t."""
    seen, below_d, above_d, _ = near
    reach, heat = problem[7], problem[8]
    if FIXED:
        warmest = heat
        sharp = (heat <= t) & (e2 != 0) & (above_d - below_d > t * (2 * SATURATED))
    else:
        warmest = (above_d - below_d) * reach
        sharp = t < warmest
    return sharp & seen & (over_k == 0), warmest


@triton.jit
def _repivot(pivot, b, t, near):
    """The pivot becomes the barrier, rounded, or the score right beside it, on which all weight may
    come to rest; b is what is left. Returns also by how much it moves. The sum is exact."""
    seen, below_d, above_d, _ = near
    origin = pivot + b
    back = origin - pivot
    left = (pivot - (origin - back)) + (b - back)
    beside_d = tl.where(above_d - b < b - below_d, above_d, below_d)
    beside = seen & (tl.abs(b - beside_d) <= t * (0.5 * SATURATED))
    origin = tl.where(beside, pivot + beside_d, origin)
    back = tl.where(beside, beside_d, back)
    return origin, tl.where(beside, b - beside_d, left), back


@triton.jit
def _step(sums, spread, near, at, tries, problem, tolerance, FIXED: tl.constexpr,
          DENSE: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Judge the sums at a point and propose the next one, row by row. DENSE: rows so long that many
    scores are undecided, as a rule.

    Returns whether the point is converged or tied, the next point, whether it is sure to be better,
    whether it should be the answer, the tries to polish, the size of the error, whether the next
    point is so much better that the mask should be its, and the sums of q z, q p and q.
    """
    sides = _sides(sums, problem, S)
    _, over_k, excess, q_lo, q_hi, qw_lo, qw_hi, qq_lo, qq_hi, _ = sides
    pivot, b, t, t_lo, t_hi, _, _, stride = at
    few, heat = problem[5], problem[8]
    mass_tol, hardness_tol = tolerance
    budget = _budget(sides)
    e1, u, q = budget[0], budget[3], tl.maximum(q_lo + q_hi, 1e-37)
    hardness = _hardness(sides, budget, spread, t, problem, FIXED)
    e2, residual = hardness[0], hardness[1]
    converged, tied, pinned, near_by, polished, moves = _judge(
        sides, budget, hardness, near, at, tries, problem, tolerance, FIXED, S
    )
    both, b_both, warmer, t_lo, t_hi, outside, length, left = _move_both(
        sides, budget, hardness, at, tries[0], pinned, near_by, problem, FIXED, DENSE, S
    )
    b_only, b_lo, b_hi, own = _move_barrier(excess, u, near, at, S)
    sharp, warmest = _sharp_gap(over_k, e2, near, t, problem, FIXED)
    # So few scores are seen that many counts are missing: the start was far too cold. Once t has
    # made a step of its own, it is ties that look so.
    lost = (both == 0) & (tl.abs(over_k) > 1.0 + 4.0 * q) & (stride == INF) & (FIXED == 0)

    if FIXED == 0:
        t_lo = tl.where(sharp, tl.maximum(t_lo, t), t_lo)
    plain = tl.where(both, outside == 0, own & (lost == 0)) & (sharp == 0)
    # A short step in t means little beside a long one in b.
    stride = tl.where(both & (sharp == 0), tl.maximum(length, tl.abs(u)), stride)
    t = tl.where(sharp, warmest, tl.where(both, warmer, tl.where(lost, 8.0 * t, t)))
    b = tl.where(sharp, 0.5 * (near[1] + near[2]), tl.where(both, b_both, b_only))
    anew = both | sharp | lost
    b_lo, b_hi = tl.where(anew, -INF, b_lo), tl.where(anew, INF, b_hi)
    # Newton's own step from close by lands on the answer, to a fraction of the square of its length
    # (sigma'' is no larger than sigma'). Where that is nothing, the row has converged; where it is
    # little, the pass there writes, and another one will if that was too early.
    last = plain & (t == heat if FIXED else both)
    size = tl.maximum(tl.abs(e1), tl.abs(residual))
    far = tl.maximum(size, tl.maximum(tl.abs(u), tl.where(both, length, 0.0)))
    sure = plain & (far * far <= (1.0 if DENSE else 1.6) * mass_tol)
    shows = (converged == 0) | (moves > 0.15 * hardness_tol)
    converged = converged | (last & sure)
    little = tl.minimum(25 * mass_tol, 0.2 * hardness_tol)
    likely = left <= tl.minimum(0.5 * hardness_tol, _over(5 * mass_tol * few, q))
    last = last & ((size * size <= little) | likely)

    origin, b, back = _repivot(pivot, b, t, near)
    moved = (origin, b, t, t_lo, t_hi, b_lo - back, b_hi - back, stride)
    weights = (qw_hi - qw_lo, q_hi + (qq_lo - qq_hi), q)
    return converged, tied, moved, sure, last.to(tl.int32), polished, size, shows, weights
