"""Every study runs small, resumes, draws from what is stored; and the claims they rest on hold."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import laprune
from laprune import cli, theory
from laprune.baselines.lapsum import lapsum_sort
from laprune.studies import (
    bench_operator,
    budget_drift,
    discretised,
    lab,
    solver_diagnostic,
    worst_case_floor,
)
from laprune.studies.lab import Options, Record, Study, load, run, stored
from laprune.studies.tables import Row, Spread, seeds, spread, write

DIAGNOSTICS = (
    "discretised",
    "worst_case_floor",
    "mean_field_agreement",
    "eps_sensitivity",
    "budget_drift",
    "solver_diagnostic",
)
QUICK = Options(quick=True)
RESULTS = Path(__file__).parent.parent / "results"


pytestmark = pytest.mark.usefixtures("one_thread")


def _reproduce(name: str, folder: Path) -> None:
    arguments = ["reproduce", name, "--quick", "--device", "cpu", "--results", str(folder)]
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exit_code == 0, outcome.output + repr(outcome.exception)


@pytest.mark.parametrize("name", list(cli.STUDIES))
def test_study_runs_resumes_and_draws(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _reproduce(name, tmp_path)
    lines = (tmp_path / f"{name}.jsonl").read_text()
    drawn = {p.name for p in tmp_path.iterdir() if p.suffix in {".svg", ".png", ".md", ".txt"}}
    assert drawn, "nothing was drawn"
    assert all((tmp_path / x).stat().st_size > 0 for x in drawn)
    for record in load(tmp_path / f"{name}.jsonl"):
        assert {"setting", "result", "where"} <= record.keys()
        assert {"hardware", "versions", "commit", "time"} <= record["where"].keys()

    for x in drawn:
        (tmp_path / x).unlink()
    module = importlib.import_module(f"laprune.studies.{name}")

    def refuse(*_: object) -> dict[str, float]:
        raise AssertionError("measured again")

    monkeypatch.setattr(module, "STUDY", dataclasses.replace(module.STUDY, measure=refuse))
    _reproduce(name, tmp_path)
    assert (tmp_path / f"{name}.jsonl").read_text() == lines
    assert drawn <= {p.name for p in tmp_path.iterdir()}


@pytest.mark.parametrize("name", [x for x in cli.STUDIES if (RESULTS / f"{x}.jsonl").exists()])
def test_what_is_on_file_is_drawn_whole_wherever_it_was_measured(name: str, tmp_path: Path) -> None:
    shutil.copy(RESULTS / f"{name}.jsonl", tmp_path)
    arguments = ["reproduce", name, "--stored", "--device", "cpu", "--results", str(tmp_path)]
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exit_code == 0, outcome.output + repr(outcome.exception)
    drawn = {p.name for p in tmp_path.iterdir()}
    assert drawn == {p.name for p in RESULTS.glob(f"{name}*")}
    for page in tmp_path.glob("*.md"):
        assert page.read_text() == (RESULTS / page.name).read_text()


def test_one_schedule_on_file_is_drawn_alone_where_it_is_asked_for(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "classification.jsonl", tmp_path)
    arguments = ["reproduce", "classification", "--stored", "--results", str(tmp_path)]
    CliRunner().invoke(cli.app, [*arguments, "--epochs", "30"])
    assert [p.name for p in tmp_path.glob("*.md")] == ["classification_30_epochs.md"]


def _made_up(settings: list[dict[str, object]]) -> Study:
    def draw(records: list[Record], folder: Path) -> list[Path]:
        return []

    return Study("made_up", "", lambda _: settings, lambda s, _: {"is": s}, draw)


def _seen(records: list[Record]) -> list[dict[str, object]]:
    return [r["setting"] for r in records]


def test_a_run_of_a_part_draws_from_the_whole(tmp_path: Path) -> None:
    whole = [{"x": x, "seed": seed} for x in "cab" for seed in (0, 1)]
    run(_made_up(whole), Options(), tmp_path)
    part = _made_up([{"x": "d", "seed": 0}, {"x": "b", "seed": 1}])
    run(_made_up([{"x": "trial"}]), QUICK, tmp_path)
    assert _seen(run(part, Options(), tmp_path)) == [
        {"x": "d", "seed": 0},
        {"x": "b", "seed": 1},
        *whole[:-1],
    ]
    assert _seen(stored(_made_up([]), QUICK, tmp_path)) == [{"x": "trial"}]
    assert stored(_made_up(whole), Options(), tmp_path / "nowhere") == []


def test_one_drawing_is_of_one_kind(tmp_path: Path) -> None:
    long, short = ([{"epochs": n, "seed": s} for s in range(n)] for n in (3, 2))
    for settings in (short, long):
        run(_made_up(settings), Options(), tmp_path)
    assert _seen(stored(_made_up(short), Options(), tmp_path)) == short
    assert _seen(stored(_made_up([{"epochs": 9}]), Options(), tmp_path)) == long
    # Where some have no hardware, the others are set apart by it, and the study draws both.
    for settings in ([{"n": 1}], [{"n": 1, "hardware": "h"}]):
        both = run(dataclasses.replace(_made_up(settings), name="both"), Options(), tmp_path)
    assert _seen(both) == [{"n": 1}, {"n": 1, "hardware": "h"}]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A terminal of 80 columns, whose text is kept."""
    console = Console(width=80, force_terminal=True, file=io.StringIO(), color_system=None)
    monkeypatch.setattr(lab, "console", console)
    return console


def test_progress_fits_a_narrow_terminal(narrow: Console) -> None:
    progress = lab._progress()
    progress.add_task("a study: " + "setting=1 " * 30, total=40, completed=7)
    narrow.print(progress.get_renderable())
    (line,) = narrow.file.getvalue().splitlines()
    assert re.search(r"━╸ +7/40 0:00:00 -:--:-- a study: setting=1", line)
    assert len(line.rstrip()) <= 80


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_times_fit_a_narrow_terminal(device: str, narrow: Console) -> None:
    records = [
        r for r in load(RESULTS / "bench_operator.jsonl") if r["setting"]["device"] == device
    ]
    narrow.print(bench_operator.table(records))
    text = narrow.file.getvalue()
    assert "…" not in text
    for record in (r for r in records if r["setting"]["peers"]):
        (line,) = (x for x in text.splitlines() if bench_operator._shape(record["setting"]) in x)
        ms = record["result"]["ms"]
        last = next(ms[name] for name in reversed(bench_operator.CONTENDERS) if name in ms)
        assert line.rstrip().endswith(f" {bench_operator._digits(last)}")


@pytest.mark.parametrize("name", DIAGNOSTICS)
def test_diagnostics_say_their_seed_and_take_as_many_as_asked(name: str) -> None:
    study = importlib.import_module(f"laprune.studies.{name}").STUDY
    for options, most in ((QUICK, 2), (Options(seeds=3), 3), (Options(seeds=3, quick=True), 3)):
        wanted = list(study.settings(options))
        assert {s["seed"] for s in wanted} == set(range(most))
        keys = [json.dumps(s, sort_keys=True) for s in wanted]
        assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", DIAGNOSTICS)
def test_quick_records_are_not_taken_for_full_ones(name: str) -> None:
    study = importlib.import_module(f"laprune.studies.{name}").STUDY
    quick, full = (
        {json.dumps(s, sort_keys=True) for s in study.settings(options)}
        for options in (QUICK, Options())
    )
    assert not quick & full


@pytest.mark.parametrize("setting", worst_case_floor.settings(QUICK), ids=str)
def test_no_mask_lies_below_the_floor(setting: dict[str, object]) -> None:
    result = worst_case_floor.measure(setting, QUICK)
    below, floor = np.array(result["below"]), np.array(result["floor"])
    assert np.all(below >= floor)
    assert not any(result["unsolved"])
    if setting["scores"] == "adversarial":
        assert np.all(below <= floor + 0.01)


@pytest.mark.parametrize("eps", [0.005, 0.05, 0.5, 0.95])
@pytest.mark.parametrize("gamma", [0.3, 0.9, 0.99])
def test_adversarial_scores_attain_the_floor_they_are_asked_for(gamma: float, eps: float) -> None:
    k, n = 2_000, 20_000
    p = laprune.soft_topk(worst_case_floor.adversarial_scores(k, n, gamma, eps), k, gamma)
    d = laprune.diagnostics(p)
    assert d.mass.item() == pytest.approx(k, rel=1e-9)
    assert d.gamma.item() == pytest.approx(gamma, abs=1e-3)
    below = (p < eps).double().mean().item()
    assert theory.sparsity_floor(k / n, gamma, eps) == pytest.approx(below, abs=0.01)


def test_discretised_fraction_does_not_move_with_the_scale_of_scores() -> None:
    for setting in discretised.settings(QUICK):
        if setting["over"] == "scale":
            result = discretised.measure(setting, QUICK)
            assert len(set(result["laprune_soft"])) == 1
            assert len(set(result["laprune_hard"])) == 1
            # The control moves, so the fraction above could have.
            assert result["lapsum_one"][-1] - result["lapsum_one"][0] > 0.5


def test_tuned_lapsum_is_laprune_where_it_was_tuned() -> None:
    setting = {"over": "scale", "a": 0.1, "n": 2000, "grid": "quick", "seed": 0}
    result = discretised.measure(setting, QUICK)
    at = result["scale"].index(1.0)
    assert result["lapsum_tuned"][at] == result["laprune_hard"][at]


def test_lapsum_and_laprune_hold_the_mass_that_dftopk_loses() -> None:
    for setting in budget_drift.settings(QUICK):
        result = budget_drift.measure(setting, QUICK)
        assert np.allclose(result["lapsum"], 1, rtol=0, atol=2e-6)
        assert np.allclose(result["laprune"], 1, rtol=0, atol=2e-6)
        if setting["part"] == 100:
            assert result["dftopk"][-1] > 30


@pytest.mark.parametrize("a", [0.01, 0.1, 0.5])
def test_mass_is_exact_in_float64(a: float) -> None:
    r = torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = round(a * r.numel())
    for p in (laprune.soft_topk(r, k, 0.9), lapsum_sort(r, k, 0.3)):
        assert p.sum().item() == pytest.approx(k, rel=1e-11)


def test_solver_solves_the_rows_the_papers_newton_gives_up() -> None:
    setting = {"part": "passes", "rows": 50, "n": 100, "a": 0.05, "dtype": "float64"}
    result = solver_diagnostic.measure({**setting, "grid": "quick", "seed": 0}, QUICK)
    assert result["fallback"][0] == 0
    assert result["fallback"][-1] > 0.8
    assert not any(result["unsolved"])
    assert not any(result["ours_off"])
    assert max(result["max_passes"]) <= 30


def test_seeds_and_spread() -> None:
    assert seeds(Options(), 5) == range(5)
    assert seeds(Options(seeds=7, quick=True), 5) == range(7)
    assert spread([2.0]) == Spread(2.0, 0.0)
    assert spread([1.0, 2.0, 3.0]) == Spread(2.0, 1.0)


def test_table_gives_the_difference_and_keeps_its_columns(tmp_path: Path) -> None:
    rows = [Row("|x| at a", 0.5, Spread(0.75, 0.125), ".2f"), Row("y", None, Spread(1.0, 0.0))]
    lines = write(tmp_path, "t", "T", rows, ["A note."]).read_text().splitlines()
    assert lines[0] == "# T"
    assert lines[4] == r"| \|x\| at a | 0.50 | 0.75 ± 0.12 | +0.25 |"
    assert lines[5] == "| y | not given | 1.000 |  |"
    assert lines[-1] == "A note."


def test_records_name_the_commit_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a study writes beside the source makes nothing dirty; a repository that the package
    merely lies in says nothing."""

    def git(*command: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)

    lab_file = tmp_path / "src" / "laprune" / "studies" / "lab.py"
    lab_file.parent.mkdir(parents=True)
    lab_file.write_text("")
    (tmp_path / "results").write_text("")
    git("init")
    git("add", "results")
    git("commit", "-m", "no source")
    with monkeypatch.context() as patch:
        patch.setattr(lab, "__file__", str(lab_file))
        assert lab._commit() is None
        git("add", ".")
        git("commit", "-m", "source")
        (tmp_path / "results").write_text("new")
        clean = lab._commit()
        lab_file.write_text("new")
        assert lab._commit() == f"{clean}-dirty"
    assert clean
    assert clean.isalnum()
