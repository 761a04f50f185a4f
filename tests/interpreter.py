"""Triton's interpreter, quicker than it is, and with the programs of a team side by side.

It runs programs one after another, so those of a team would wait for each other for ever; and it
adds up one number at a time what Triton has no function of its own for.
"""

from __future__ import annotations

import functools
import multiprocessing
import types
import warnings
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from laprune.backends import cuda


def install() -> None:
    """For all kernels of this process."""
    interpreter.ReduceOps.generic_reduce = _reduce
    module = cuda.kernels()
    assert module is not None
    names = ("solve_rows", "solve_long", "vjp")
    together = types.SimpleNamespace(**{x: SideBySide(getattr(module, x)) for x in names})
    cuda.kernels = functools.cache(lambda: together)  # type: ignore[assignment]


def _reduce(self: Any, inputs: Any) -> list[Any]:
    """As generic_reduce, for all numbers beside the axis at once, and half of them with the other
    half, again and again, as the threads of a GPU do: one after another rounds more."""
    inputs, axis = self.unravel(inputs, self.axis)
    kinds = [x.dtype for x in inputs]
    found = [np.moveaxis(x.handle.data, axis, 0) for x in inputs]
    while (half := len(found[0]) // 2) > 0:  # lengths are powers of two
        sides = (x[part] for part in (slice(half), slice(half, None)) for x in found)
        pairs = zip(sides, kinds * 2, strict=True)
        total = self.combine_fn.fn(*(self.to_tensor(np.ascontiguousarray(x), t) for x, t in pairs))
        found = [x.handle.data for x in (total if isinstance(total, tuple) else (total,))]
    found = [np.expand_dims(x[0], axis) if self.keep_dims else x[0] for x in found]
    return [self.to_tensor(x if x.ndim else x.item(), t) for x, t in zip(found, kinds, strict=True)]


class SideBySide:
    """A kernel; where its programs are a team, they are processes that share their tensors."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.fn = kernel, kernel.fn

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        names = self.kernel.arg_names

        def launch(*args: Any) -> None:
            if "TEAM" in names and args[names.index("TEAM")]:
                self._together(grid[0], args)
            else:
                self.kernel[grid](*args)

        return launch

    def _together(self, programs: int, args: tuple[Any, ...]) -> None:
        for x in args:
            if isinstance(x, torch.Tensor):
                x.share_memory_()
        context = multiprocessing.get_context("fork")
        running = [context.Process(target=self._one, args=(i, args)) for i in range(programs)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are idle
            for process in running:
                process.start()
        while running:
            wait([process.sentinel for process in running])
            ended = [process for process in running if process.exitcode is not None]
            running = [process for process in running if process.exitcode is None]
            if any(process.exitcode for process in ended):
                for process in running:  # which would wait for it
                    process.kill()
                raise RuntimeError("a program of a team failed")

    def _one(self, i: int, args: tuple[Any, ...]) -> None:
        builder = interpreter.interpreter_builder
        builder.set_grid_idx = lambda *_: setattr(builder, "grid_idx", (i, 0, 0))
        self.kernel[1,](*args)
