"""Callbacks in the real trainers, and the monitor they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laprune
from laprune.callbacks import MaskMonitor
from laprune.nn import SoftTopK
from laprune.schedules import linear
from laprune.select import FeatureGate

STEPS, FEATURES, K = 6, 8, 3
SCHEDULE = linear(0.1, 0.9, steps=STEPS)


class Model(nn.Module):
    """A gate and a linear layer; notes the gamma of each training step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = FeatureGate(FEATURES, K, gamma=0.5)
        self.out = nn.Linear(FEATURES, 1)
        self.seen: list[float] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.seen.append(self.gate.topk.gamma.item())
        return {"loss": (self.out(self.gate(x))[..., 0] - labels).square().mean()}


def data(rows: int = 4 * STEPS) -> list[dict[str, Tensor]]:
    x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(1))
    return [{"x": r, "labels": r[0]} for r in x]


def check_logged(logged: list[dict[str, float]], steps: list[int]) -> None:
    assert [v["laprune/gamma"] for v in logged] == pytest.approx([SCHEDULE(s) for s in steps])
    for values in logged:
        assert values["laprune/gate.topk/mass"] == pytest.approx(K, rel=1e-6)
        assert values["laprune/gate.topk/gamma"] == pytest.approx(values["laprune/gamma"], rel=1e-4)


def test_monitor_measures_when_armed_and_lets_go() -> None:
    model = nn.Sequential(SoftTopK(2, gamma=0.6), SoftTopK(1, gamma=0.3, dim=0))
    monitor = MaskMonitor(model)
    r = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model(r)
    assert monitor.take() == {}
    monitor.armed = True
    model(r)
    found = monitor.take()
    assert found == pytest.approx({"0/mass": 2, "0/gamma": 0.6, "1/mass": 1, "1/gamma": 0.3})
    assert monitor.take() == {}
    monitor.close()
    model(r)
    assert monitor.take() == {}


def test_monitor_leaves_out_what_may_not_be_selected() -> None:
    layer = SoftTopK(2, gamma=0.6)
    monitor = MaskMonitor(layer)
    monitor.armed = True
    r = torch.arange(8.0, dtype=torch.float64)
    r[0] = -torch.inf
    eligible = torch.arange(8) != 7
    p = layer(r, mask=eligible)
    assert monitor.take() == pytest.approx({"mass": 2, "gamma": 0.6})
    assert laprune.diagnostics(p).gamma.item() != pytest.approx(0.6, abs=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import Logger

    from laprune.callbacks.lightning import GammaCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Notes(Logger):
        name, version = "notes", 0

        def __init__(self) -> None:
            super().__init__()
            self.logged: list[dict[str, float]] = []
            self.steps: list[int | None] = []

        def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "laprune/gamma" in metrics:
                self.logged.append({k.replace("inner.", ""): v for k, v in metrics.items()})
                self.steps.append(step)

    def trainer(callback: Any, logger: Any, **limits: Any) -> Trainer:
        return Trainer(
            accelerator="cpu",
            callbacks=[callback],
            logger=logger,
            log_every_n_steps=2,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **limits,
        )

    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    module, notes = Module(), Notes()
    first = trainer(GammaCallback(SCHEDULE), notes, max_epochs=1)
    first.fit(module, loader)
    assert module.inner.seen == pytest.approx([SCHEDULE(i) for i in range(STEPS)])
    check_logged(notes.logged, [0, 2, 4])
    assert notes.steps == [0, 2, 4]
    assert "laprune/gamma" in first.callback_metrics

    first.save_checkpoint(tmp_path / "half.ckpt")
    module.inner.seen.clear()
    later = linear(0.1, 0.9, steps=2 * STEPS)
    second = trainer(GammaCallback(later), False, max_epochs=2)
    second.fit(module, loader, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert module.inner.seen == pytest.approx([later(i) for i in range(STEPS, 2 * STEPS)])

    # Two batches a step: gamma stays for both, and each step is logged once.
    module.inner.seen.clear()
    notes = Notes()
    trainer(GammaCallback(SCHEDULE), notes, max_epochs=1, accumulate_grad_batches=2).fit(
        module, loader
    )
    steps = range(STEPS // 2)
    assert module.inner.seen == pytest.approx([SCHEDULE(i) for i in steps for _ in range(2)])
    check_logged(notes.logged, [0, 2])
    assert notes.steps == [0, 2]

    module.inner.seen.clear()
    trainer(GammaCallback(SCHEDULE, every="epoch"), False, max_epochs=2).fit(module, loader)
    assert module.inner.seen == pytest.approx([SCHEDULE(0)] * STEPS + [SCHEDULE(1)] * STEPS)
    with pytest.raises(ValueError, match="every must be"):
        GammaCallback(SCHEDULE, every="batch")


@pytest.mark.filterwarnings("ignore")
def test_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import Trainer, TrainingArguments

    from laprune.callbacks.transformers import GammaCallback

    model = Model()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        logging_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data())
    trainer.add_callback(GammaCallback(SCHEDULE, log=trainer.log))
    trainer.train()
    assert model.seen == pytest.approx([SCHEDULE(i) for i in range(STEPS)])
    check_logged([x for x in trainer.state.log_history if "laprune/gamma" in x], [1, 3, 5])
