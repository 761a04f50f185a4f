"""The CUDA backend: which Triton kernel serves which shape, and how it is launched.

Nothing here waits for the device or reads from it: calls can be captured in a CUDA graph and run on any
stream. Every reduction has a fixed order, so equal inputs give equal bits. Without Triton, or where
it cannot launch a cooperative grid, the reference serves.
"""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._contract import INFO_SIZE, STATE_SIZE

ON_CHIP = 16384  # longest float32 row that is kept in registers
SAMPLE = 4096  # scores of a long row that are solved first
COARSE = 16  # one chunk in so many is read before the whole row
LINE = 16  # numbers a program shares with its team


class Plan(NamedTuple):
    """How a shape is cut: programs of tiles [rows, 4, lanes], several per row or chunk."""

    rows: int
    lanes: int
    tiles: int
    team: int = 0
    """0: rows on chip; 1: each long row by one program; more: by a team that meets at barriers."""
    sample: int = 0
    """Tiles in a long row's sample."""
    meet: bool = False
    """Whether a team meets at all; a team of one need not."""

    @property
    def warps(self) -> int:
        return max(1, self.rows * self.lanes // 32)


@functools.cache
def kernels() -> ModuleType | None:
    """The compiled kernels' module, or None where Triton cannot serve."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions

        from . import _triton_kernels
    except ImportError:
        return None
    fields = getattr(CUDAOptions, "__dataclass_fields__", {})
    return _triton_kernels if "launch_cooperative_grid" in fields else None


@functools.cache
def _serves_device(index: int) -> bool:
    if torch.version.hip is not None or kernels() is None:
        return False
    return torch.cuda.get_device_capability(index) >= (7, 0)


def serves(scores: Tensor) -> bool:
    return scores.device.type == "cuda" and _serves_device(scores.device.index)


@functools.cache
def _processors(index: int | None) -> int:
    if index is None:
        return 1
    return torch.cuda.get_device_properties(index).multi_processor_count


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def rows_plan(n: int, each: int) -> Plan:
    """Rows on chip, with `each` scores per thread: as many rows as fill a warp, or more warps."""
    width = max(4, _power(n))
    lanes = max(1, width // each)
    return Plan(max(1, 32 // lanes), lanes, width // (4 * lanes))


def long_plan(rows: int, n: int, processors: int, warps: int, tiles: int) -> Plan:
    """Enough programs per row to fill the device once."""
    lanes = 32 * warps
    chunks = -(-n // (tiles * 4 * lanes))
    team = max(1, min(processors // max(rows, 1), chunks))
    return Plan(1, lanes, tiles, team, max(1, SAMPLE // (4 * lanes)), team > 1)


def plan(scores: Tensor, backward: bool) -> Plan:
    rows, n = scores.shape
    wide = scores.dtype == torch.float64
    if n <= (ON_CHIP // 2 if wide else ON_CHIP):
        each = 32 if backward else 64
        return rows_plan(n, each // 2 if wide else each)
    processors = _processors(scores.device.index)
    return long_plan(rows, n, processors, 16 if backward else 8, 4)


def _work(scores: Tensor) -> Any:
    import triton.language as tl

    return tl.float64 if scores.dtype == torch.float64 else tl.float32


def _tolerance(scores: Tensor) -> tuple[float, float]:
    return (2.5e-13, 1e-8) if scores.dtype == torch.float64 else (4e-7, 1e-5)


def _numbers(x: Tensor, rows: int) -> tuple[Tensor, int]:
    """One float64 per row, and its stride."""
    x = x.detach().to(torch.float64)
    return x, x.stride(0) if rows > 1 else 0


def _device(scores: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(scores.device) if scores.is_cuda else contextlib.nullcontext()


def _scratch(scores: Tensor, how: Plan) -> tuple[Tensor, Tensor]:
    """Two lines per program, and a counter per row that starts at zero."""
    rows = scores.shape[0] if how.meet else 1
    lines = scores.new_empty((rows, 2, how.team, LINE), dtype=torch.float64)
    return lines, scores.new_zeros(rows, dtype=torch.int32) if how.meet else lines


def _options(scores: Tensor, how: Plan) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": how.warps}
    if scores.is_cuda and how.meet:
        options["launch_cooperative_grid"] = True
    return options


def solve(
    scores: Tensor,
    k: Tensor,
    hardness: Tensor,
    values: Tensor | None,
    gated: bool,
    fixed: bool,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`reference.solve`."""
    module = kernels()
    assert module is not None
    how = how or plan(scores, backward=False)
    rows, n = scores.shape
    r = scores.detach().contiguous()
    v = r if values is None else values.detach().contiguous()
    k, s_k = _numbers(k, rows)
    hardness, s_h = _numbers(hardness, rows)
    out = torch.empty_like(r)
    state = r.new_empty((rows, STATE_SIZE), dtype=torch.float64)
    info = r.new_empty((rows, INFO_SIZE), dtype=torch.int32)
    if rows == 0:
        return out, state, info
    gate = 0 if not gated else 2 if values is None else 1
    common = {"GATE": gate, "FIXED": fixed, "T": _work(r), "L": how.lanes, "TILES": how.tiles}
    common |= _options(r, how)
    with _device(r):
        if how.team == 0:
            module.rows_solve[(-(-rows // how.rows),)](
                r, v, out, k, hardness, state, info, rows, n, s_k, s_h, *_tolerance(r),
                ROWS=how.rows, **common,
            )  # fmt: skip
        else:
            lines, count = _scratch(r, how)
            module.long_solve[(rows * how.team,)](
                r, v, out, k, hardness, state, info, lines, count, n, how.team, s_k, s_h,
                *_tolerance(r), SAMPLE=how.sample, COARSE=COARSE, TEAM=how.meet,
                LINES=_power(how.team), **common,
            )  # fmt: skip
    return out, state, info


def vjp(
    scores: Tensor,
    k: Tensor,
    hardness: Tensor,
    values: Tensor | None,
    gated: bool,
    fixed: bool,
    state: Tensor,
    info: Tensor,
    grad_out: Tensor,
    grad_state: Tensor | None,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """As :func:`reference.vjp`."""
    module = kernels()
    assert module is not None
    how = how or plan(scores, backward=True)
    rows, n = scores.shape
    r, g = scores.detach().contiguous(), grad_out.detach().contiguous()
    v = r if values is None else values.detach().contiguous()
    k, s_k = _numbers(k, rows)
    hardness, s_h = _numbers(hardness, rows)
    state, info = state.detach().contiguous(), info.contiguous()
    pull = state if grad_state is None else grad_state.detach().contiguous()
    dscores = torch.empty_like(r)
    dvalues = None if values is None else torch.empty_like(v)
    dk = state.new_empty(rows)
    dhardness = torch.empty_like(dk)
    if rows == 0:
        return dscores, dvalues, dk, dhardness
    gate = 0 if not gated else 2 if values is None else 1
    common = {"GATE": gate, "FIXED": fixed, "HAS_STATE": grad_state is not None, "T": _work(r)}
    common |= {"L": how.lanes, "TILES": how.tiles} | _options(r, how)
    tensors = (r, v, g, dscores, dscores if dvalues is None else dvalues, k, hardness)
    tensors += (state, info, pull, dk, dhardness)
    with _device(r):
        if how.team == 0:
            grid = (-(-rows // how.rows),)
            module.rows_vjp[grid](*tensors, rows, n, s_k, s_h, ROWS=how.rows, **common)
        else:
            lines, count = _scratch(r, how)
            module.long_vjp[(rows * how.team,)](
                *tensors, lines, count, n, how.team, s_k, s_h, TEAM=how.meet,
                LINES=_power(how.team), **common,
            )  # fmt: skip
    return dscores, dvalues, dk, dhardness
