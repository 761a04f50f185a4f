"""LaPrune: differentiable top-k masks with exact mass and controlled hardness.

>>> import torch, laprune
>>> laprune.soft_topk(torch.tensor([3.0, 1.0, 2.0, 0.0]), k=2, gamma=0.8)
tensor([0.9952, 0.1065, 0.8935, 0.0048])
"""

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
