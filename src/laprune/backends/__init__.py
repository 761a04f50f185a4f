"""Backends: each is one file with the same two functions, ``solve`` and ``vjp``.

``reference`` is the mathematics in plain torch and serves every device; ``cpu`` is native code,
``cuda`` Triton. The device of the scores decides; :func:`use` overrides that for tests and
comparisons.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

from torch import Tensor

from . import cpu, cuda, reference
from ._contract import INFO_SIZE, STATE_SIZE, Status

__all__ = ["INFO_SIZE", "STATE_SIZE", "Status", "pick", "reference", "use"]

_forced: list[ModuleType] = []


def pick(scores: Tensor) -> ModuleType:
    """The backend that serves these scores."""
    if _forced:
        return _forced[-1]
    # A device's name takes longer to ask for than whether it is one of these.
    if cuda.serves(scores):
        return cuda
    return cpu if cpu.serves(scores) else reference


@contextlib.contextmanager
def use(backend: ModuleType) -> Iterator[None]:
    """Send every call to one backend inside the block."""
    _forced.append(backend)
    try:
        yield
    finally:
        _forced.pop()
