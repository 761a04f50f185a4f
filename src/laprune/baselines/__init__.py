"""Other soft top-k operators behind one signature, `(scores, k, softness) -> mask`.

>>> import torch
>>> from laprune import baselines
>>> baselines.get("lapsum")(torch.tensor([3.0, 1.0, 0.5, -1.0]), k=2, softness=0.5)
tensor([0.9944, 0.6921, 0.2987, 0.0149])
"""

from laprune.baselines.registry import REGISTRY, Baseline, available, get, names
from laprune.baselines.smooth_loss import smooth_topk_loss

__all__ = ["REGISTRY", "Baseline", "available", "get", "names", "smooth_topk_loss"]
