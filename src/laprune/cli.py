"""The command line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from .commands import UserError

if TYPE_CHECKING:
    from .studies.lab import Options, Record, Study

app = typer.Typer(
    help="Differentiable top-k masks with exact mass and controlled hardness.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(
    help="Benchmarks: what is measured is stored, and drawn from what is stored.",
    no_args_is_help=True,
)
app.add_typer(bench, name="bench")

STUDIES = (
    "hardness_path",
    "discretised",
    "worst_case_floor",
    "mean_field_agreement",
    "eps_sensitivity",
    "budget_drift",
    "solver_diagnostic",
    "million_rows",
    "feature_selection",
    "feature_budget",
    "selector_comparison",
    "sae_images",
    "sae_cost",
    "sae_language",
    "pruning",
    "rank_cost",
    "classification",
    "collapse",
)
"""The tables and figures, by the names of their modules in `laprune.studies`."""
DATA = {
    "sae_images": "cifar100/, mobilenet_v2/",
    "sae_language": "stories15m/",
    "pruning": "cifar100/; without it the digits alone",
    "classification": "cifar100/",
    "collapse": "cifar100/",
}
"""What the studies on real data look for in the folder given by --data."""
REPORTED = (*STUDIES, "bench_operator", "scaling")
"""What the report expects in the results: the studies and the benchmarks."""

Results = Annotated[Path, typer.Option(help="Where records, figures and tables are kept.")]
Kept = Annotated[
    Path | None,
    typer.Option(
        help="Where records, figures and tables are kept: results, or results-quick with --quick."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small version, a trial of the machinery.")]


INTERRUPTED = 130
"""The exit code of a command stopped from the keyboard, as shells have it."""

_EXTRAS = {
    **dict.fromkeys(("matplotlib", "scipy", "safetensors", "PIL"), "studies"),
    **dict.fromkeys(("entmax", "diffsort", "numba"), "baselines"),
    "sklearn": "select",
}
"""Which extra brings a package."""

# click's own, wherever typer keeps it.
_UsageError = typer.BadParameter.__base__


def main() -> None:
    """The command line with errors of one line: 1 a check failed, 2 the request was wrong."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        code = _complain(str(error))
    except ModuleNotFoundError as error:
        if _package(error) == "laprune":
            raise
        code = _complain(f"this {_needs(_package(error))}")
    except OSError as error:
        reason = error.strerror or str(error)
        code = _complain(f"{error.filename}: {reason}" if error.filename else reason)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if not isinstance(error, _UsageError):  # type: ignore[arg-type]
            raise
        code = _complain(error.format_message())  # type: ignore[attr-defined]
    if code == INTERRUPTED:  # some versions of typer return it
        resumes = sys.argv[1:2] in (["reproduce"], ["bench"])
        hint = "; the same command goes on from here" if resumes else ""
        print(f"laprune: interrupted{hint}", file=sys.stderr)
    sys.exit(code)


def _complain(message: str) -> int:
    # A command without arguments fails with its help, which is printed already or is the message.
    if message:
        print(message if "\n" in message else f"laprune: {message}", file=sys.stderr)
    return 2


def _package(error: ModuleNotFoundError) -> str:
    return (error.name or "laprune").split(".")[0]


def _needs(package: str) -> str:
    """Which package is missing, and how to get it.

    >>> _needs("scipy"), _needs("stg")
    ("needs scipy: pip install 'laprune[studies]'", 'needs stg: pip install stg')
    """
    extra = f"'laprune[{_EXTRAS[package]}]'" if package in _EXTRAS else package
    return f"needs {package}: pip install {extra}"


def _require(*packages: str) -> None:
    """Refuse to measure what could not be drawn in the end."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"drawing {_needs(name)}")


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.empty(0, device=name).is_meta:
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(
            f"{name} is not available here: {str(error).splitlines()[0]}"
        ) from None
    return name


def _kept(results: Path | None, quick: bool) -> Path:
    """Trials stay apart from what was measured in earnest."""
    return results or Path("results-quick" if quick else "results")


def _study(module: str) -> Study:
    return importlib.import_module(f".studies.{module}", __package__).STUDY


def _abouts(
    names: tuple[str, ...], otherwise: Callable[[str], str] = lambda _: ""
) -> dict[str, str]:
    """What each study is about, or what to say where a package is missing."""
    abouts = {}
    for name in names:
        try:
            abouts[name] = _study(name).about
        except ModuleNotFoundError as error:
            abouts[name] = otherwise(_package(error))
    return abouts


@app.callback(invoke_without_command=True)
def version(
    asked: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if asked:
        from . import __version__

        print(f"laprune {__version__}")
        raise typer.Exit


@app.command()
def demo(
    n: Annotated[int, typer.Option(min=16, help="How many scores.")] = 10_000_000,
    gamma: Annotated[float, typer.Option(min=0, max=1, help="Hardness.")] = 0.9,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("laprune-demo"),
) -> None:
    """Solve and differentiate a ten-million-score mask, check it, and time it beside others."""
    from .studies import demo as job

    if not 0 < gamma < 1:
        raise typer.BadParameter(f"gamma must lie between 0 and 1, got {gamma:g}")
    out.mkdir(parents=True, exist_ok=True)  # what cannot be written is not computed first
    if not job.run(n, gamma, _device(device), out):
        raise typer.Exit(1)


@bench.command("operator")
def bench_operator(device: Device = "auto", results: Kept = None, quick: Quick = False) -> None:
    """The operator's speed beside the paper's solver, LapSum by sorting and torch.topk."""
    from .studies import bench_operator as study
    from .studies.lab import Options, console, run

    options, results = Options(device=_device(device), quick=quick), _kept(results, quick)
    records = run(study.STUDY, options, results)
    console.print(study.table(records))
    console.print("written:", *map(str, study.draw(records, results)))


@bench.command("scaling")
def bench_scaling(device: Device = "auto", results: Kept = None, quick: Quick = False) -> None:
    """Runtime and memory against n, every operator in a fresh process."""
    from .studies import scaling as study
    from .studies.lab import Options, console, run

    _require("matplotlib")
    options, results = Options(device=_device(device), quick=quick), _kept(results, quick)
    records = run(study.STUDY, options, results)
    console.print("written:", *map(str, study.draw(records, results)))


@bench.command("plot")
def bench_plot(results: Results = Path("results")) -> None:
    """Draw the scaling figures and tables again from what is stored."""
    from .studies import scaling as study
    from .studies.lab import console, load

    records = load(results / f"{study.STUDY.name}.jsonl")
    if not records:
        raise typer.BadParameter(
            f"no scaling records in {results}; run `laprune bench scaling` first"
        )
    console.print("written:", *map(str, study.draw(records, results)))


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which tables and figures; all if none.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Only list them.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="With --list: print JSON.")] = False,
    device: Device = "auto",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with the real data some studies need; --list says which."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder for what is costly to make again: activations, checkpoints."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds; the study's own if not given.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Of the studies that train at length.")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="How many trainings share the device.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the networks that are trained.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so long; a later call goes on.")
    ] = None,
    stored: Annotated[
        bool, typer.Option("--stored", help="Measure nothing: draw what is on file.")
    ] = False,
    quick: Quick = False,
    results: Kept = None,
) -> None:
    """Compute, store and draw the paper's tables and figures.

    What is on file is not measured again, so an interrupted run goes on where it stopped.
    """
    from .studies.lab import Options, console

    if list_:
        abouts = _abouts(STUDIES, _needs)
        if json_:
            print(json.dumps(abouts))
        else:
            for name, about in abouts.items():
                needed = f" (--data: {DATA[name]})" if name in DATA else ""
                console.print(f"{name:24} {about}{needed}", soft_wrap=True, markup=False)
        return
    unknown = sorted(set(names or ()) - set(STUDIES))
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(STUDIES)}")
    if data is not None and not data.is_dir():
        raise UserError(f"no such folder: {data}")
    _require("matplotlib", "scipy")
    options = Options(
        device=device if stored and device != "auto" else _device(device),
        seeds=seeds,
        quick=quick,
        data=data,
        cache=cache,
        epochs=epochs,
        parallel=parallel,
        compiled=compiled,
        deadline=None if minutes is None else time.monotonic() + 60 * minutes,
    )
    results = _kept(results, quick)
    why_not = [_drawn(name, options, results, stored) for name in names or STUDIES]
    if any(why_not):
        raise typer.Exit(1)


def _drawn(name: str, options: Options, results: Path, stored: bool) -> str | None:
    """Measure what is missing of a study and draw it; else say why not, and return that."""
    from .studies import lab

    records: list[Record] = []
    try:
        study = _study(name)
        for each in lab.schedules(study, options, results) if stored else [options]:
            records = (lab.stored if stored else lab.run)(study, each, results)
            if records:
                lab.console.print("written:", *map(str, study.draw(records, results)))
        if records:
            return None
        why_not = f"{name}: nothing is on file"
    except ModuleNotFoundError as error:
        why_not = f"{name} left out: {_needs(_package(error))}"
    except lab.MissingData as error:
        why_not = f"{name} left out: {error}"
    except lab.Unfinished as error:
        why_not = f"{name} not complete: {error}; the same command goes on"
    except (LookupError, ValueError) as error:
        if not stored:
            raise
        why_not = f"{name}: {len(records)} records are too few to draw: {error}"
    lab.console.print(why_not, markup=False)
    return why_not


@app.command()
def solve(
    file: Annotated[
        Path, typer.Argument(help="Scores: .npy, .csv or .pt; rows along the last dimension.")
    ],
    k: Annotated[float, typer.Option(help="The mass of each row, 0 to n.")],
    gamma: Annotated[float, typer.Option(help="Hardness: 0 uniform, 1 hard top-k.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where the mask goes: .npy, .csv or .pt; beside the scores if not given."
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the mask into this .png, .svg or .pdf.")
    ] = None,
    device: Device = "cpu",
    json_: Json = False,
) -> None:
    """Solve the scores in a file: mask out, a summary, and a picture of the first row."""
    from .commands import solve as job
    from .studies.lab import console

    target = job.check(file, out, picture)
    scores = job.read(file)
    solution, summary = job.run(scores.to(_device(device)), k, gamma)
    summary["out"] = str(target)
    job.write(target, solution.mask.cpu())
    n = scores.shape[-1]
    first, p = scores.reshape(-1, n)[0], solution.mask.cpu().reshape(-1, n)[0]
    if picture is not None:
        job.picture(first, p, k, gamma, picture)
        summary["picture"] = str(picture)
    if json_:
        print(json.dumps(job.plain(summary), allow_nan=False))
    else:
        console.print(job.sketch(p), highlight=False, markup=False)
        for name, value in summary.items():
            console.print(f"{name:15} {_brief(value)}", markup=False, soft_wrap=True)
    if unsolved := job.unsolved(summary):
        print(f"laprune: not every row has an answer: {_brief(unsolved)}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def doctor(json_: Json = False) -> None:
    """Versions, which backend serves which device and why, and a self-test of each."""
    from rich.markup import escape

    from .commands import doctor as job
    from .studies.lab import console

    found = job.examine()
    if json_:
        print(json.dumps(found))
    else:
        console.print(f"python {found['python']} on {found['system']}", highlight=False)
        for name, version in found["packages"].items():
            console.print(f"  {name:14} {version or '-'}", highlight=False)
        for device in found["devices"]:
            console.print(f"{device['device']}: {device['hardware']}", highlight=False)
            console.print(
                f"  served by {device['backend']}: {escape(device['why'])}", soft_wrap=True
            )
            for test in device["tests"]:
                console.print(f"  {_verdict(test)}", highlight=False, soft_wrap=True)
    if not found["healthy"]:
        raise typer.Exit(1)


@app.command()
def report(
    results: Results = Path("results"),
    out: Annotated[Path, typer.Option(help="The page.")] = Path("laprune-report.html"),
    json_: Annotated[
        bool, typer.Option("--json", help="Print the comparison with the paper as JSON.")
    ] = False,
) -> None:
    """One page with every figure and table the results hold, to read anywhere, offline."""
    from .commands import report as job
    from .studies.lab import console

    page = job.gather(results, _abouts(REPORTED))
    job.write(page, out)
    if json_:
        print(json.dumps(page.comparison()))
    else:
        console.print(f"written: {out}", soft_wrap=True)


def _brief(value: object) -> str:
    """A summary's value in one line; a range that is one number is written once."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    if isinstance(value, list) and value and isinstance(value[0], float):
        low, high = (f"{x:.9g}" for x in value)
        return low if low == high else f"{low} to {high}"
    return str(value)


def _verdict(test: dict[str, object]) -> str:
    errors = "  ".join(
        f"{name} {test[f'{name}_error']:.0e}" for name in ("mass", "mask", "gradient")
    )
    told = f"  {test['error']}" if test["error"] else ""
    word = "[green]passed[/green]" if test["passed"] else "[red]FAILED[/red]"
    return f"self-test {test['dtype']}: {word}  largest errors: {errors}{told}"
