"""The CUDA backend: which Triton kernel serves which shape, and how it is launched.

Nothing here waits for the device or reads from it: calls can be captured in a CUDA graph and run on
any stream. Every reduction has a fixed order, so equal inputs give equal bits. Without Triton, or
where it cannot launch a cooperative grid, the reference serves.
"""

from __future__ import annotations

import functools
import inspect
import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._contract import INFO_SIZE, STATE_SIZE
from .reference import TOLERANCE

SHORT = 1 << 15  # longest row that one program solves while there are rows enough
COARSE = 8  # a very long row reads one tile in so many, and one per program, before all of itself
VERY_LONG = 1 << 22
LINE = 16  # numbers a program shows its team


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


@functools.cache
def kernels() -> ModuleType | None:
    """The kernels' module, or None where Triton cannot serve."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions

        from . import _triton
    except ImportError:
        return None
    fields = getattr(CUDAOptions, "__dataclass_fields__", {})
    return _triton if "launch_cooperative_grid" in fields else None


@functools.cache
def _serves_device(index: int) -> bool:
    if torch.version.hip is not None or kernels() is None:
        return False
    return torch.cuda.get_device_capability(index) >= (7, 0)


def serves(scores: Tensor) -> bool:
    return scores.is_cuda and _serves_device(scores.device.index)


@functools.cache
def _processors(index: int | None) -> int:
    return 1 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def short_plan(n: int, each: int, warps: int) -> Plan:
    """About `each` scores of a row per thread, and so many warps."""
    lanes = min(max(1, _power(n) // each), 32 * warps)
    unroll = max(1, min(_power(n) // (4 * lanes), 8 if each <= 32 else 4))
    return Plan(32 * warps // lanes, lanes, unroll)


def long_plan(rows: int, n: int, processors: int, warps: int, unroll: int) -> Plan:
    """Enough programs per row to fill the device once."""
    tiles = -(-n // (unroll * 32 * warps * 4))
    return Plan(1, 32 * warps, unroll, max(1, min(processors // max(rows, 1), tiles)))


def plan(rows: int, n: int, dtype: torch.dtype, processors: int, backward: bool) -> Plan:
    """What ``tools/tune_cuda.py`` found best on an H200."""
    if n <= SHORT and (n <= 4096 or rows * 2 > processors):
        if n <= 512:
            how, registers = short_plan(n, 16, 1), 128 * backward
        elif n <= 8192:
            how, registers = short_plan(n, 32, 4) if backward else short_plan(n, 128, 1), 128
        else:
            how, registers = short_plan(n, 64, 16) if backward else short_plan(n, 32, 8), 128
        return how if dtype == torch.float64 else how._replace(registers=registers)
    if backward:
        return long_plan(rows, n, processors, 8 if n <= 2 * 10**6 else 16, 4)
    return long_plan(rows, n, processors, 8, 4 if n <= 5 * 10**7 else 8)


# The address of a device's current stream: 0 for the default one.
_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)
# The scratch of the devices' default streams.
_kept: dict[int, tuple[Tensor, Tensor]] = {}


def _scratch(like: Tensor, programs: int) -> tuple[Tensor, Tensor]:
    lines = like.new_empty(programs * 2 * LINE, dtype=torch.float64)
    return lines, like.new_zeros(programs * 2, dtype=torch.int32)


class _Launch:
    """What every kernel call of a shape shares, and the kernels compiled for it."""

    def __init__(
        self, index: int | None, rows: int, n: int, dtype: torch.dtype, gate: int, how: Plan
    ) -> None:
        import triton.language as tl

        self.index, self.how, self.rows, self.n = index, how, rows, n
        wide = dtype == torch.float64
        work = tl.float64 if wide else tl.float32
        width = how.unroll * how.lanes * 4
        self.meets = how.team > 1
        self.constants: dict[str, Any] = {
            "GATE": gate,
            "T": work,
            "S": work if how.team == 0 else tl.float64,
            "U": how.unroll,
            "ROWS": how.rows,
            "LANES": how.lanes,
            # Tiles end with the row; or all but the last are whole, of many; or nothing is known.
            "EVEN": 1 if n % width == 0 else 2 if n > 4 * width else 0,
            "ONCE": how.team == 0 and n <= width,
            "TEAM": self.meets,
            "LINES": _power(max(1, how.team)),
        }
        self.options: dict[str, Any] = {"num_warps": how.warps, "enable_fp_fusion": True}
        if self.meets:
            self.options["launch_cooperative_grid"] = True
        if how.registers:
            self.options["maxnreg"] = how.registers
        self.tolerance = TOLERANCE[torch.float64 if wide else torch.float32]
        tiles = -(-n // width)
        self.few_tiles = tiles
        if n >= VERY_LONG:
            self.few_tiles = min(tiles, -(-tiles // (COARSE * how.team)) * how.team)
        self.programs = rows * how.team if how.team else -(-rows // how.rows)
        self.grid = (self.programs, 1, 1)
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def scratch(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two lines per program, and two counters per row, which start at zero.

        A kernel leaves the counters at zero, as what follows on its stream wants them. The default
        stream keeps them: it is never captured and never ends. A captured kernel may run at any
        time, so on other streams every launch has its own.
        """
        if not self.meets:
            return like, like
        if self.index is None or _stream(self.index) != 0:
            return _scratch(like, self.programs)
        kept = _kept.get(self.index)
        if kept is None or kept[1].numel() < 2 * self.programs:
            kept = _kept[self.index] = _scratch(like, self.programs)
        return kept

    def __call__(
        self,
        kernel: Any,
        kinds: tuple[torch.dtype, ...],
        tensors: tuple[Tensor, ...],
        *numbers: float,
        **constants: Any,
    ) -> None:
        """Launch; kinds are the types of those tensors that may have another one next time.

        A kernel that is compiled already goes off without Triton's search for it, which costs more
        than the kernel does; what Triton would compile anew for is in the key. It takes addresses:
        of a tensor, Triton would ask the driver where it lies.
        """
        if self.index is not None and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.index):
                self(kernel, kinds, tensors, *numbers, **constants)
            return
        places, bits = [x.data_ptr() for x in tensors], 0
        for place in places:
            bits |= place
        odd = tuple([place % 16 == 0 for place in places]) if bits % 16 else None
        key = (kernel.fn, kinds, odd, *constants.values())
        known = self.compiled.get(key)
        if known is not None:
            go, values = known
            go(*places, *numbers, *values)
            return
        constants |= self.constants
        values = [constants[name] for name in _constants(kernel.fn)]
        options = {} if self.index is None else self.options
        compiled = kernel[self.grid](*tensors, *numbers, *values, **options)
        if self.index is not None:  # the interpreter compiles nothing
            self.compiled[key] = _launcher(compiled, self.grid, self.index), values


def _launcher(compiled: Any, grid: tuple[int, int, int], index: int) -> Callable[..., Any]:
    """``compiled[grid]`` for one device, without what Triton does at every call for hooks that
    nobody has set, where this Triton has the parts that takes."""
    public = compiled[grid]
    try:
        from triton import knobs

        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
        hooks = knobs.runtime
        _ = hooks.launch_enter_hook, hooks.launch_exit_hook
    except (ImportError, AttributeError):
        return public

    def go(*args: Any) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            public(*args)
        else:
            run(*grid, _stream(index), function, packed, None, None, None, *args)

    return go


@functools.lru_cache(4096)
def _launch(
    index: int | None,
    rows: int,
    n: int,
    dtype: torch.dtype,
    gate: int,
    backward: bool,
    how: Plan | None,
) -> _Launch:
    how = how or plan(rows, n, dtype, _processors(index), backward)
    return _Launch(index, rows, n, dtype, gate, how)


@functools.cache
def _constants(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a kernel's constants, in order."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(x.name for x in parameters if "constexpr" in str(x.annotation))


def _numbers(x: Tensor | float, like: Tensor) -> tuple[Tensor, int, int]:
    """One float64 per row, its stride, and the bits of one that is the same for all rows.

    A number of Python's needs no tensor, which would take a kernel to fill. Triton knows no float64
    arguments, but integers; all that come here have 64 bits.
    """
    if isinstance(x, float):
        return like, -1, struct.unpack("q", struct.pack("d", x))[0]
    x = x.detach().to(torch.float64)
    return x, x.stride(0), 1 << 62


def _prepare(
    scores: Tensor, values: Tensor | None, gated: bool, how: Plan | None, backward: bool
) -> _Launch:
    gate = 0 if not gated else 2 if values is None else 1
    n = scores.shape[-1]
    return _launch(scores.device.index, scores.numel() // n, n, scores.dtype, gate, backward, how)


def solve(
    scores: Tensor,
    k: Tensor | float,
    hardness: Tensor | float,
    values: Tensor | None,
    gated: bool,
    fixed: bool,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`reference.solve`, for scores ``(..., n)``; k and hardness may be numbers, but for
    zero."""
    module = kernels()
    assert module is not None
    go = _prepare(scores, values, gated, how, backward=False)
    r = scores.contiguous()
    v = r if values is None else values.contiguous()
    out = torch.empty_like(r)
    state = r.new_empty((go.rows, STATE_SIZE), dtype=torch.float64)
    k, s_k, k_bits = _numbers(k, state)
    hardness, s_h, h_bits = _numbers(hardness, state)
    info = r.new_empty((go.rows, INFO_SIZE), dtype=torch.int32)
    if go.rows == 0:
        return out, state, info
    if go.how.team == 0:
        go(
            module.solve_rows, (v.dtype,), (r, v, out, k, hardness, state, info), go.rows, go.n,
            s_k, s_h, k_bits, h_bits, *go.tolerance, FIXED=fixed,
        )  # fmt: skip
    else:
        go(
            module.solve_long, (v.dtype,),
            (r, v, out, k, hardness, state, info, *go.scratch(state)), go.n, go.how.team, s_k, s_h,
            k_bits, h_bits, *go.tolerance, go.few_tiles, FIXED=fixed,
        )  # fmt: skip
    return out, state, info


def vjp(
    scores: Tensor,
    k: Tensor | float,
    hardness: Tensor | float,
    values: Tensor | None,
    gated: bool,
    fixed: bool,
    state: Tensor,
    info: Tensor,
    grad_out: Tensor,
    grad_state: Tensor | None,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """As :func:`reference.vjp`, for scores ``(..., n)``; a number has no gradient."""
    module = kernels()
    assert module is not None
    go = _prepare(scores, values, gated, how, backward=True)
    r, g = scores.contiguous(), grad_out.contiguous()
    v = r if values is None else values.contiguous()
    state, info = state.contiguous(), info.contiguous()
    k, s_k, k_bits = _numbers(k, state)
    hardness, s_h, h_bits = _numbers(hardness, state)
    pull = state if grad_state is None else grad_state.contiguous()
    dscores = torch.empty_like(r)
    dvalues = None if values is None else torch.empty_like(v)
    dk = None if s_k < 0 else state.new_empty(go.rows)
    dhardness = None if s_h < 0 else state.new_empty(go.rows)
    if go.rows == 0:
        return dscores, dvalues, dk, dhardness
    go(
        module.vjp,
        (v.dtype, g.dtype),
        (r, v, g, dscores, dscores if dvalues is None else dvalues, k, hardness, state, info, pull,
         state if dk is None else dk, state if dhardness is None else dhardness,
         *go.scratch(state)),
        go.rows, go.n, max(1, go.how.team), s_k, s_h, k_bits, h_bits,
        FIXED=fixed, PULL=grad_state is not None,
    )  # fmt: skip
    return dscores, dvalues, dk, dhardness
