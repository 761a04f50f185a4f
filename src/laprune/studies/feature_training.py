"""Feature selection by a learned mask: the data, the operators, and one training of all of them.

A score per feature goes through an operator, its mask multiplies the features, a linear classifier
follows. All seeds and operators train as one tensor program: scores and weights have a leading seed
and operator dimension, and what does not interact cannot influence each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import laprune
from laprune import baselines

from .tables import Floats

EPS = 1e-3
LEARNING_RATE = 1e-2


class Size(NamedTuple):
    features: int
    informative: int
    train: int
    test: int
    epochs: int


SIZES = {"full": Size(200, 10, 1500, 500, 150), "quick": Size(30, 4, 200, 100, 12)}


class Problem(NamedTuple):
    """Samples, training ones first, standardised by the training samples."""

    x: Floats
    y: NDArray[np.int64]
    informative: NDArray[np.bool_]


class Construction(NamedTuple):
    draw: Callable[[np.random.Generator, Size], tuple[Floats, NDArray[np.int64]]]
    """Samples whose first features are the informative ones."""
    about: str


def _gaussian_rule(
    rng: np.random.Generator, size: Size, flipped: float = 0.0, correlation: float = 0.0
) -> tuple[Floats, NDArray[np.int64]]:
    n, m = size.train + size.test, size.informative
    x = rng.standard_normal((n, size.features))
    shared = rng.standard_normal((n, 1))
    x[:, :m] = math.sqrt(1 - correlation) * x[:, :m] + math.sqrt(correlation) * shared
    side = x[:, :m] @ rng.standard_normal(m) > 0
    return x, (side ^ (rng.random(n) < flipped)).astype(np.int64)


def _make_classification(rng: np.random.Generator, size: Size) -> tuple[Floats, NDArray[np.int64]]:
    from sklearn.datasets import make_classification

    n = size.train + size.test
    x, y = make_classification(
        n,
        size.features,
        n_informative=size.informative,
        n_redundant=0,
        shuffle=False,
        random_state=int(rng.integers(2**31)),
    )
    order = rng.permutation(n)
    return x[order], y[order].astype(np.int64)


CONSTRUCTIONS: dict[str, Construction] = {
    "linear_rule": Construction(
        _gaussian_rule, "independent Gaussian features, the class is the sign of a Gaussian rule"
    ),
    "noisy_rule": Construction(
        lambda rng, size: _gaussian_rule(rng, size, flipped=0.1),
        "the same, with 10 % of the labels flipped",
    ),
    "correlated": Construction(
        lambda rng, size: _gaussian_rule(rng, size, correlation=0.5),
        "the same as the first, with informative features correlated by 0.5",
    ),
    "make_classification": Construction(
        _make_classification, "scikit-learn's generator, no redundant features, else its defaults"
    ),
}


def problem(construction: str, size: Size, seed: int) -> Problem:
    """The data of a seed; informative features sit anywhere among the others.

    >>> p = problem("linear_rule", SIZES["quick"], seed=0)
    >>> p.x.shape, int(p.informative.sum())
    ((300, 30), 4)
    """
    rng = np.random.default_rng(seed)
    x, y = CONSTRUCTIONS[construction].draw(rng, size)
    place = rng.permutation(size.features)
    train = x[: size.train]
    x = ((x - train.mean(0)) / train.std(0))[:, place]
    return Problem(x, y, place < size.informative)


class Method(NamedTuple):
    """An operator and its softness; an annealed one reaches that softness at the last epoch."""

    operator: str
    softness: float
    annealed: bool | Literal["geometric"] = False

    def at(self, epoch: int, epochs: int) -> float:
        """Gamma grows linearly from 0, or 1 - gamma falls geometrically from 1; so does t."""
        if not self.annealed:
            return self.softness
        done = epoch / (epochs - 1)
        if self.operator != "laprune":
            return self.softness**done
        if self.annealed == "geometric":
            return 1 - (1 - self.softness) ** done
        return self.softness * done


ANNEALED = Method("laprune", 0.9, annealed=True)
FIXED = Method("laprune", 0.9)
LAPSUM = Method("lapsum", 1.0)
HARD = Method("hard_ste", 0.0)
DFTOPK = Method("dftopk", 1.0)

LABELS = {
    ANNEALED: "LaPrune, gamma 0 → 0.9",
    FIXED: "LaPrune, gamma = 0.9",
    LAPSUM: "LapSum, t = 1",
    HARD: "hard top-k (STE)",
    DFTOPK: "DFTopK",
}
"""The paper's five methods."""


def masks(scores: Tensor, k: int, methods: Sequence[Method], epoch: int, epochs: int) -> Tensor:
    """The training masks of (seed, method, feature) scores at an epoch.

    LaPrune and LapSum take one softness per row, so all their variants are solved in one call each.
    """
    columns: list[Tensor | None] = [None] * len(methods)
    for operator in dict.fromkeys(m.operator for m in methods):
        at = [i for i, m in enumerate(methods) if m.operator == operator]
        softness = [methods[i].at(epoch, epochs) for i in at]
        rows = scores[:, at]
        if operator == "laprune":
            solved = laprune.soft_topk(rows, k, scores.new_tensor(softness, dtype=torch.float64))
            parts = solved.unbind(1)
        elif operator == "lapsum":
            solved = laprune.lapsum_topk(rows, k, scores.new_tensor(softness, dtype=torch.float64))
            parts = solved.unbind(1)
        else:
            function = baselines.get(operator)
            parts = tuple(function(rows[:, j], k, softness[j]) for j in range(len(at)))
        for i, part in zip(at, parts, strict=True):
            columns[i] = part
    return torch.stack([c for c in columns if c is not None], 1)


class _Start(NamedTuple):
    """Where a seed starts, the same for every method."""

    scores: Tensor
    weights: Tensor
    bias: Tensor


def _start(seed: int, n: int, spread: float, zero: bool) -> _Start:
    g = torch.Generator().manual_seed(seed)
    bound = 0.0 if zero else 1 / math.sqrt(n)  # torch.nn.Linear's own
    return _Start(
        spread * torch.randn(n, generator=g),
        bound * (2 * torch.rand(n, generator=g) - 1),
        bound * (2 * torch.rand(1, generator=g) - 1),
    )


def train(
    construction: str,
    methods: Sequence[Method],
    seeds: Sequence[int],
    k: int,
    *,
    size: Size = SIZES["full"],
    spread: float = 0.01,
    zero: bool = False,
    batch: int | None = None,
    device: str = "cpu",
) -> dict[tuple[Method, int], dict[str, Any]]:
    """Train every method on every seed's data, deploy the hard top-k, and say how it went.

    Args:
        spread: scores start at this times N(0, 1).
        zero: whether the classifier starts at zero, else as torch.nn.Linear does.
        batch: samples per step, in an order of each seed's own; None for all.
    """
    problems = [problem(construction, size, seed) for seed in seeds]
    x = torch.tensor(np.stack([p.x for p in problems]), dtype=torch.float32, device=device)
    y = torch.tensor(np.stack([p.y for p in problems]), dtype=torch.float32, device=device)
    starts = [_start(seed, size.features, spread, zero) for seed in seeds]
    scores, weights, bias = (
        torch.stack([s[i] for s in starts])[:, None]
        .repeat(1, len(methods), 1)
        .to(device)
        .requires_grad_()
        for i in range(3)
    )
    orders = [torch.Generator().manual_seed(seed) for seed in seeds]
    optimiser = torch.optim.Adam([scores, weights, bias], lr=LEARNING_RATE)
    inputs, labels = x[:, : size.train], y[:, : size.train]
    for epoch in range(size.epochs):
        for some_x, some_y in _batches(inputs, labels, batch, orders):
            p = masks(scores, k, methods, epoch, size.epochs)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                _logits(some_x, p * weights, bias),
                some_y[..., None].expand(-1, -1, len(methods)),
                reduction="none",
            )
            optimiser.zero_grad()
            loss.mean(1).sum().backward()
            optimiser.step()
    with torch.no_grad():
        soft = masks(scores, k, methods, size.epochs - 1, size.epochs)
        hard = laprune.hard_topk(scores, k)
        test_x, test_y = x[:, size.train :], y[:, size.train :, None] > 0.5
        right = [
            ((_logits(test_x, p * weights, bias) > 0) == test_y).double().mean(1)
            for p in (hard, soft)
        ]
        measured = laprune.diagnostics(soft, eps=EPS)
    return {
        (method, seed): {
            **_recovery(hard[i, j].cpu().numpy() > 0.5, problems[i], size),
            "accuracy": right[0][i, j].item(),
            "soft_accuracy": right[1][i, j].item(),
            "near_binary": measured.near_binary[i, j].item(),
            "mass": measured.mass[i, j].item(),
        }
        for i, seed in enumerate(seeds)
        for j, method in enumerate(methods)
    }


def _logits(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """(seed, sample, feature) samples to (seed, sample, method) logits."""
    return x @ weights.mT + bias.mT


def _batches(
    x: Tensor, y: Tensor, batch: int | None, orders: Sequence[torch.Generator]
) -> Iterator[tuple[Tensor, Tensor]]:
    if batch is None:
        yield x, y
        return
    n = x.shape[1]
    order = torch.stack([torch.randperm(n, generator=g) for g in orders]).to(x.device)
    seeds = torch.arange(len(orders), device=x.device)[:, None]
    for rows in order.split(batch, dim=1):
        yield x[seeds, rows], y[seeds, rows]


def _recovery(chosen: NDArray[np.bool_], data: Problem, size: Size) -> dict[str, Any]:
    """Recovery F1, and the accuracy of a logistic regression fitted anew on the chosen features."""
    from sklearn.linear_model import LogisticRegression

    hits = int((chosen & data.informative).sum())
    x, y, n = data.x[:, chosen], data.y, size.train
    model = LogisticRegression().fit(x[:n], y[:n])
    return {
        "f1": 2 * hits / int(chosen.sum() + data.informative.sum()),
        "refit_accuracy": float(model.score(x[n:], y[n:])),
        "selected": np.flatnonzero(chosen).tolist(),
    }
