# mypy: ignore-errors
# ruff: noqa: SIM300
"""The backward kernel: the gradients of scores, values, k and hardness."""

import triton
import triton.language as tl

from .endpoints import (
    CONSTANT,
    HARD,
    NONFINITE,
    TIED,
    UNIFORM,
    _is_regular,
    _is_soft,
    _other_mask,
    _tile_hard,
)
from .sums import _line_of, _row_count, _y
from .team import (
    COLUMNS,
    _across,
    _leave,
    _meet,
    _meet1,
    _own8,
    _part,
    _plus_kept,
    _ties_before,
    _wide,
    _zero8,
)
from .tiles import (
    INF,
    LN2,
    PLAIN,
    _any,
    _load,
    _max_y,
    _my_rows,
    _number,
    _over,
    _starts,
    _stop,
    _store,
    _v,
)


@triton.jit
def _grad_tile(b_x, b_e, line, means, ASKED: tl.constexpr, T: tl.constexpr):
    """The gradient's sums, centred on the means; b_e is the gradient of p. ASKED: so are the count
    of the scores and the sum of b_e, which only gradients of k and hardness take."""
    b_y = _y(b_x, line)
    b_w = tl.minimum(tl.abs(b_y), _max_y(T))
    # Cut like that, the weights of a row whose scores are all far do not vanish together.
    b_q = tl.where(b_x > -INF, 0.5 * tl.exp2(b_w * -1.0), 0.0)
    b_p = tl.where(b_y > 0, (1.0 - _v(means[1])) - b_q, b_q - _v(means[1]))
    b_z = b_q * (tl.where(b_y > 0, b_w, -b_w) * LN2 - _v(means[0]))
    b_n, b_t = tl.zeros_like(b_q), tl.zeros_like(b_q)
    if ASKED:
        b_n, b_t = tl.where(b_x > -INF, 1.0, 0.0).to(T), b_e
    terms = (b_n, b_q, b_q * b_e, b_z, b_q * b_p, b_z * b_p, b_z * b_e, b_t)
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
    n, s0, g0, s1, u0, cov, g1, total = sums
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
    EVEN: tl.constexpr, BY: tl.constexpr, SINGLE: tl.constexpr, TEAM: tl.constexpr,
    LINES: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """The gradient of rows in two passes: its sums, then, backwards, the gradient itself. ONCE: a
    tile holds all of a row."""
    f64: tl.constexpr = tl.float64
    n_cols = n_cols // BY * BY  # which Triton sees to be a multiple of BY
    if TEAM:
        row = tl.program_id(0).to(tl.int64) // size
        me = (tl.program_id(0) % size).to(tl.int64)
        o_rows = row
        p_lines, p_count = p_lines + row * 2 * size * COLUMNS, p_count + row * 2
    else:
        me = 0
        o_rows = _my_rows(rows, ROWS)
    o_in, o_out = _starts(o_rows, n_cols, SINGLE)
    p_x, p_v, p_g = p_x + _v(o_in), p_v + _v(o_in), p_g + _v(o_in)
    p_dx, p_dv = p_dx + _v(o_out), p_dv + _v(o_out)
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
    r_t = 1.0 / at[2]
    line = _line_of(at, r_t, T)
    centre = (means[0].to(T), means[1].to(T))
    centred = (centre[0].to(S), centre[1].to(S))
    tiles = 1 if ONCE else tl.cdiv(me * 0 + n_cols, U * LANES * 4)  # in 64 bits, as me
    team = (p_lines, p_count, size, me, 0)
    b_x = _load(p_x, me, n_cols, -INF, T, U, LANES, EVEN)
    b_g = _load(p_g, me, n_cols, 0.0, T, U, LANES, EVEN)
    b_xn, b_gn = b_x, b_g

    lanes = _zero8(ROWS, LANES, T)
    kept = (lanes[0], lanes[0])
    for j in range(me, tiles, 1 if ONCE else size):
        if ONCE == 0:
            # The next tile is asked for while this one is summed; at the end, that which the second
            # pass begins with.
            b_x, b_g = b_xn, b_gn
            then = tl.where(j + size < tiles, j + size, tiles - 1 - me)
            b_xn = _load(p_x, then, n_cols, -INF, T, U, LANES, EVEN)
            b_gn = _load(p_g, then, n_cols, 0.0, T, U, LANES, EVEN)
        b_e = _upstream(p_v, j, n_cols, b_x, b_g, GATE, T, U, LANES, EVEN)
        lanes, kept = _plus_kept(lanes, kept, _grad_tile(b_x, b_e, line, centre, ASKED, T))
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
    e_bar, c1, rate = e_bar.to(T), c1.to(T), r_t.to(T)
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
        b_q = 0.5 * tl.exp2(tl.abs(b_y) * -1.0)
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
