"""The native CPU backend: rows go to the C++ unit in ``native/`` through ctypes.

No torch headers are needed to build it, the GIL is released while it runs, and it uses as many
threads as torch does. Without it (no compiler at installation) the reference serves.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._contract import INFO_SIZE, STATE_SIZE
from .reference import MAX_Z

_SUFFIX = {torch.float32: "f32", torch.float64: "f64"}
FRESH = 1 << 25  # bytes from which memory comes from the system, not from what was freed before


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled unit, or None where it was not built."""
    found = sorted((Path(__file__).parent).glob("_native*.so")) + sorted(
        Path(__file__).parent.glob("_native*.pyd")
    )
    return ctypes.CDLL(str(found[0])) if found else None


def serves(scores: Tensor) -> bool:
    return scores.is_cpu and library() is not None


def _call(name: str, dtype: torch.dtype, *args: Any) -> None:
    getattr(library(), f"laprune_{name}_{_SUFFIX[dtype]}")(
        *args, ctypes.c_int(torch.get_num_threads())
    )


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """For reading. On short rows, calls that change nothing would be a good part of the time."""
    if x.dtype == dtype and x.is_contiguous():
        return x
    return x.detach().to(dtype).contiguous()


def _empty(like: Tensor) -> Tensor:
    """Memory for a result, in large pages where it is large."""
    out = torch.empty_like(like)
    if out.nbytes >= FRESH:
        native = library()
        assert native is not None
        native.laprune_fresh(_pointer(out), ctypes.c_int64(out.nbytes))
    return out


def _each(x: Tensor | float, rows: int) -> Tensor:
    """One float64 per row."""
    if isinstance(x, Tensor):
        return _plain(x, torch.float64)
    return torch.full((rows,), x, dtype=torch.float64, device="cpu")


def _count(scores: Tensor) -> int:
    """How many rows there are."""
    return scores.numel() // scores.shape[-1]


def _work_dtype(scores: Tensor) -> torch.dtype:
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def _sizes(scores: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    return ctypes.c_int64(_count(scores)), ctypes.c_int64(scores.shape[-1])


def solve(
    scores: Tensor,
    k: Tensor | float,
    hardness: Tensor | float,
    values: Tensor | None,
    gated: bool,
    fixed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`reference.solve`, for scores ``(..., n)``; k and hardness may be numbers."""
    work, rows = _work_dtype(scores), _count(scores)
    r = _plain(scores, work)
    v = (r if values is None else _plain(values, work)) if gated else None
    k, hardness = _each(k, rows), _each(hardness, rows)
    out = _empty(r)
    state = r.new_empty(rows, STATE_SIZE, dtype=torch.float64)
    info = r.new_empty(rows, INFO_SIZE, dtype=torch.int32)
    _call(
        "solve", work, *map(_pointer, (r, v, out)), *_sizes(r), *map(_pointer, (k, hardness)),
        ctypes.c_int(fixed), *map(_pointer, (state, info)),
    )  # fmt: skip
    return out.to(scores.dtype), state, info


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
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """As :func:`reference.vjp`, for scores ``(..., n)``."""
    work, rows = _work_dtype(scores), _count(scores)
    r, g = _plain(scores, work), _plain(grad_out, work)
    v = (r if values is None else _plain(values, work)) if gated else None
    k, hardness = _each(k, rows), _each(hardness, rows)
    state, info = state.detach().contiguous(), info.contiguous()
    cotangent = None if grad_state is None else _plain(grad_state, torch.float64)
    dscores = _empty(r)
    dvalues = _empty(r) if values is not None else None
    dk, dhardness = torch.empty_like(k), torch.empty_like(hardness)
    _call(
        "vjp", work, *map(_pointer, (r, v, g, dscores, dvalues)), *_sizes(r),
        *map(_pointer, (k, hardness)), ctypes.c_int(fixed),
        *map(_pointer, (state, info, cotangent, dk, dhardness)),
    )  # fmt: skip
    if dvalues is not None and values is not None:
        dvalues = dvalues.to(values.dtype)
    return dscores.to(scores.dtype), dvalues, dk, dhardness


class Ended(NamedTuple):
    """As :class:`pieces._Found`."""

    point: Tensor
    means: Tensor
    status: Tensor
    passes: Tensor
    written: bool


def _pieces(pieces: Sequence[Tensor]) -> tuple[Any, ...]:
    """Addresses, sizes, how many pieces, how many rows."""
    sizes = (ctypes.c_int64 * len(pieces))(*(x.shape[1] for x in pieces))
    rows = ctypes.c_int64(pieces[0].shape[0])
    return _pointers(pieces), sizes, ctypes.c_int64(len(pieces)), rows


def _pointers(pieces: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(pieces))(*(x.data_ptr() for x in pieces))


def look(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """As :func:`pieces.look`."""
    out = like.new_empty(len(like), 5, dtype=torch.float64)
    _call("look", pieces[0].dtype, *_pieces(pieces), _pointer(out))
    return out


def sums(pieces: Sequence[Tensor], points: Tensor, out: Sequence[Tensor] | None = None) -> Tensor:
    """As :func:`pieces.sums`."""
    total = points.new_empty(len(points), 12, dtype=torch.float64)
    masks, points = None if out is None else _pointers(out), points.contiguous()
    _call(
        "sums", pieces[0].dtype, *_pieces(pieces), _pointer(points), masks, _pointer(total)
    )  # fmt: skip
    return total


def start(sample: Tensor, part: Tensor, target: Tensor, fixed: bool) -> tuple[Tensor, Tensor]:
    """As :func:`pieces.start`."""
    out = sample.new_empty(len(sample), 3, dtype=torch.float64)
    found = sample.new_empty(len(sample), dtype=torch.int32)
    sample, part, target = sample.contiguous(), part.contiguous(), target.contiguous()
    _call(
        "start", sample.dtype, _pointer(sample), *_sizes(sample), *map(_pointer, (part, target)),
        ctypes.c_int(fixed), *map(_pointer, (out, found)),
    )  # fmt: skip
    return out, found > 0


def iterate(
    read: Callable[[Tensor, bool], Tensor],
    n: Tensor,
    k: Tensor,
    target: Tensor,
    begin: Tensor,
    fixed: bool,
    tol: tuple[float, float],
    dtype: torch.dtype,
) -> Ended:
    """As :func:`pieces.iterate`; asks for the mask in the pass that should be the last."""
    native, rows = library(), len(k)
    assert native is not None
    memory = k.new_empty(rows * native.laprune_iteration_size(), dtype=torch.uint8)
    points = k.new_empty(rows, 4, dtype=torch.float64)
    means = k.new_zeros(rows, 2, dtype=torch.float64)
    info = k.new_empty(rows, INFO_SIZE, dtype=torch.int32)
    limits = (ctypes.c_double * 3)(*tol, MAX_Z[dtype])
    inputs = [x.to(torch.float64).contiguous() for x in (n, k, target, begin)]
    native.laprune_begin(
        ctypes.c_int64(rows), *map(_pointer, inputs[:3]), ctypes.c_int(fixed), limits,
        *map(_pointer, (inputs[3], memory, points, info)),
    )  # fmt: skip
    more, wanted = 1, False
    while more:
        wanted = more == 2
        total = read(points, wanted).contiguous()
        more = native.laprune_step(
            ctypes.c_int64(rows), *map(_pointer, (total, memory, points, means, info))
        )
    return Ended(points[:, :3], means, info[:, 0], info[:, 1], wanted)


def digits(pieces: Sequence[Tensor], prefix: Tensor, shift: int) -> Tensor:
    """As :func:`pieces.digits`."""
    counts, prefix = prefix.new_zeros(len(prefix), 256, dtype=torch.int64), prefix.contiguous()
    _call(
        "digits", pieces[0].dtype, *_pieces(pieces), _pointer(prefix), ctypes.c_int(shift),
        _pointer(counts),
    )  # fmt: skip
    return counts


def write(pieces: Sequence[Tensor], state: Tensor, status: Tensor, share: Tensor) -> list[Tensor]:
    """As :func:`pieces.write`."""
    out = [_empty(x) for x in pieces]
    given = [x.contiguous() for x in (state, status, share)]
    _call(
        "write", pieces[0].dtype, *_pieces(pieces), *map(_pointer, given), _pointers(out)
    )  # fmt: skip
    return out


def moments(
    pieces: Sequence[Tensor], grads: Sequence[Tensor], state: Tensor, status: Tensor
) -> Tensor:
    """As :func:`pieces.moments`."""
    out = state.new_empty(len(state), 8, dtype=torch.float64)
    given = [x.contiguous() for x in (state, status)]
    _call(
        "moments", pieces[0].dtype, *_pieces(pieces), _pointers(grads),
        *map(_pointer, (*given, out)),
    )  # fmt: skip
    return out


def pull(
    pieces: Sequence[Tensor], grads: Sequence[Tensor], state: Tensor, status: Tensor, slopes: Tensor
) -> list[Tensor]:
    """As :func:`pieces.pull`."""
    out = [_empty(x) for x in pieces]
    given = [x.contiguous() for x in (state, status, slopes)]
    _call(
        "pull", pieces[0].dtype, *_pieces(pieces), _pointers(grads), *map(_pointer, given),
        _pointers(out),
    )  # fmt: skip
    return out
