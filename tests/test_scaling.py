"""The scaling study: what it calls wrong, what it makes of failures, what it draws of fragments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laprune
from laprune import baselines
from laprune.studies import lab, scaling

pytestmark = pytest.mark.filterwarnings("ignore:JAXopt is no longer maintained:DeprecationWarning")
SETTING = {"operator": "laprune", "rows": 1, "n": 4096, "k": 256, "device": "cpu", "hardware": "x"}


def verdict(f: Any, name: str = "laprune", n: int = 4096) -> str | None:
    torch.manual_seed(0)
    r, g = torch.randn(1, n, requires_grad=True), torch.randn(1, n)
    return scaling._wrong(f, r, g, n // 16, name)


class WrongGradient(torch.autograd.Function):
    """The mask with half of its gradient."""

    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        return p.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / 2


def soft(r: Tensor, k: int, gamma: float = 0.9) -> Tensor:
    return laprune.soft_topk(r, k, gamma)


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda r, k: soft(r, k) * 1.01, "mass off"),
        (lambda r, k: soft(r, k, 0.8), "gamma off"),
        (lambda r, k: soft(-r, k), "largest scores"),
        (lambda r, k: soft(r, k).detach() + 0 * r, "no gradient"),
        (lambda r, k: soft(r, k).detach() + (r - r.detach()), "scale and shift"),
        (lambda r, k: WrongGradient.apply(soft(r, k)), "float64"),
        (lambda r, k: soft(r, k) * torch.nan, "not finite"),
    ],
)
def test_wrong_answers_are_found(f: Any, words: str) -> None:
    assert words in str(verdict(f))


@pytest.mark.parametrize("name", [n for n in baselines.names() if n != "sander_dykstra"])
def test_right_answers_pass(name: str) -> None:
    if not baselines.available(name):
        pytest.skip(f"needs {baselines.get(name).requires}")
    assert verdict(baselines.get(name), name, n=256) is None


def test_our_answer_passes() -> None:
    assert verdict(soft) is None


def test_too_few_steps_are_no_answer() -> None:
    name = "sander_dykstra"
    assert verdict(baselines.get(name), name, n=64) is None
    assert "not converged" in str(verdict(baselines.get(name), name, n=2048))


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError("Unable to allocate 7.45 GiB for an array"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4 bytes"), "out of memory"),
        (ValueError("k is odd"), "ValueError: k is odd"),
    ],
)
def test_running_out_of_memory_is_a_result(
    error: Exception, failed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sender(list[dict[str, Any]]):
        send = list.append

    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(scaling, "point", fail)
    sender = Sender()
    scaling._report(SETTING, sender)  # type: ignore[arg-type]
    assert sender == [{"failed": failed}]


def test_running_out_of_time_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "LIMIT_S", 0)
    monkeypatch.setattr(scaling, "_gave_up", {})
    assert scaling.measure(SETTING, lab.Options()) == {"failed": "over 0 s"}
    longer = SETTING | {"n": 8192, "k": 512}
    assert scaling.measure(longer, lab.Options())["failed"].startswith("not tried")


def test_memory_is_that_of_the_timed_calls() -> None:
    # Rows of 32 MB and more go back to the system once they are freed; of smaller ones the C
    # library keeps as many as it likes.
    n = 9_000_000
    result = scaling.point(SETTING | {"n": n, "k": n // 16})
    two_rows = 2 * 4 * n
    assert 0.8 * two_rows <= result["peak_bytes"] <= 2 * two_rows
    assert result["ms"] > 0


def record(operator: str, n: int, rows: int = 1, device: str = "x", **result: Any) -> lab.Record:
    setting = SETTING | {"operator": operator, "rows": rows, "n": n, "hardware": device}
    return {"setting": setting, "result": result}


GOOD = {"ms": 1.0, "peak_bytes": 10**6, "copy_bytes_per_s": 1e10}


@pytest.mark.parametrize(
    ("records", "names"),
    [
        ([record("laprune", 100, **GOOD)], {"scaling_cpu.svg", "scaling_cpu.png"}),
        ([record("laprune", 64, rows=9, **GOOD)], set()),
        ([record("laprune", 100, failed="out of memory")], set()),
        (
            [record("lapsum", 100, **GOOD), record("lapsum", 1000, failed="over 240 s")],
            {"scaling_cpu.svg", "scaling_cpu.png"},
        ),
    ],
)
def test_fragments_are_drawn(records: list[lab.Record], names: set[str], tmp_path: Path) -> None:
    paths = scaling.draw(records, tmp_path)
    assert {p.name for p in paths} == names | {"scaling_cpu.md"}
    text = (tmp_path / "scaling_cpu.md").read_text()
    for r in records:
        assert r["result"].get("failed", "1 (1)") in text
    assert "Not measured here: `paper`" in text


def test_two_machines_are_drawn_apart(tmp_path: Path) -> None:
    records = [record("laprune", 100, device=x, **GOOD) for x in ("Old, 2 cores", "New, 4 cores")]
    names = {p.name for p in scaling.draw(records, tmp_path) if p.suffix == ".md"}
    assert names == {"scaling_cpu_old_2_cores.md", "scaling_cpu_new_4_cores.md"}
