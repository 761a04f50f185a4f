"""Annealing for Lightning: ``Trainer(callbacks=[GammaCallback(linear(0.0, 0.9, steps=1000))])``."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from laprune.schedules import GammaScheduler, Schedule

from ._monitor import MaskMonitor, named


class GammaCallback(Callback):
    """Sets the hardness of every layer that has one and logs what the masks are like.

    Args:
        schedule: from the step to gamma, as in :mod:`laprune.schedules`.
        every: what a step is: ``"step"``, the trainer's optimiser steps, or ``"epoch"``.

    Loggers receive ``laprune/gamma`` and each :class:`laprune.nn.SoftTopK`'s mass and realised
    gamma every ``log_every_n_steps``; they are in ``trainer.callback_metrics`` too.
    """

    def __init__(self, schedule: Schedule, every: Literal["step", "epoch"] = "step") -> None:
        if every not in ("step", "epoch"):
            raise ValueError(f"every must be 'step' or 'epoch', got {every!r}")
        self.schedule = schedule
        self.every = every

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._scheduler = GammaScheduler(pl_module, self.schedule, self._now(trainer))
        self._monitor = MaskMonitor(pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._scheduler.load_state_dict({"last_step": self._now(trainer)})
        self._step = trainer.global_step
        self._monitor.armed = self._step % trainer.log_every_n_steps == 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A step may take several batches: the last of them is logged, with the step it was part of.
        if not self._monitor.armed or trainer.global_step == self._step:
            return
        self._monitor.armed = False
        values = named(self._scheduler.gamma, self._monitor.take())
        trainer.callback_metrics.update({name: torch.tensor(x) for name, x in values.items()})
        for logger in trainer.loggers:
            logger.log_metrics(values, step=self._step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._monitor.close()

    def _now(self, trainer: Trainer) -> int:
        return trainer.global_step if self.every == "step" else trainer.current_epoch
