"""The example scripts run, and do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# Each with its argument, and what its result must be like.
RUNS: dict[str, tuple[int, Any]] = {
    "feature_selection": (150, lambda found: found >= 0.9),
    "autoencoder": (400, lambda unexplained: unexplained < 0.35),
    "choose_gamma": (100_000, lambda apart: apart < 0.01),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    size, good = RUNS[name]
    result = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](size)
    assert capsys.readouterr().out
    assert good(result), result


def test_every_example_is_run() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.py")} == set(RUNS)
