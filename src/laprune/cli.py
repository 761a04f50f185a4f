"""The command line."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

if TYPE_CHECKING:
    from .studies.lab import Study

app = typer.Typer(
    help="Differentiable top-k masks with exact mass and controlled hardness.", no_args_is_help=True
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
    "pruning",
    "rank_cost",
)
"""The tables and figures, by the names of their modules in `laprune.studies`."""

Results = Annotated[Path, typer.Option(help="Where records, figures and tables are kept.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small version that takes seconds.")]


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(
            f"{name} is not available here: {str(error).splitlines()[0]}"
        ) from None
    return name


def _study(module: str) -> Study:
    return importlib.import_module(f".studies.{module}", __package__).STUDY


@app.command()
def demo(
    n: Annotated[int, typer.Option(min=16, help="How many scores.")] = 10_000_000,
    gamma: Annotated[float, typer.Option(min=0, max=1, help="Hardness.")] = 0.9,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("laprune-demo"),
) -> None:
    """Solve and differentiate a ten-million-score mask, check it, and time it beside others."""
    from .studies import demo as job

    if not job.run(n, gamma, _device(device), out):
        raise typer.Exit(1)


@bench.command("operator")
def bench_operator(
    device: Device = "auto", results: Results = Path("results"), quick: Quick = False
) -> None:
    """The operator's speed beside the paper's solver, LapSum by sorting and torch.topk."""
    from .studies import bench_operator as study
    from .studies.lab import Options, console, run

    options = Options(device=_device(device), quick=quick)
    records = run(study.STUDY, options, results)
    console.print(study.table(records))
    console.print("written:", *map(str, study.draw(records, results)))


@bench.command("scaling")
def bench_scaling(
    device: Device = "auto", results: Results = Path("results"), quick: Quick = False
) -> None:
    """Runtime and memory against n, every operator in a fresh process."""
    from .studies import scaling as study
    from .studies.lab import Options, console, run

    records = run(study.STUDY, Options(device=_device(device), quick=quick), results)
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
    device: Device = "auto",
    data: Annotated[
        Path | None, typer.Option(help="Folder with the real data some studies need.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds; the study's own if not given.")
    ] = None,
    quick: Quick = False,
    results: Results = Path("results"),
) -> None:
    """Compute, store and draw the paper's tables and figures."""
    from .studies.lab import Options, console, run

    if list_:
        for name in STUDIES:
            console.print(f"{name:24} {_study(name).about}")
        return
    unknown = sorted(set(names or ()) - set(STUDIES))
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(STUDIES)}")
    options = Options(device=_device(device), seeds=seeds, quick=quick, data=data)
    for name in names or STUDIES:
        study = _study(name)
        records = run(study, options, results)
        console.print("written:", *map(str, study.draw(records, results)))
