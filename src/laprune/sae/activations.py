"""Activations that keep k latents: of every sample, or k a sample over the whole batch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from laprune._gamma import HasGamma
from laprune.functional import gated_topk, hard_topk, soft_topk

Mode = Literal["soft", "ste", "hard"]
PostAct = Literal["relu"]


class TopKActivation(HasGamma):
    """``u`` times a top-k mask of mass k over the last dimension; the hard one in evaluation.

    >>> activation = TopKActivation(k=2, gamma=0.8)
    >>> activation(torch.tensor([3.0, 1.0, 2.0, 0.0]))
    tensor([2.9855, 0.1065, 1.7869, 0.0000])
    >>> activation.eval()(torch.tensor([3.0, 1.0, 2.0, 0.0]))
    tensor([3., 0., 2., 0.])

    Args:
        k: the mass of each row, fractional if you like.
        gamma: the hardness while training, a buffer: change it with :meth:`set_gamma` or a
            :class:`laprune.schedules.GammaScheduler`.
        mode: how training masks. ``"soft"``: the soft mask, never stored; ``"ste"``: the hard mask
            forward, the soft mask's gradient backward; ``"hard"``: the usual top-k, where only what
            is selected learns.
        postact: ``"relu"`` to drop what is negative; latents are still ranked by ``u`` itself.

    In mode soft every latent passes something, so that none looks dead to those who count
    non-zeros; count on what evaluation gives, or train in mode ste.
    """

    gamma: Tensor

    def __init__(
        self, k: float, gamma: float = 0.9, mode: Mode = "soft", postact: PostAct | None = None
    ) -> None:
        super().__init__()
        if not k > 0:
            raise ValueError(f"k must be positive, got {k}")
        if mode not in ("soft", "ste", "hard"):
            raise ValueError(f"mode must be 'soft', 'ste' or 'hard', got {mode!r}")
        if postact not in (None, "relu"):
            raise ValueError(f"postact must be None or 'relu', got {postact!r}")
        self.k, self.mode, self.postact = k, mode, postact
        self._start(gamma)

    def forward(self, u: Tensor) -> Tensor:
        return self._train(u) if self.training else self.deploy(u)

    def deploy(self, u: Tensor) -> Tensor:
        """What evaluation gives, whatever the mode."""
        return self._hard(u, self.k)

    def sparse(self, u: Tensor) -> tuple[Tensor, Tensor] | None:
        """Values and indices of what evaluation keeps of each row; None if k is not whole."""
        if self.k != int(self.k):
            return None
        values, indices = _largest(u, self.k)
        return self._rectified(values), indices

    def mask(self, u: Tensor) -> Tensor:
        """The mask that training puts on u, to look at: it is not needed to train."""
        rows, k = self._rows(u)
        return soft_topk(rows, k, self.gamma if self.mode == "soft" else 1.0).reshape(u.shape)

    def _rows(self, u: Tensor) -> tuple[Tensor, float]:
        """What is selected from, and the mass of each row of it."""
        return u, self.k

    def _train(self, u: Tensor) -> Tensor:
        """u times the training mask."""
        rows, k = self._rows(u)
        return self._masked(rows, k).reshape(u.shape)

    def _masked(self, rows: Tensor, k: float) -> Tensor:
        if self.mode == "hard":
            return self._hard(rows, k)
        values = self._rectified(rows)
        scores = None if values is rows else rows
        return gated_topk(values, k, self.gamma, scores=scores, mode=self.mode)

    def _hard(self, rows: Tensor, k: float) -> Tensor:
        if k != int(k):
            return self._rectified(rows) * hard_topk(rows, k)
        values, indices = _largest(rows, k)
        return torch.zeros_like(rows).scatter(-1, indices, self._rectified(values))

    def _rectified(self, x: Tensor) -> Tensor:
        return x if self.postact is None else x.relu()

    def extra_repr(self) -> str:
        return (
            f"k={self.k}, gamma={self._shown_gamma()}, mode={self.mode!r}, postact={self.postact!r}"
        )


def _largest(rows: Tensor, k: float) -> tuple[Tensor, Tensor]:
    """The values and indices of the k largest of each row, in any order."""
    if k > rows.shape[-1]:
        raise ValueError(f"k must lie in [0, {rows.shape[-1]}], got {k}")
    found = rows.topk(int(k), dim=-1, sorted=False)
    return found.values, found.indices


class BatchTopKActivation(TopKActivation):
    """One budget over the batch: ``batch * k`` latents, wherever in the batch they are largest.

    A batch is one row of ``batch * m`` scores, so that a sample takes as many latents as it needs
    and k on average. In evaluation, where a sample must not depend on its neighbours, what exceeds
    a threshold passes: the running mean of the smallest positive activation that training selected.

    >>> activation = BatchTopKActivation(k=1.5, mode="hard")
    >>> u = torch.tensor([[3.0, 1.0, 2.5, 0.0], [0.5, 0.0, 0.2, -1.0]])
    >>> activation(u)
    tensor([[3.0000, 1.0000, 2.5000, 0.0000],
            [0.0000, 0.0000, 0.0000, 0.0000]])
    >>> activation.threshold
    tensor(1.)
    >>> activation.eval()(torch.tensor([0.5, 1.5, 4.0, 0.0]))
    tensor([0.0000, 1.5000, 4.0000, 0.0000])

    Args:
        k: latents per sample on average, fractional if you like; the budget of a batch in modes ste
            and hard is rounded to whole latents.
        gamma, mode: as in :class:`TopKActivation`.
        postact: ``"relu"`` as practised; with None negative latents may be selected in training,
            but the threshold stays positive.
        momentum: how slowly the threshold forgets; it is a plain mean until ``1/(1 - momentum)``
            batches have gone by.
        copies: for inputs (copies, batch, m), as many budgets and thresholds.
    """

    threshold: Tensor
    batches: Tensor

    def __init__(
        self,
        k: float,
        gamma: float = 0.9,
        mode: Mode = "soft",
        postact: PostAct | None = "relu",
        momentum: float = 0.99,
        copies: int | None = None,
    ) -> None:
        super().__init__(k, gamma, mode, postact)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        self.momentum, self.copies = momentum, copies
        shape = () if copies is None else (copies,)
        self.register_buffer("threshold", torch.zeros(shape))
        self.register_buffer("batches", torch.zeros(shape))

    def deploy(self, u: Tensor) -> Tensor:
        threshold = self.threshold if self.copies is None else self.threshold[:, None, None]
        return jump_relu(u, threshold)

    def sparse(self, u: Tensor) -> None:
        """None: how many latents a sample keeps is not fixed."""

    def _rows(self, u: Tensor) -> tuple[Tensor, float]:
        rows = u.reshape(1 if self.copies is None else self.copies, -1)
        k = self.k * rows.shape[-1] / u.shape[-1]
        return rows, k if self.mode == "soft" else max(1, round(k))

    def _train(self, u: Tensor) -> Tensor:
        if u.numel() == 0:
            return self._rectified(u)
        rows, k = self._rows(u.detach())
        self._learn(rows, max(1, round(k)))
        return super()._train(u)

    @torch.no_grad()
    def _learn(self, rows: Tensor, k: int) -> None:
        """Move the threshold towards the smallest positive activation among the k largest."""
        chosen = rows.topk(k, dim=-1, sorted=False).values
        smallest = chosen.masked_fill(chosen <= 0, torch.inf).amin(-1).reshape(self.threshold.shape)
        found = smallest.isfinite()
        self.batches += found
        weight = (1 / self.batches.clamp(min=1)).clamp(min=1 - self.momentum)
        moved = self.threshold + weight * (smallest.to(self.threshold.dtype) - self.threshold)
        self.threshold.copy_(torch.where(found, moved, self.threshold))


class JumpReLU(torch.nn.Module):
    """What exceeds its latent's threshold passes, the rest is zero: how BatchTopK is deployed.

    >>> JumpReLU(torch.tensor([1.0, 2.0]))(torch.tensor([1.5, 1.5]))
    tensor([1.5000, 0.0000])
    """

    threshold: Tensor

    def __init__(self, threshold: Tensor) -> None:
        super().__init__()
        self.register_buffer("threshold", threshold)

    def forward(self, u: Tensor) -> Tensor:
        return jump_relu(u, self.threshold)


def jump_relu(u: Tensor, threshold: Tensor) -> Tensor:
    """``u`` where it exceeds the threshold, else 0."""
    return torch.where(u > threshold, u, 0.0)
