"""LaPrune: differentiable top-k masks with exact mass and controlled hardness.

>>> import torch, laprune
>>> laprune.soft_topk(torch.tensor([3.0, 1.0, 2.0, 0.0]), k=2, gamma=0.8)
tensor([0.9952, 0.1065, 0.8935, 0.0048])
"""

import importlib
from typing import Any

from . import losses, nn, schedules
from .backends import Status
from .diagnostics import Diagnostics, diagnostics
from .functional import Solution, gated_topk, hard_topk, lapsum_topk, soft_topk, solve
from .joint import global_topk

__version__ = "0.1.0"

__all__ = [
    "Diagnostics",
    "Solution",
    "Status",
    "diagnostics",
    "gated_topk",
    "global_topk",
    "hard_topk",
    "lapsum_topk",
    "losses",
    "nn",
    "schedules",
    "soft_topk",
    "solve",
]

_ON_DEMAND = ("baselines", "callbacks", "distributed", "prune", "sae", "select", "theory")


def __getattr__(name: str) -> Any:
    """Parts that import more than most users need: loaded when they are first named."""
    if name in _ON_DEMAND:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ON_DEMAND])
