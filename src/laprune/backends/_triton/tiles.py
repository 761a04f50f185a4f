# mypy: ignore-errors
# ruff: noqa: SIM300
"""Tiles: which scores a thread holds, how they are read and written, and what belongs to a row."""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
RAGGED = tl.constexpr(3)  # EVEN: all tiles but the last are whole, which ends within a four
# Threads go to the last dimensions first, before Triton 3.7 to the first ones; U, which is to stay
# in registers, stands where none are left for it: tiles are [U, ROWS, LANES, 4], or, there,
# [LANES, ROWS, U, 4].
U_FIRST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7))
# Numbers whose value is no reason to compile anew.
PLAIN = ["rows", "size", "s_k", "s_hardness", "k_bits", "hardness_bits", "few_tiles"]
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
def _exp(x):
    """The exponential; for float32 without care for subnormal numbers, in 2 instructions."""
    if COMPILED and x.dtype == tl.float32:
        return tl.exp2(x * LOG2E)
    else:
        return tl.exp(x)


@triton.jit
def _log(x):
    """The logarithm; for float32 to 2e-7, in 2 instructions instead of 20."""
    if COMPILED and x.dtype == tl.float32:
        return libdevice.fast_logf(x)
    else:
        return tl.log(x)


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
def _starts(o_rows, n_cols, SINGLE: tl.constexpr):
    """Where rows begin, to read them and to write.

    Triton gives a thread what it can read at once, and a thread is to own fours of scores. So it is
    told that rows begin at multiples of four. If their length is none they begin elsewhere, but
    EVEN is 0 then: nothing is read without a mask, which may end within a four, and so all is read
    one by one. What is written goes from thread to thread first, to be written side by side.
    """
    if SINGLE:
        return o_rows * 0, o_rows * 0
    else:
        return tl.multiple_of(o_rows * n_cols, 4), o_rows * n_cols


@triton.jit
def _columns(i, U: tl.constexpr, LANES: tl.constexpr):
    """The columns of tile i of a row: the threads' fours lie side by side, U times over."""
    o = _fours(4, LANES * 4, U, LANES) + tl.arange(0, 4)[None, None, None, :]
    return i * (U * LANES * 4) + o


@triton.jit
def _places(p, i, U: tl.constexpr, LANES: tl.constexpr):
    """Where tile i's scores lie: those of a thread are constants apart."""
    p = p + i * (U * LANES * 4) + _fours(4, 0, 1, LANES)
    return p + _fours(0, LANES * 4, U, 1) + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def _load(p, i, n_cols, other, T: tl.constexpr, U: tl.constexpr, LANES: tl.constexpr,
          EVEN: tl.constexpr):  # fmt: skip
    o, p_here = _columns(i, U, LANES), _places(p, i, U, LANES)
    if EVEN == 1:
        return tl.load(p_here).to(T)
    elif EVEN == 0:
        return tl.load(p_here, mask=o < n_cols, other=other).to(T)
    else:
        if (i + 1) * (U * LANES * 4) <= n_cols:
            b_x = tl.load(p_here).to(T)
        else:
            b_x = tl.load(p_here, mask=o < n_cols, other=other).to(T)
        return b_x


@triton.jit
def _store(p, i, n_cols, b_x, U: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr):
    o, p_here = _columns(i, U, LANES), _places(p, i, U, LANES)
    b_x = b_x.to(p.dtype.element_ty)
    if EVEN == 1:
        tl.store(p_here, b_x)
    elif EVEN == RAGGED:
        # With a mask that may end within a four, all scores would be stored one by one.
        if (i + 1) * (U * LANES * 4) <= n_cols:
            tl.store(p_here, b_x)
        else:
            tl.store(p_here, b_x, mask=o < n_cols)
    else:
        tl.store(p_here, b_x, mask=o < n_cols)


@triton.jit
def _fetch(p, i, n_cols, U: tl.constexpr, LANES: tl.constexpr):
    """Tile i is asked for, into the cache."""
    if COMPILED:
        o = tl.minimum(i * (U * LANES * 4) + tl.arange(0, LANES) * (U * 4), n_cols - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [p + o], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _sample(p_x, n_cols, T: tl.constexpr, U: tl.constexpr, LANES: tl.constexpr,
            EVEN: tl.constexpr):  # fmt: skip
    """A tile whose fours are spread evenly over a long row."""
    every = n_cols // (U * LANES * 4)
    o = _fours(1, LANES, U, LANES).to(tl.int64) * every * 4 + tl.arange(0, 4)[None, None, None, :]
    if EVEN == 0:  # _starts wants a mask, though all of it lies in the row
        return tl.load(p_x + o, mask=o < n_cols).to(T)
    else:
        return tl.load(p_x + o).to(T)


@triton.jit
def _stop(j, walk):
    """Stop j of a walk (first, end, step, stretch, last): from the end if there is a last stop."""
    i = j * walk[3]
    return tl.where(walk[4] > 0, walk[4] - i, i)


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
