"""Annealing for the Transformers trainer: ``trainer.add_callback(GammaCallback(schedule))``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from laprune.schedules import GammaScheduler, Schedule

from ._monitor import MaskMonitor, named


class GammaCallback(TrainerCallback):
    """Sets the hardness of every layer that has one and logs what the masks are like.

    Args:
        schedule: from the optimiser step to gamma, as in :mod:`laprune.schedules`.
        log: give ``trainer.log`` to have ``laprune/gamma`` and each :class:`laprune.nn.SoftTopK`'s
            mass and realised gamma logged every ``logging_steps``, wherever the trainer reports.
    """

    def __init__(
        self, schedule: Schedule, log: Callable[[dict[str, float]], None] | None = None
    ) -> None:
        self.schedule = schedule
        self.log = log

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        assert model is not None, "the trainer passes its model"
        self._scheduler = GammaScheduler(model, self.schedule, state.global_step)
        self._monitor = MaskMonitor(model)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._scheduler.load_state_dict({"last_step": state.global_step})
        self._monitor.armed = (
            self.log is not None and (state.global_step + 1) % state.logging_steps == 0
        )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.log is not None and self._monitor.armed:
            self._monitor.armed = False
            self.log(named(self._scheduler.gamma, self._monitor.take()))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._monitor.close()
