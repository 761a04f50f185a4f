"""The command line as a user meets it: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import laprune
from laprune import cli
from laprune.commands import UserError, doctor
from laprune.commands import solve as solving
from laprune.studies import lab

SCORES = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.5, 0.1, -1.0, 4.0]], dtype=torch.float64)


def invoke(*arguments: object) -> Result:
    outcome = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert outcome.exit_code == 0, outcome.output + repr(outcome.exception)
    return outcome


def complaint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, str]:
    """Exit code and standard error of a command that fails."""
    monkeypatch.setattr(sys, "argv", ["laprune", *(str(a) for a in arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    assert out == ""
    return end.value.code, err


def save(folder: Path, kind: str, scores: torch.Tensor = SCORES) -> Path:
    path = folder / f"scores{kind}"
    if kind == ".pt":
        torch.save(scores, path)
    elif kind == ".npy":
        np.save(path, scores.numpy())
    else:
        np.savetxt(path, scores.numpy(), delimiter=",")
    return path


@pytest.mark.parametrize("kind", solving.KINDS)
def test_solve_writes_the_mask_beside_the_scores(kind: str, tmp_path: Path) -> None:
    path = save(tmp_path, kind)
    outcome = invoke("solve", path, "--k", 2, "--gamma", 0.8, "--json")
    summary = json.loads(outcome.stdout)
    mask = solving.read(Path(summary["out"]))
    torch.testing.assert_close(mask, laprune.soft_topk(SCORES, 2, 0.8), rtol=0, atol=1e-15)
    assert Path(summary["out"]) == tmp_path / f"scores.mask{kind}"
    assert summary["status"] == {"CONVERGED": 2}
    assert summary["mass"] == pytest.approx([2, 2])
    assert summary["realised_gamma"] == pytest.approx([0.8, 0.8])


def test_json_stays_json_at_the_endpoints(tmp_path: Path) -> None:
    path = save(tmp_path, ".npy")
    summary = json.loads(invoke("solve", path, "--k", 2, "--gamma", 0, "--json").stdout)
    assert summary["status"] == {"UNIFORM": 2}
    assert summary["barrier"] == summary["temperature"] == [None, None]


def test_a_row_with_nan_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text("1,nan,0\n2,3,4\n")
    command = ["solve", str(path), "--k", "1", "--gamma", "0.5", "--json"]
    outcome = CliRunner().invoke(cli.app, command)
    assert outcome.exit_code == 1
    assert "not every row has an answer: NONFINITE 1" in outcome.stderr
    summary = json.loads(outcome.stdout)
    assert summary["status"] == {"NONFINITE": 1, "CONVERGED": 1}
    assert summary["mass"] == pytest.approx([1, 1])


def test_solve_draws_and_tells(tmp_path: Path) -> None:
    picture, out = tmp_path / "mask.png", tmp_path / "mask.csv"
    outcome = invoke(
        "solve",
        save(tmp_path, ".npy"),
        "--k",
        2,
        "--gamma",
        0.8,
        "--picture",
        picture,
        "--out",
        out,
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(out.read_text().splitlines()) == 2
    assert "█" in outcome.stdout
    assert "CONVERGED 2" in outcome.stdout


def test_solve_keeps_the_type_and_takes_a_column(tmp_path: Path) -> None:
    half = save(tmp_path, ".pt", SCORES.to(torch.bfloat16))
    invoke("solve", half, "--k", 1, "--gamma", 0.5)
    assert torch.load(tmp_path / "scores.mask.pt").dtype == torch.bfloat16
    column = tmp_path / "column.csv"
    column.write_text("3\n1\n2\n0\n")
    invoke("solve", column, "--k", 1, "--gamma", 0.5)
    assert solving.read(tmp_path / "column.mask.csv").shape == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["solve", "nowhere.npy", "--k", "2", "--gamma", "0.5"], "no such file: nowhere.npy"),
        (["solve", "scores.txt", "--k", "2", "--gamma", "0.5"], "must end in one of"),
        (["solve", "{npy}", "--k", "9", "--gamma", "0.5"], "k must lie in [0, 4], got 9"),
        (["solve", "{npy}", "--k", "2", "--gamma", "1.5"], "gamma must lie in [0, 1], got 1.5"),
        (["solve", "{npy}", "--k", "2"], "Missing option '--gamma'"),
        (["solve", "{npy}", "--k", "2", "--gamma", "1", "--device", "tpu"], "tpu is not available"),
        (["solve", "{bad}", "--k", "2", "--gamma", "0.5"], "does not hold one array"),
        (["solve", "{npy}", "--k", "2", "--gamma", "0.5", "--out", "{npy}"], "would overwrite"),
        (["solve", "{npy}", "--k", "2", "--gamma", "0.5", "--picture", "x.doc"], "must end in one"),
        (["solve", "{empty}", "--k", "2", "--gamma", "0.5"], "holds no scores"),
        (["solve", ".", "--k", "2", "--gamma", "0.5"], "must end in one of"),
        (["solve", "{npy}", "--k", "2", "--gamma", "1", "--device", "meta"], "it holds no numbers"),
        (["reproduce", "hardness_path", "--results", "{npy}/folder"], "Not a directory"),
        (["demo", "--n", "16", "--out", "{npy}/folder"], "Not a directory"),
        (["demo", "--gamma", "1"], "gamma must lie between 0 and 1"),
        (["report", "--results", "nowhere"], "no results in nowhere"),
        (["reproduce", "nothing"], "unknown: nothing"),
        (["reproduce", "hardness_path", "--data", "nowhere"], "no such folder: nowhere"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_errors_are_one_line_and_a_code(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = tmp_path / "bad.npy"
    bad.write_text("not an array")
    empty = tmp_path / "empty.csv"
    empty.touch()
    files = {"npy": str(save(tmp_path, ".npy")), "bad": str(bad), "empty": str(empty)}
    code, err = complaint(capsys, monkeypatch, *(a.format(**files) for a in arguments))
    assert code == 2
    assert said in err
    assert err.startswith("laprune: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [("doctor", ""), ("reproduce hardness_path", "; the same command goes on from here")],
)
def test_an_interruption_is_not_a_traceback(
    command: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", stop)
    monkeypatch.setattr(cli, "_study", stop)
    code, err = complaint(capsys, monkeypatch, *command.split())
    assert code == cli.INTERRUPTED
    assert err == f"laprune: interrupted{said}\n"


def test_a_source_tree_that_is_not_installed_knows_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    assert lab.provenance("cpu")["versions"] == {"laprune": laprune.__version__}


def test_a_machine_without_git_measures_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert lab.provenance("cpu")["commit"] is None


def test_what_cannot_be_drawn_is_not_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in ("reproduce hardness_path", "bench scaling --quick"):
        code, err = complaint(
            capsys, monkeypatch, *command.split(), "--results", tmp_path / "results"
        )
        assert code == 2
        assert err == "laprune: drawing needs matplotlib: pip install 'laprune[studies]'\n"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ModuleNotFoundError("no", name="sklearn.datasets")

    monkeypatch.setattr(doctor, "examine", refuse)
    code, err = complaint(capsys, monkeypatch, "doctor")
    assert (code, err) == (2, "laprune: this needs sklearn: pip install 'laprune[select]'\n")


@pytest.fixture
def no_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The studies as they are where the first of two needs a package that is not there."""
    right = cli._study

    def study(name: str) -> lab.Study:
        if name != "hardness_path":
            raise ModuleNotFoundError("no", name="scipy")
        return right(name)

    monkeypatch.setattr(cli, "_study", study)
    monkeypatch.setattr(cli, "STUDIES", ("discretised", "hardness_path"))
    monkeypatch.setattr(cli, "REPORTED", cli.STUDIES)


@pytest.mark.usefixtures("no_scipy")
def test_a_study_that_cannot_be_imported_is_listed_and_left_out(tmp_path: Path) -> None:
    listed = json.loads(invoke("reproduce", "--list", "--json").stdout)
    assert listed["discretised"] == "needs scipy: pip install 'laprune[studies]'"
    outcome = CliRunner().invoke(cli.app, ["reproduce", "--results", str(tmp_path)])
    assert outcome.exit_code == 1
    said = outcome.stdout.replace("\n", " ")
    assert "discretised left out: needs scipy: pip install 'laprune[studies]'" in said
    assert (tmp_path / "hardness_path.svg").exists()
    page = tmp_path / "page.html"
    invoke("report", "--results", tmp_path, "--out", page)
    assert "<li><strong>discretised</strong></li>" in page.read_text(encoding="utf-8")


def test_a_part_of_a_study_is_not_drawn(tmp_path: Path) -> None:
    invoke("reproduce", "discretised", "--quick", "--device", "cpu", "--results", tmp_path)
    path = tmp_path / "discretised.jsonl"
    path.write_text(path.read_text().partition("\n")[0])
    arguments = ["reproduce", "discretised", "--quick", "--stored", "--results", str(tmp_path)]
    outcome = CliRunner().invoke(cli.app, arguments)
    assert outcome.exit_code == 1
    assert outcome.stdout.startswith("discretised: 1 records are too few to draw")


def test_everything_the_package_reads_is_packaged() -> None:
    root = Path(laprune.__file__).parent
    text = (root.parent.parent / "pyproject.toml").read_text()
    globs = re.findall(r'"([^"]+)"', re.search(r"^laprune = (\[.*\])$", text, re.MULTILINE)[1])
    packaged = {p for glob in globs for p in root.glob(glob)}
    kept = {".py", ".pyc", ".so", ".pyd", ".hpp", ".cpp"}
    read = {p for p in root.rglob("*") if p.is_file() and p.suffix not in kept}
    assert read <= packaged


def test_a_tensor_is_wanted_and_nothing_is_unpickled(tmp_path: Path) -> None:
    torch.save({"scores": SCORES}, tmp_path / "dict.pt")
    with pytest.raises(UserError, match="holds a dict"):
        solving.read(tmp_path / "dict.pt")
    np.save(tmp_path / "objects.npy", np.array([print], dtype=object))
    torch.save(print, tmp_path / "objects.pt")
    for name in ("objects.npy", "objects.pt"):
        with pytest.raises(UserError, match="does not hold one"):
            solving.read(tmp_path / name)


def test_rows_of_dense_scores_are_wanted(tmp_path: Path) -> None:
    torch.save(torch.eye(3).to_sparse(), tmp_path / "sparse.pt")
    np.save(tmp_path / "number.npy", np.float64(3))
    (tmp_path / "ragged.csv").write_text("1,2,3\n1,2\n")
    said = {
        "sparse.pt": "dense tensor, got torch.sparse_coo",
        "number.npy": "single number, not a row",
        "ragged.csv": "columns changed from 3 to 2 at row 2$",
    }
    for name, message in said.items():
        with pytest.raises(UserError, match=message):
            solving.read(tmp_path / name)


def test_demo_says_when_its_times_say_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for load, said in ((0.0, False), (1e9, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, load, load))
        out = invoke("demo", "--n", 64, "--device", "cpu", "--out", tmp_path).stdout
        assert "both hold" in out
        assert ("busy" in out) == said


def test_doctor_finds_this_installation_healthy() -> None:
    found = json.loads(invoke("doctor", "--json").stdout)
    assert found["healthy"]
    assert found["packages"]["torch"] == torch.__version__
    cpu = next(d for d in found["devices"] if d["device"] == "cpu")
    assert cpu["backend"] in {"cpu", "reference"}
    assert {t["dtype"] for t in cpu["tests"]} == {"float32", "float64"}
    text = invoke("doctor").stdout
    assert "served by" in text
    assert "passed" in text


def test_doctor_notices_a_wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    right = laprune.solve

    def wrong(scores: torch.Tensor, *arguments: object) -> laprune.Solution:
        s = right(scores, *arguments)
        return s._replace(mask=s.mask + 1e-3 * (scores.dtype == torch.float32))

    monkeypatch.setattr(laprune, "solve", wrong)
    assert not doctor.self_test("cpu", torch.float32)["passed"]
    assert CliRunner().invoke(cli.app, ["doctor"]).exit_code == 1


def test_doctor_reports_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(laprune, "solve", crash)
    assert doctor.self_test("cpu", torch.float64)["error"] == "RuntimeError: out of order"


def test_every_command_has_help() -> None:
    benches = ("bench", "bench operator", "bench scaling", "bench plot")
    for command in ("demo", "reproduce", "solve", "doctor", "report", *benches):
        assert "Usage:" in invoke(*command.split(), "--help").stdout


def test_the_list_is_there_for_scripts() -> None:
    abouts = json.loads(invoke("reproduce", "--list", "--json").stdout)
    assert list(abouts) == list(cli.STUDIES)
    assert all(abouts.values())


def test_the_list_says_which_studies_need_data() -> None:
    lines = invoke("reproduce", "--list").stdout.splitlines()
    assert {x.split()[0] for x in lines if "(--data: " in x} == set(cli.DATA)
    first = {name: next(iter(cli._study(name).settings(lab.Options()))) for name in cli.STUDIES}
    real = {name for name, s in first.items() if s.keys() & {"backbone", "model", "images"}}
    assert real | {"pruning"} == set(cli.DATA)


def test_the_version_is_told() -> None:
    assert invoke("--version").stdout == f"laprune {laprune.__version__}\n"


def test_the_package_runs_as_a_module() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "laprune", "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"laprune {laprune.__version__}\n"


def test_trials_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    invoke("reproduce", "hardness_path", "--quick")
    assert [p.name for p in tmp_path.iterdir()] == ["results-quick"]
