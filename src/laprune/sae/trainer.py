"""Training with progress, and checkpoints from which it goes on as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from laprune.schedules import GammaScheduler, Schedule

from .autoencoder import SparseAutoencoder
from .auxiliary import AuxK, silence


class Epoch(NamedTuple):
    """One line of a training's history."""

    loss: float
    """The mean squared error over the epoch's samples and coordinates."""
    gamma: float | None
    """The hardness in force; None if the activation has none."""


class Trainer:
    """Minimises the mean squared error by Adam, with unit-norm decoder directions.

    >>> from laprune.schedules import linear
    >>> sae = SparseAutoencoder(d=8, m=32, k=4)
    >>> trainer = Trainer(sae, epochs=3, batch_size=50, schedule=linear(0.0, 0.9, steps=3))
    >>> history = trainer.fit(torch.randn(200, 8), progress=False)
    >>> [round(epoch.gamma, 2) for epoch in history], trainer.steps
    ([0.0, 0.45, 0.9], 12)

    Args:
        sae: the autoencoder, on the device to train on.
        learning_rate: Adam's.
        epochs, batch_size: passes over the samples, samples in a step.
        schedule: the hardness of each epoch, as in :mod:`laprune.schedules`; constant if None.
        aux: the loss that revives dead latents, if any.
        project_gradient: whether to remove from the decoder's gradient what lies along its
            directions, so that Adam's moments hold no motion that renormalising undoes.
        seed: of the order of samples.
    """

    def __init__(
        self,
        sae: SparseAutoencoder,
        *,
        learning_rate: float = 1e-3,
        epochs: int = 30,
        batch_size: int = 4096,
        schedule: Schedule | None = None,
        aux: AuxK | None = None,
        project_gradient: bool = False,
        seed: int = 0,
    ) -> None:
        for name, value in (("epochs", epochs), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.sae, self.epochs, self.batch_size = sae, epochs, batch_size
        self.aux, self.project_gradient = aux, project_gradient
        self.scheduler = None if schedule is None else GammaScheduler(sae, schedule)
        self.optimiser = torch.optim.Adam(
            sae.parameters(), lr=learning_rate, fused=sae.decoder.is_cuda
        )
        self.silent = torch.zeros_like(sae.encoder_bias, dtype=torch.int64)
        """Samples since each latent last fired; kept while there is an auxiliary loss."""
        self.steps = 0
        self.history: list[Epoch] = []
        self._generator = torch.Generator().manual_seed(seed)
        self._order_from = self._generator.get_state()
        self._done = 0  # steps into the present epoch
        self._sum = torch.zeros((), dtype=torch.float64, device=sae.decoder.device)

    def step(self, x: Tensor) -> Tensor:
        """One step on a batch (batch, d), or (copies, batch, d); the squared error of each copy."""
        sae = self.sae
        sae.train()
        out = sae(x)
        error = (out.reconstruction - x).square().mean((-2, -1))
        loss = error.sum()
        if self.aux is not None:
            self.silent.copy_(silence(self.silent, sae, out))
            loss = loss + self.aux.weight * self.aux.loss(sae, x, out, self.silent).sum()
        self.optimiser.zero_grad()
        loss.backward()
        if self.project_gradient:
            sae.project_gradient()
        self.optimiser.step()
        sae.normalise_decoder()
        self.steps += 1
        return error.detach()

    def fit(
        self, x: Tensor, *, progress: bool = True, checkpoint: str | Path | None = None
    ) -> list[Epoch]:
        """Train on samples (n, d) until all epochs are done, and say how each went.

        Args:
            progress: whether to show it.
            checkpoint: a file to go on from, if it is there, and to save to after each epoch.
        """
        if x.dim() != 2 or len(x) == 0:
            raise ValueError(f"samples must have the shape (n, d), got {tuple(x.shape)}")
        if checkpoint is not None:
            _safetensors()
            Path(checkpoint).parent.mkdir(parents=True, exist_ok=True)
            if Path(checkpoint).exists():
                self.load(checkpoint)
        with _bar(progress) as bar:
            task = bar.add_task("training", total=self.epochs, completed=len(self.history))
            while len(self.history) < self.epochs:
                if self.scheduler is not None:
                    self.scheduler.load_state_dict({"last_step": len(self.history)})
                for rows in self._batches(len(x)):
                    some = x[rows].to(self.sae.decoder.device)
                    if self.sae.decoder.dim() == 3:  # copies, which all see the same samples
                        some = some.expand(len(self.sae.decoder), -1, -1)
                    self._sum += self.step(some).mean() * len(rows)
                    self._done += 1
                self._end_epoch(len(x))
                if checkpoint is not None:
                    self.save(checkpoint)
                bar.update(task, advance=1, description=f"loss {self.history[-1].loss:.4g}")
        return self.history

    def _batches(self, n: int) -> Iterator[Tensor]:
        """What is left of the present epoch's order."""
        self._generator.set_state(self._order_from)
        order = torch.randperm(n, generator=self._generator)
        yield from order.split(self.batch_size)[self._done :]

    def _end_epoch(self, n: int) -> None:
        own = getattr(self.sae.activation, "gamma", None)
        gamma = None if own is None else float(own)
        self.history.append(Epoch(self._sum.item() / n, gamma))
        self._order_from, self._done = self._generator.get_state(), 0
        self._sum.zero_()

    def _settings(self) -> dict[str, Any]:
        """What a checkpoint must have in common with the trainer that goes on from it."""
        sae = self.sae
        return {
            **{"d": sae.d, "m": sae.m, "k": sae.k, "batch_size": self.batch_size},
            "activation": type(sae.activation).__name__,
            "mode": getattr(sae.activation, "mode", None),
            "has a schedule": self.scheduler is not None,
        }

    def save(self, path: str | Path) -> None:
        """Model, optimiser, counters, schedule and random state, as one safetensors file."""
        tensors = {f"model.{k}": v for k, v in self.sae.state_dict().items()}
        for i, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{i}.{k}": v for k, v in state.items()}
        tensors |= {"silent": self.silent, "rng": self._order_from, "sum": self._sum}
        facts = {
            "settings": self._settings(),
            "steps": self.steps,
            "done": self._done,
            "history": self.history,
            "schedule": None if self.scheduler is None else self.scheduler.state_dict(),
        }
        path = Path(path)
        part = path.with_name(path.name + ".part")  # a file is whole or not there
        _safetensors().save_file(
            {k: v.detach().cpu().contiguous() for k, v in tensors.items()},
            part,
            {"laprune": json.dumps(facts)},
        )
        part.replace(path)

    def load(self, path: str | Path) -> None:
        """Go on from a file that a trainer with the same arguments saved."""
        tensors = _safetensors().load_file(path)
        facts = _facts(path)
        for name, own in self._settings().items():
            if own != (saved := facts["settings"][name]):
                raise ValueError(f"{path}: {name} is {saved} there, {own} here")
        groups: dict[str, dict[str, Tensor]] = {"model": {}, "optimiser": {}}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            if rest:
                groups[group][rest] = tensor
        self.sae.load_state_dict(groups["model"])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in groups["optimiser"].items():
            i, _, key = name.partition(".")
            state.setdefault(int(i), {})[key] = tensor
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": state})
        self.silent = tensors["silent"].to(self.silent.device)
        self._order_from = tensors["rng"]
        self._sum.copy_(tensors["sum"])
        self.steps, self._done = facts["steps"], facts["done"]
        self.history = [Epoch(*line) for line in facts["history"]]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(facts["schedule"])


def _bar(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        disable=not shown,
    )


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise ImportError("checkpoints need safetensors: pip install 'laprune[sae]'") from None
    return safetensors.torch


def _facts(path: str | Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        notes = file.metadata() or {}
    if "laprune" not in notes:
        raise ValueError(f"{path} is not a checkpoint of this trainer")
    return json.loads(notes["laprune"])
