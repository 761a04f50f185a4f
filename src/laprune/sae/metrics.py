"""How good an autoencoder is: what it leaves unexplained, how sparse, how much of it is dead."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from laprune.diagnostics import diagnostics

from .activations import BatchTopKActivation, TopKActivation
from .autoencoder import SparseAutoencoder


class Metrics(NamedTuple):
    """An evaluation over many samples; one number per copy where there are copies."""

    fvu: Tensor
    """The fraction of variance unexplained, as deployed (hard top-k, or JumpReLU)."""
    l0: Tensor
    """Non-zero latents per sample, as deployed."""
    dead: Tensor
    """The fraction of latents that are zero in every sample, as deployed."""
    mass: Tensor
    """The mass of the training mask per sample; NaN without a top-k activation."""
    gamma: Tensor
    """The realised hardness of the training mask; NaN without a top-k activation."""


def fvu(x: Tensor, reconstruction: Tensor) -> Tensor:
    """Squared error over the squared distance to the mean sample; samples along dimension -2.

    >>> x = torch.tensor([[0.0, 0.0], [2.0, 2.0]])
    >>> fvu(x, x), fvu(x, torch.ones(2, 2))
    (tensor(0.), tensor(1.))
    """
    error = (reconstruction - x).square().sum((-2, -1))
    return error / (x - x.mean(-2, keepdim=True)).square().sum((-2, -1))


@torch.no_grad()
def evaluate(sae: SparseAutoencoder, x: Tensor, batch_size: int = 8192) -> Metrics:
    """Measure an autoencoder as it is deployed, whatever mode it trains in.

    >>> sae = SparseAutoencoder(d=8, m=32, k=4, gamma=0.8)
    >>> measured = evaluate(sae, torch.randn(100, 8))
    >>> measured.l0.item(), round(measured.mass.item(), 3), round(measured.gamma.item(), 3)
    (4.0, 4.0, 0.8)

    Args:
        x: samples (n, d), or (copies, n, d).
        batch_size: samples at a time. The training mask is measured on the first batch.
    """
    *copies, _, d = sae.decoder.shape
    if x.dim() < 2 or [*x.shape[:-2], x.shape[-1]] != [*copies, d] or x.numel() == 0:
        expected = ", ".join(map(str, (*copies, "n", d)))
        raise ValueError(f"samples must have the shape ({expected}), got {tuple(x.shape)}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    training = sae.training
    try:
        return _measured(sae.eval(), x, batch_size)
    finally:
        sae.train(training)


def _measured(sae: SparseAutoencoder, x: Tensor, batch_size: int) -> Metrics:
    mean = x.mean(-2, keepdim=True)
    error, spread, count = (x.new_zeros(x.shape[:-2], dtype=torch.float64) for _ in range(3))
    fired = torch.zeros(*x.shape[:-2], sae.m, dtype=torch.bool, device=x.device)
    mass = gamma = torch.full_like(error, torch.nan)
    for i, part in enumerate(x.split(batch_size, dim=-2)):
        out = sae(part)
        error += (out.reconstruction - part).double().square().sum((-2, -1))
        spread += (part - mean).double().square().sum((-2, -1))
        active = out.codes != 0
        count += active.sum((-2, -1))
        fired |= active.any(-2)
        if i == 0 and isinstance(sae.activation, TopKActivation):
            mass, gamma = _training_mask(sae.activation, out.scores)
    n = x.shape[-2]
    return Metrics(error / spread, count / n, 1 - fired.double().mean(-1), mass, gamma)


def _training_mask(activation: TopKActivation, u: Tensor) -> tuple[Tensor, Tensor]:
    """Mass per sample and hardness of the mask that training would put on these scores."""
    p = activation.mask(u)
    if isinstance(activation, BatchTopKActivation):
        measured = diagnostics(p.flatten(-2))
        return measured.mass / u.shape[-2], measured.gamma
    measured = diagnostics(p)
    return measured.mass.mean(-1), measured.gamma.mean(-1)
