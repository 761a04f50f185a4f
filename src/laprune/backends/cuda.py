"""The CUDA backend: which Triton kernel serves which shape, and how it is launched.

Nothing here waits for the device or reads from it: calls can be captured in a CUDA graph and run on
any stream. Every reduction has a fixed order, so equal inputs give equal bits. Without Triton, or
where it cannot launch a cooperative grid, the reference serves.
"""

from __future__ import annotations

import functools
import inspect
import math
import struct
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._contract import INFO_SIZE, STATE_SIZE
from ._plans import Plan, plan, power
from .reference import TOLERANCE

COARSE = 10  # a very long row reads one tile in so many, and one per program, before all of itself
VERY_LONG = 1 << 22
KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LINE = 16  # numbers a program shows its team


@functools.cache
def kernels() -> ModuleType | None:
    """The kernels' module, or None where Triton cannot serve."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions

        from . import _triton
    except ImportError:
        return None
    # Triton 3.6 names what it keeps on disk by the order in which a process met its kernels.
    for kernel in (_triton.solve_rows, _triton.solve_long, _triton.vjp):
        getattr(kernel, "cache_key", None)
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


# The address of a device's current stream: 0 for the default one.
_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)
# As torch.cuda.current_device, which first asks whether there is CUDA at all.
_current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# The scratch of the devices' default streams.
_kept: dict[int, tuple[Tensor, Tensor]] = {}
# Zeros for counters of captured launches; threads may capture at the same time.
_spare: dict[int, Tensor] = {}
_sparing = threading.Lock()
SPARE = 1 << 16


def _scratch(like: Tensor, programs: int, rows: int) -> tuple[Tensor, Tensor]:
    """Of a launch's own. Zeros that a captured launch fills would cost a kernel at every replay, so
    it has some that were made before, for good; ``torch.cuda.graph`` waits for what came before."""
    lines = like.new_empty(programs * 2 * LINE, dtype=torch.float64)
    index = like.device.index
    if index is not None and torch.cuda.is_current_stream_capturing():
        with _sparing:
            spare, count = _spare.get(index), -(-rows // 16) * 32
            if spare is not None and len(spare) >= count:
                _spare[index] = spare[count:]
                return lines, spare[:count]
    elif index is not None and (index not in _spare or len(_spare[index]) < SPARE // 2):
        _spare[index] = like.new_zeros(SPARE, dtype=torch.int32)
    return lines, like.new_zeros(programs * 2, dtype=torch.int32)


def _even(n: int, width: int, single: bool) -> int:
    """What the kernels know of a row's tiles: nothing (0), that they are whole (1), that all of
    many but the last are, which ends with a four (2) or, in a single row, within one (3)."""
    if n % width == 0:
        return 1
    fours = n % 4 == 0
    if n <= 4 * width or not (fours or single):
        return 0
    return 2 if fours else 3


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
        single = rows == 1 and how.rows == 1
        self.meets = how.team > 1
        self.constants: dict[str, Any] = {
            "GATE": gate,
            "T": work,
            "S": work if how.team == 0 else tl.float64,
            "U": how.unroll,
            "ROWS": how.rows,
            "LANES": how.lanes,
            "EVEN": _even(n, width, single),
            "ONCE": how.team == 0 and n <= width,
            # What n is known to be a multiple of: fours of scores can be read at once.
            "BY": 4 if n % 4 == 0 else 1,
            "SINGLE": single,
            "TEAM": self.meets,
            "LINES": power(max(1, how.team)),
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
            return _scratch(like, self.programs, self.rows)
        kept = _kept.get(self.index)
        if kept is None or kept[1].numel() < 2 * self.programs:
            kept = _kept[self.index] = _scratch(like, self.programs, self.rows)
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
        if self.index is not None and self.index != _current():
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

    def again(
        self, key: tuple[Any, ...], places: tuple[int, ...], numbers: tuple[Any, ...]
    ) -> bool:
        """Launch at these addresses, multiples of 16, what was launched before; whether it was."""
        known = self.compiled.get(key)
        if known is None or self.index != _current():
            return False
        go, values = known
        go(*places, *numbers, *values)
        return True


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


_pack, _unpack = struct.Struct("dd").pack, struct.Struct("qq").unpack


def _bits(x: float, y: float) -> tuple[Any, ...]:
    """The bits of two float64: Triton knows no such arguments, but integers."""
    return _unpack(_pack(x, y))


def _numbers(x: Tensor | float, like: Tensor) -> tuple[Tensor, int, int]:
    """One float64 per row, its stride, and the bits of one that is the same for all rows.

    A number of Python's needs no tensor, which would take a kernel to fill. All integers that come
    here have 64 bits.
    """
    if isinstance(x, float):
        return like, -1, _bits(x, 0.0)[0]
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
    go = _prepare(scores, values, gated, how, backward=False)
    r = scores.contiguous()
    v = r if values is None else values.contiguous()
    out = torch.empty_like(r)
    state = r.new_empty((go.rows, STATE_SIZE), dtype=torch.float64)
    info = r.new_empty((go.rows, INFO_SIZE), dtype=torch.int32)
    if go.rows > 0:
        _launch_solve(go, r, v, out, k, hardness, state, info, fixed)
    return out, state, info


def _launch_solve(
    go: _Launch,
    r: Tensor,
    v: Tensor,
    out: Tensor,
    k: Tensor | float,
    hardness: Tensor | float,
    state: Tensor,
    info: Tensor,
    fixed: bool,
) -> None:
    module = kernels()
    assert module is not None
    k, s_k, k_bits = _numbers(k, state)
    hardness, s_h, h_bits = _numbers(hardness, state)
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
    go = _prepare(scores, values, gated, how, backward=True)
    r, g = scores.contiguous(), grad_out.contiguous()
    v = r if values is None else values.contiguous()
    state, info = state.contiguous(), info.contiguous()
    pull = None if grad_state is None else grad_state.contiguous()
    dscores = torch.empty_like(r)
    dvalues = None if values is None else torch.empty_like(v)
    dk = None if isinstance(k, float) else state.new_empty(go.rows)
    dhardness = None if isinstance(hardness, float) else state.new_empty(go.rows)
    if go.rows > 0:
        _launch_vjp(
            go, r, v, g, dscores, dvalues, k, hardness, state, info, pull, dk, dhardness, fixed
        )
    return dscores, dvalues, dk, dhardness


def _launch_vjp(
    go: _Launch,
    r: Tensor,
    v: Tensor,
    g: Tensor,
    dscores: Tensor,
    dvalues: Tensor | None,
    k: Tensor | float,
    hardness: Tensor | float,
    state: Tensor,
    info: Tensor,
    pull: Tensor | None,
    dk: Tensor | None,
    dhardness: Tensor | None,
    fixed: bool,
) -> None:
    module = kernels()
    assert module is not None
    k, s_k, k_bits = _numbers(k, state)
    hardness, s_h, h_bits = _numbers(hardness, state)
    go(
        module.vjp,
        (v.dtype, g.dtype),
        (r, v, g, dscores, dscores if dvalues is None else dvalues, k, hardness, state, info,
         state if pull is None else pull, state if dk is None else dk,
         state if dhardness is None else dhardness, *go.scratch(state)),
        go.rows, go.n, max(1, go.how.team), s_k, s_h, k_bits, h_bits,
        FIXED=fixed, PULL=pull is not None, ASKED=s_k >= 0 or s_h >= 0,
    )  # fmt: skip


class Routine:
    """:func:`solve` and :func:`vjp` for most calls: scores of one shape, numbers as k and hardness,
    and nothing wanted but the mask and the gradient of the scores.

    A short row is solved in less time than Python takes to see to all that might be asked, so this
    launches again what was launched before, at other addresses. State and info share one tensor.
    """

    def __init__(self, index: int | None, shape: torch.Size, dtype: torch.dtype, gate: int) -> None:
        n, module = shape[-1], kernels()
        assert module is not None
        rows = math.prod(shape) // n
        self.rows, self.n, self.dtype = rows, n, dtype
        self.forward, self.backward = (
            _launch(index, rows, n, dtype, gate, backward, None) for backward in (False, True)
        )
        # The info begins at a multiple of 16 bytes, which Triton makes use of.
        self.info = -(-rows * STATE_SIZE // 2) * 2
        self.room = self.info + rows  # two int32 are as long as a float64
        kernel, team = module.solve_rows, self.forward.how.team
        # The arguments around the bits of the two numbers, which have no stride.
        self.before: tuple[int, ...] = (rows, n, -1, -1)
        self.after: tuple[float, ...] = self.forward.tolerance
        if team > 0:
            kernel, self.before = module.solve_long, (n, team, -1, -1)
            self.after = (*self.after, self.forward.few_tiles)
        self.forward_keys = [(kernel.fn, (dtype,), None, fixed) for fixed in (False, True)]
        self.backward_keys = [
            (module.vjp.fn, (dtype, dtype), None, fixed, False, False) for fixed in (False, True)
        ]
        self.sizes = (rows, n, max(1, self.backward.how.team), -1, -1)

    def solve(
        self, scores: Tensor, k: float, hardness: float, fixed: bool
    ) -> tuple[Tensor, Tensor]:
        """The mask, and state and info for :meth:`vjp`."""
        go, r = self.forward, scores.contiguous()
        out = torch.empty_like(r)
        state = r.new_empty(self.room, dtype=torch.float64)
        x, y, s = r.data_ptr(), out.data_ptr(), state.data_ptr()
        places: tuple[int, ...] = (x, x, y, s, s, s, s + 8 * self.info)
        if go.how.team > 0:
            lines, counters = go.scratch(state)
            places = (*places, lines.data_ptr(), counters.data_ptr())
        numbers = (*self.before, *_bits(k, hardness), *self.after)
        if (x | y | s) % 16 or not go.again(self.forward_keys[fixed], places, numbers):
            _launch_solve(go, r, r, out, float(k), float(hardness), state, self._info(state), fixed)
        return out, state

    def vjp(
        self, scores: Tensor, k: float, hardness: float, fixed: bool, state: Tensor, grad: Tensor
    ) -> Tensor:
        """The gradient of the scores."""
        go, r, g = self.backward, scores.contiguous(), grad.contiguous()
        out = torch.empty_like(r)
        x, d, y, s = r.data_ptr(), g.data_ptr(), out.data_ptr(), state.data_ptr()
        lines, counters = go.scratch(state)
        places = (
            x, x, d, y, y, s, s, s, s + 8 * self.info, s, s, s,
            lines.data_ptr(), counters.data_ptr(),
        )  # fmt: skip
        numbers = (*self.sizes, *_bits(k, hardness))
        usual = (x | d | y | s) % 16 == 0 and g.dtype is self.dtype
        if not usual or not go.again(self.backward_keys[fixed], places, numbers):
            _launch_vjp(
                go, r, r, g, out, None, float(k), float(hardness), state, self._info(state), None,
                None, None, fixed,
            )  # fmt: skip
        return out

    def _info(self, state: Tensor) -> Tensor:
        return state[self.info :].view(torch.int32)


@functools.lru_cache(4096)
def routine(
    index: int | None, shape: torch.Size, dtype: torch.dtype, gated: bool
) -> Routine | None:
    """What serves scores of this kind, gating themselves or nothing; None if they are none."""
    if dtype not in KINDS or math.prod(shape or (0,)) == 0:
        return None
    return Routine(index, shape, dtype, 2 if gated else 0)
