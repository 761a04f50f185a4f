"""The auxiliary loss that revives dead latents, as plain top-k autoencoders are trained with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .autoencoder import Output, SparseAutoencoder


class AuxK(NamedTuple):
    """Dead latents learn to rebuild what the others leave over (Gao et al., 2024)."""

    k: int | None = None
    """How many dead latents a sample may use; half of d if None."""
    weight: float = 1 / 32
    """The weight of the loss beside the reconstruction's."""
    dead_after: int = 10_000_000
    """A latent is dead when it has been silent over this many samples."""

    def loss(self, sae: SparseAutoencoder, x: Tensor, out: Output, silent: Tensor) -> Tensor:
        """The share of the residual that dead latents leave, of each copy; 0 if none is dead.

        Args:
            silent: samples since each latent last fired, (..., m).
        """
        dead = silent >= self.dead_after
        k = min(sae.d // 2 if self.k is None else self.k, sae.m)
        u = out.scores.masked_fill(~dead[..., None, :], -torch.inf)
        values, indices = u.topk(k, dim=-1, sorted=False)
        codes = torch.zeros_like(u).scatter(-1, indices, values.relu())
        residual = (x - out.reconstruction).detach()
        rest = residual - codes @ sae.decoder
        share = rest.square().mean((-2, -1)) / residual.square().mean((-2, -1)).clamp(min=1e-12)
        return torch.where(dead.any(-1), share, 0.0)


@torch.no_grad()
def silence(silent: Tensor, sae: SparseAutoencoder, out: Output) -> Tensor:
    """Samples since each latent last fired, brought up to date with a batch.

    What counts is the deployed activation: under a soft mask every latent passes something.
    """
    soft = getattr(sae.activation, "mode", None) == "soft"
    codes = sae.activation.deploy(out.scores) if soft else out.codes  # type: ignore[operator]
    fired = (codes != 0).any(-2)
    return torch.where(fired, 0, silent + codes.shape[-2])
