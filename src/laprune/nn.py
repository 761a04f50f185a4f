"""The operator as a module."""

from __future__ import annotations

from torch import Tensor

from ._arguments import check_mode
from ._gamma import HasGamma
from .functional import Mode, Number, hard_topk, soft_topk


class SoftTopK(HasGamma):
    """A soft top-k mask over scores while training, the hard one in evaluation.

    >>> import torch
    >>> layer = SoftTopK(k=2, gamma=0.8)
    >>> layer(torch.tensor([3.0, 1.0, 2.0, 0.0]))
    tensor([0.9952, 0.1065, 0.8935, 0.0048])
    >>> layer.eval()(torch.tensor([3.0, 1.0, 2.0, 0.0]))
    tensor([1., 0., 1., 0.])

    Args:
        k: the mass of each row, as in :func:`laprune.soft_topk`.
        gamma: the initial hardness. It is a buffer: saved with the model, and changing it with
            :meth:`set_gamma` (or a :class:`laprune.schedules.GammaScheduler`) recompiles nothing.
        dim: the dimension to select along.
        mode: ``"soft"`` or ``"ste"``, as in :func:`laprune.soft_topk`.
        hard_eval: whether evaluation uses the hard mask.
    """

    gamma: Tensor

    def __init__(
        self,
        k: Number,
        gamma: float = 0.9,
        dim: int = -1,
        mode: Mode = "soft",
        hard_eval: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(k, Tensor) and not k >= 0:
            raise ValueError(f"k must not be negative, got {k}")
        check_mode(mode)
        self.k, self.dim, self.mode, self.hard_eval = k, dim, mode, hard_eval
        self._start(gamma)

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.hard_eval and not self.training:
            return hard_topk(scores, self.k, dim=self.dim, mask=mask)
        return soft_topk(scores, self.k, self.gamma, dim=self.dim, mask=mask, mode=self.mode)

    def extra_repr(self) -> str:
        return f"k={self.k}, gamma={self._shown_gamma()}, dim={self.dim}, mode={self.mode!r}"
