"""Sparse autoencoders of several seeds trained side by side, under every method of the studies.

Copies share the activations and nothing else: each seed has its own start and order of samples,
and a seed trained among others gives what it gives alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import laprune
from laprune import baselines
from laprune.sae import AuxK, BatchTopKActivation, SparseAutoencoder, TopKActivation, Trainer
from laprune.sae.activations import Mode, PostAct
from laprune.schedules import Schedule, linear


class Method(NamedTuple):
    """How latents are masked in training. Softness is gamma, t or tau, whichever there is."""

    operator: str
    """laprune, lapsum, dftopk, hard_ste, topk or batchtopk."""
    softness: float | None = None
    """None if there is none, or if it is to be tuned."""
    annealed: bool = False
    """Whether gamma grows from 0, over the first four fifths of the epochs."""
    mode: Mode = "soft"
    """Of laprune: soft or ste."""
    relu: bool = False
    """Whether negative latents are dropped."""
    aux: bool = False
    """Whether dead latents are revived by the auxiliary loss."""
    batch: bool = False
    """Of laprune: whether the budget is one of the whole batch."""

    def gamma(self, epochs: int) -> Schedule | None:
        if self.operator != "laprune" or self.softness is None or not self.annealed:
            return None
        return linear(0.0, self.softness, max(1, math.floor(0.8 * (epochs - 1))) + 1)


ANNEALED = Method("laprune", 0.9, annealed=True)
FIXED = Method("laprune", 0.9)
LAPSUM = Method("lapsum", 1.0)
HARD = Method("hard_ste")
DFTOPK = Method("dftopk", 1.0)

LABELS = {
    ANNEALED: "LaPrune, gamma 0 → 0.9",
    FIXED: "LaPrune, gamma = 0.9",
    LAPSUM: "LapSum, t = 1",
    HARD: "hard top-k (STE)",
    DFTOPK: "DFTopK",
}
"""The paper's five methods."""


class _Masked(TopKActivation):
    """u times the mask of another operator; hard top-k in evaluation like the rest."""

    def __init__(self, k: float, operator: str, softness: float | None) -> None:
        super().__init__(k)
        self.operator, self.softness = operator, softness

    def mask(self, u: Tensor) -> Tensor:
        if self.operator == "lapsum":
            assert self.softness is not None
            return laprune.lapsum_topk(u, self.k, self.softness)
        return baselines.get(self.operator)(u, self.k, self.softness)

    def _train(self, u: Tensor) -> Tensor:
        return u * self.mask(u)


def activation(method: Method, k: float, copies: int) -> TopKActivation:
    """The method as a module."""
    operator, softness = method.operator, method.softness
    postact: PostAct | None = "relu" if method.relu else None
    if operator == "topk":
        return TopKActivation(k, mode="hard", postact=postact)
    if operator == "batchtopk":
        return BatchTopKActivation(k, mode="hard", postact=postact, copies=copies)
    if operator != "laprune":
        return _Masked(k, operator, softness)
    assert softness is not None
    if method.batch:
        return BatchTopKActivation(k, softness, method.mode, postact, copies=copies)
    return TopKActivation(k, softness, method.mode, postact)


class Recipe(NamedTuple):
    """How long and in what steps."""

    epochs: int
    batch: int
    learning_rate: float = 1e-3
    dead_after: int = 50_000
    """Samples of silence after which the auxiliary loss takes a latent for dead."""


def train(
    x: Tensor, method: Method, seeds: Sequence[int], m: int, k: float, recipe: Recipe
) -> SparseAutoencoder:
    """One autoencoder per seed on activations (n, d), as the copies of one module."""
    n, d = x.shape
    sae = SparseAutoencoder(
        d, m, k, activation=activation(method, k, len(seeds)), copies=len(seeds)
    )
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    with torch.no_grad():
        for i, g in enumerate(draws):
            sae.decoder[i] = torch.randn(m, d, generator=g)
        sae.normalise_decoder()
        sae.encoder.copy_(sae.decoder)
    trainer = Trainer(
        sae.to(x.device),
        learning_rate=recipe.learning_rate,
        schedule=method.gamma(recipe.epochs),
        aux=AuxK(dead_after=recipe.dead_after) if method.aux else None,
    )
    step = _Step(trainer, x)
    for epoch in range(recipe.epochs):
        if epoch and trainer.scheduler is not None:
            trainer.scheduler.step()
        for rows in orders(n, recipe.batch, draws, x.device):
            step(rows)
    return sae.eval()


class _Step:
    """A trainer's step on samples of x by number. On a GPU, once it is warm, batches of the first
    one's size replay a CUDA graph: what Python takes to launch a step is more than the step."""

    WARM_UP = 3

    def __init__(self, trainer: Trainer, x: Tensor) -> None:
        self.trainer, self.x, self.seen = trainer, x, 0
        self.rows: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream(x.device) if x.is_cuda else None
        for group in trainer.optimiser.param_groups:
            group["capturable"] = x.is_cuda

    def __call__(self, rows: Tensor) -> None:
        if self.stream is None:
            self.trainer.step(self.x[rows])
            return
        self.seen += 1
        if self.rows is None:
            self.rows = rows.clone()
        if rows.shape != self.rows.shape or self.seen <= self.WARM_UP:
            usual = torch.cuda.current_stream(self.x.device)
            self.stream.wait_stream(usual)
            with torch.cuda.stream(self.stream):
                self.trainer.step(self.x[rows])
            usual.wait_stream(self.stream)
            return
        self.rows.copy_(rows)
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.trainer.step(self.x[self.rows])
        self.graph.replay()


def orders(
    n: int, batch: int, draws: Sequence[torch.Generator], device: torch.device
) -> Iterator[Tensor]:
    """An epoch's batches of sample numbers, (seeds, batch), in each seed's own order."""
    order = torch.stack([torch.randperm(n, generator=g) for g in draws]).to(device)
    yield from order.split(batch, dim=1)


@contextlib.contextmanager
def matmul(precision: str) -> Iterator[None]:
    """Matrix products in plain float32, or through TF32 where the hardware has it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision({"float32": "highest", "tf32": "high"}[precision])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
