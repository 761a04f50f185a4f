"""Modules that have a hardness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class HasGamma(torch.nn.Module):
    """A hardness as a buffer: saved with the module, moved by a scheduler, changed in place.

    It is float64 and stays so: ``module.bfloat16()`` would make 0.999 a 1.
    """

    gamma: Tensor | None

    def _start(self, gamma: float | None, persistent: bool = True) -> None:
        here = None if gamma is None else torch.empty((), dtype=torch.float64)
        self.register_buffer("gamma", here, persistent=persistent)
        if gamma is not None:
            self.set_gamma(gamma)

    def set_gamma(self, gamma: float) -> None:
        """Change the hardness in place."""
        if self.gamma is None:
            raise ValueError(f"this {type(self).__name__} was made without a gamma")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
        self.gamma.fill_(gamma)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = self.gamma
        super()._apply(fn, recurse)
        if exact is not None and self.gamma is not None and self.gamma.dtype != exact.dtype:
            self.gamma = exact.to(self.gamma.device)
        return self

    def _shown_gamma(self) -> str:
        """For the module's repr; a meta tensor has no value."""
        return "?" if self.gamma is None or self.gamma.is_meta else f"{self.gamma.item():g}"
