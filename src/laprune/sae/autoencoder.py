"""The sparse autoencoder: a wide encoder, a top-k activation, unit-norm decoder directions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .activations import BatchTopKActivation, JumpReLU, Mode, PostAct, TopKActivation


class Output(NamedTuple):
    """What an autoencoder makes of its input."""

    reconstruction: Tensor
    """The input rebuilt from its codes, shaped as the input."""
    codes: Tensor
    """Latents times their mask, (..., m)."""
    scores: Tensor
    """Latents before the mask, (..., m)."""


class SparseCodes(NamedTuple):
    """The k latents of each sample that evaluation keeps, in no order."""

    values: Tensor
    """(..., k)"""
    indices: Tensor
    """(..., k), between 0 and m - 1."""


class SparseAutoencoder(torch.nn.Module):
    """Rebuild activations from k of m latents.

    ``u = E (x - b) + c``, ``h = p(u) * u``, ``y = D h + b`` with the mask p of mass k: soft while
    training, by default, and hard top-k in evaluation. The directions in D start as Gaussian
    vectors of unit norm and E as their transpose; from then on both are free.

    >>> sae = SparseAutoencoder(d=8, m=32, k=4)
    >>> out = sae.eval()(torch.randn(5, 8))
    >>> out.reconstruction.shape, out.codes.shape, (out.codes != 0).sum(-1).tolist()
    (torch.Size([5, 8]), torch.Size([5, 32]), [4, 4, 4, 4, 4])

    Args:
        d: the width of the activations.
        m: how many latents.
        k: how many latents a sample keeps.
        gamma, mode, postact: as in :class:`TopKActivation`.
        batch: whether the budget is one of the whole batch, see :class:`BatchTopKActivation`.
        activation: any module from u to h instead of these; k to postact are then not used.
        copies: train that many autoencoders side by side: parameters have this leading dimension,
            inputs are (copies, batch, d), and no copy touches another.
        generator: draws the directions; torch's own if None.
    """

    def __init__(
        self,
        d: int,
        m: int,
        k: float,
        gamma: float = 0.9,
        *,
        mode: Mode = "soft",
        postact: PostAct | None = None,
        batch: bool = False,
        activation: torch.nn.Module | None = None,
        copies: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if d < 1 or m < 1:
            raise ValueError(f"d and m must be at least 1, got d = {d} and m = {m}")
        if not 0 < k <= m:
            raise ValueError(f"k must lie in (0, m = {m}], got {k}")
        self.d, self.m, self.k = d, m, k
        lead = () if copies is None else (copies,)
        directions = torch.randn(*lead, m, d, generator=generator)
        directions /= directions.norm(dim=-1, keepdim=True)
        self.encoder = torch.nn.Parameter(directions.clone())
        self.encoder_bias = torch.nn.Parameter(torch.zeros(*lead, m))
        self.decoder = torch.nn.Parameter(directions)
        """(..., m, d): a latent's direction is a row."""
        self.pre_bias = torch.nn.Parameter(torch.zeros(*lead, d))
        if activation is None and batch:
            activation = BatchTopKActivation(k, gamma, mode, postact, copies=copies)
        if activation is None:
            activation = TopKActivation(k, gamma, mode, postact)
        self.activation = activation

    def scores(self, x: Tensor) -> Tensor:
        """Latents before the mask."""
        bias = self.encoder_bias - (self.encoder @ self.pre_bias[..., None]).squeeze(-1)
        if bias.dim() == 1:
            return torch.nn.functional.linear(x, self.encoder, bias)
        return torch.baddbmm(bias[:, None], x, self.encoder.mT)

    def encode(self, x: Tensor) -> Tensor:
        """Latents times their mask."""
        return self.activation(self.scores(x))

    def decode(self, codes: Tensor) -> Tensor:
        """Codes to activations."""
        if self.pre_bias.dim() == 1:
            return torch.nn.functional.linear(codes, self.decoder.mT, self.pre_bias)
        return torch.baddbmm(self.pre_bias[:, None], codes, self.decoder)

    def forward(self, x: Tensor) -> Output:
        u = self.scores(x)
        if not self.training and (codes := self._sparse(u)) is not None:
            h = torch.zeros_like(u).scatter(-1, codes.indices, codes.values)
            return Output(self.decode_sparse(codes), h, u)
        h = self.activation(u)
        return Output(self.decode(h), h, u)

    def encode_sparse(self, x: Tensor) -> SparseCodes:
        """The k latents that evaluation keeps of each sample."""
        codes = self._sparse(self.scores(x))
        if codes is None:
            raise ValueError("sparse codes need the same whole number of latents in every sample")
        return codes

    def _sparse(self, u: Tensor) -> SparseCodes | None:
        """Evaluation's codes where every sample keeps as many latents."""
        if not isinstance(self.activation, TopKActivation):
            return None
        codes = self.activation.sparse(u)
        return None if codes is None else SparseCodes(*codes)

    def decode_sparse(self, codes: SparseCodes) -> Tensor:
        """As :meth:`decode`, reading only the k directions of each sample."""
        values, indices = codes.values.to(self.decoder.dtype), codes.indices
        if self.decoder.dim() == 3:  # one table of directions, copy after copy
            shift = self.m * torch.arange(len(self.decoder), device=indices.device)
            indices = indices + shift.view(-1, *[1] * (indices.dim() - 1))
        rows = torch.nn.functional.embedding_bag(
            indices.reshape(-1, indices.shape[-1]),
            self.decoder.reshape(-1, self.d),
            per_sample_weights=values.reshape(-1, values.shape[-1]),
            mode="sum",
        )
        bias = self.pre_bias if self.pre_bias.dim() == 1 else self.pre_bias[:, None]
        return rows.reshape(*values.shape[:-1], self.d) + bias

    @torch.no_grad()
    def normalise_decoder(self) -> None:
        """Bring every direction back to unit norm; call it after each step of the optimiser."""
        self.decoder.div_(self.decoder.norm(dim=-1, keepdim=True).clamp(min=1e-12))

    @torch.no_grad()
    def project_gradient(self) -> None:
        """Take from the decoder's gradient what would only change the directions' norms."""
        if self.decoder.grad is not None:
            along = (self.decoder.grad * self.decoder).sum(-1, keepdim=True)
            self.decoder.grad.sub_(along * self.decoder)

    def jump_relu(self) -> SparseAutoencoder:
        """A BatchTopK autoencoder as it is deployed: its weights behind a :class:`JumpReLU`."""
        if not isinstance(self.activation, BatchTopKActivation) or self.decoder.dim() == 3:
            raise TypeError("only a single BatchTopK autoencoder has a learned threshold")
        threshold = self.activation.threshold.expand(self.m).clone()
        other = SparseAutoencoder(self.d, self.m, self.k, activation=JumpReLU(threshold))
        for name, parameter in self.named_parameters():
            getattr(other, name).data = parameter.detach().clone()
        return other.train(self.training)

    def extra_repr(self) -> str:
        return f"d={self.d}, m={self.m}, k={self.k}"
