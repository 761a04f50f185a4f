"""Which shapes are cut into programs how; the one file to change for another GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

SHORT = 1 << 15  # longest row that one program solves while there are rows enough


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


def short_plan(n: int, each: int, warps: int) -> Plan:
    """About `each` scores of a row per thread, and so many warps."""
    lanes = min(max(1, power(n) // each), 32 * warps)
    unroll = max(1, min(power(n) // (4 * lanes), 8 if each <= 32 else 4))
    return Plan(32 * warps // lanes, lanes, unroll)


def long_plan(rows: int, n: int, processors: int, warps: int, unroll: int) -> Plan:
    """Enough programs per row to fill the device once."""
    tiles = -(-n // (unroll * 32 * warps * 4))
    return Plan(1, 32 * warps, unroll, max(1, min(processors // max(rows, 1), tiles)))


def plan(rows: int, n: int, dtype: torch.dtype, processors: int, backward: bool) -> Plan:
    """What ``tools/tune_cuda.py`` found best on an H200."""
    if n <= SHORT and (n <= 4096 or rows * 2 > processors):
        if n <= 512:
            how = short_plan(n, 8 if backward else 16, 1)
            registers = 64 if backward and n <= 256 else 128
        elif n <= 8192:
            how, registers = (
                (short_plan(n, 32, 4), 168) if backward else (short_plan(n, 128, 1), 128)
            )
        else:
            how, registers = short_plan(n, 64, 16) if backward else short_plan(n, 32, 8), 128
        return how if dtype == torch.float64 else how._replace(registers=registers)
    if backward:
        return long_plan(rows, n, processors, 8 if n <= 2 * 10**6 else 16, 4)
    return long_plan(rows, n, processors, 8, 4 if n <= 5 * 10**7 else 8)
