"""The native CPU backend: rows go to the C++ unit in ``native/`` through ctypes.

No torch headers are needed to build it, the GIL is released while it runs, and it uses as many
threads as torch does. Without it (no compiler at installation) the reference serves.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._contract import INFO_SIZE, STATE_SIZE

_SUFFIX = {torch.float32: "f32", torch.float64: "f64"}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled unit, or None where it was not built."""
    found = sorted((Path(__file__).parent).glob("_native*.so")) + sorted(
        Path(__file__).parent.glob("_native*.pyd")
    )
    return ctypes.CDLL(str(found[0])) if found else None


def serves(scores: Tensor) -> bool:
    return scores.device.type == "cpu" and library() is not None


def _call(name: str, dtype: torch.dtype, *args: Any) -> None:
    getattr(library(), f"laprune_{name}_{_SUFFIX[dtype]}")(
        *args, ctypes.c_int(torch.get_num_threads())
    )


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).contiguous()


def _work_dtype(scores: Tensor) -> torch.dtype:
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def _sizes(scores: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    return ctypes.c_int64(scores.shape[0]), ctypes.c_int64(scores.shape[1])


def solve(
    scores: Tensor, k: Tensor, hardness: Tensor, values: Tensor | None, gated: bool, fixed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`reference.solve`."""
    work = _work_dtype(scores)
    r = _plain(scores, work)
    v = (r if values is None else _plain(values, work)) if gated else None
    k, hardness = _plain(k, torch.float64), _plain(hardness, torch.float64)
    out = torch.empty_like(r)
    state = torch.empty(len(r), STATE_SIZE, dtype=torch.float64)
    info = torch.empty(len(r), INFO_SIZE, dtype=torch.int32)
    _call(
        "solve", work, *map(_pointer, (r, v, out)), *_sizes(r), *map(_pointer, (k, hardness)),
        ctypes.c_int(fixed), *map(_pointer, (state, info)),
    )  # fmt: skip
    return out.to(scores.dtype), state, info


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
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """As :func:`reference.vjp`."""
    work = _work_dtype(scores)
    r, g = _plain(scores, work), _plain(grad_out, work)
    v = (r if values is None else _plain(values, work)) if gated else None
    k, hardness = _plain(k, torch.float64), _plain(hardness, torch.float64)
    state, info = state.detach().contiguous(), info.contiguous()
    cotangent = None if grad_state is None else _plain(grad_state, torch.float64)
    dscores = torch.empty_like(r)
    dvalues = torch.empty_like(r) if values is not None else None
    dk, dhardness = torch.empty_like(k), torch.empty_like(hardness)
    _call(
        "vjp", work, *map(_pointer, (r, v, g, dscores, dvalues)), *_sizes(r),
        *map(_pointer, (k, hardness)), ctypes.c_int(fixed),
        *map(_pointer, (state, info, cotangent, dk, dhardness)),
    )  # fmt: skip
    if dvalues is not None and values is not None:
        dvalues = dvalues.to(values.dtype)
    return dscores.to(scores.dtype), dvalues, dk, dhardness
