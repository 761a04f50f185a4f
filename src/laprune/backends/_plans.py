"""Which shapes are cut into programs how; the one file to change for another GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

SHORT = 1 << 15  # longest row that one program solves while there are rows enough
HELD = 1 << 14  # longest row of float32 that a program holds in registers


class Plan(NamedTuple):
    """How a shape is cut into programs: tiles of lanes, rows, unroll and 4, a team per long row."""

    rows: int
    lanes: int
    unroll: int
    team: int = 0
    """0: short rows, one program for `rows` of them; else so many programs for each row."""
    registers: int = 0
    """Most registers a thread may have; 0: as many as the compiler likes."""

    @property
    def warps(self) -> int:
        return max(1, self.rows * self.lanes // 32)


def power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def held(n: int, each: int) -> Plan:
    """Rows that stay in registers, `each` scores per thread, by as few warps as that takes."""
    lanes = max(1, power(n) // each)
    return Plan(max(1, 32 // lanes), lanes, max(1, power(n) // (4 * lanes)))


def long_plan(rows: int, n: int, processors: int, warps: int, unroll: int) -> Plan:
    """Enough programs per row to fill the device once."""
    tiles = -(-n // (unroll * 32 * warps * 4))
    return Plan(1, 32 * warps, unroll, max(1, min(processors // max(rows, 1), tiles)))


def plan(rows: int, n: int, dtype: torch.dtype, processors: int, backward: bool) -> Plan:
    """What ``tools/tune_cuda.py`` found best on an H200."""
    wide = dtype == torch.float64
    size = 2 * n if wide else n
    if n > SHORT or (size > HELD and rows * 2 <= processors):
        if backward:
            return long_plan(rows, n, processors, 8 if n <= 2 * 10**6 else 16, 4)
        return long_plan(rows, n, processors, 8, 4 if n <= 5 * 10**7 else 8)
    registers = 128
    if backward:
        if n <= 512:
            how, registers = held(n, 8), 64
        elif n <= 4096:
            how, registers = held(n, 16), 96
        elif n <= 8192:
            how, registers = Plan(1, 128, 8), 168
        else:
            how = Plan(1, 512, 4)
    elif n <= 128:
        how = held(n, 16)
    elif (
        n <= 1024
        or (size <= 4096 and rows <= 8 * processors)
        or (size <= HELD and rows <= processors)
    ):
        how = held(n, 16 if wide else 32)
    elif n <= 4096:  # of so many rows, one takes a warp or half of it, which waits for no other
        how = held(n, 128)._replace(unroll=4)
    else:
        how = Plan(1, 256, 8)
    return how if wide else how._replace(registers=registers)
