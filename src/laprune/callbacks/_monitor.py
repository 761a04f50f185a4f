"""What the masks of a model are like while it trains."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from laprune.diagnostics import Diagnostics, diagnostics
from laprune.nn import SoftTopK


class MaskMonitor:
    """Measures the masks of every :class:`laprune.nn.SoftTopK` of a model, when asked to.

    >>> layer = SoftTopK(k=2, gamma=0.8)
    >>> monitor = MaskMonitor(layer)
    >>> monitor.armed = True
    >>> _ = layer(torch.tensor([3.0, 1.0, 2.0, 0.0]))
    >>> {name: round(value, 4) for name, value in monitor.take().items()}
    {'mass': 2.0, 'gamma': 0.8}

    A forward pass while ``armed`` is measured, with no synchronisation until :meth:`take`; others
    cost nothing. :meth:`close` removes the hooks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.armed = False
        self._found: dict[str, Diagnostics] = {}
        self._hooks = [
            module.register_forward_hook(functools.partial(self._measure, name), with_kwargs=True)
            for name, module in model.named_modules()
            if isinstance(module, SoftTopK)
        ]

    def _measure(
        self, name: str, layer: SoftTopK, args: tuple[Any, ...], kwargs: dict[str, Any], p: Tensor
    ) -> None:
        if not self.armed:
            return
        given = dict(zip(("scores", "mask"), args, strict=False)) | kwargs
        eligible = given["scores"] > -torch.inf
        if given.get("mask") is not None:
            eligible = eligible & given["mask"]
        self._found[name] = diagnostics(p, dim=layer.dim, eligible=eligible)

    def take(self) -> dict[str, float]:
        """Mean mass and realised gamma over the rows of the last measured masks, by layer."""
        found, self._found = self._found, {}
        return {
            f"{name}/{what}" if name else what: float(value.mean())
            for name, d in found.items()
            for what, value in (("mass", d.mass), ("gamma", d.gamma))
        }

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def named(gamma: float, measured: dict[str, float]) -> dict[str, float]:
    """What is logged: the hardness in force and the masks as they are.

    >>> named(0.5, {"gate.topk/mass": 2.0})
    {'laprune/gamma': 0.5, 'laprune/gate.topk/mass': 2.0}
    """
    # A bare SoftTopK has no name, and its gamma is not the one in force.
    own = {
        f"laprune/{'realised_gamma' if name == 'gamma' else name}": x
        for name, x in measured.items()
    }
    return {"laprune/gamma": gamma, **own}
