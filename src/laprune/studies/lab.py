"""The laboratory: what a study is, and how it is run, stored, resumed and drawn.

A study says which settings it measures, how one of them is measured, and how the stored records are
drawn. The laboratory writes one JSON line per setting, with hardware, versions and commit, before
anything is aggregated; settings already on file are skipped, so an interrupted study goes on where
it stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from laprune import __version__

Setting = dict[str, Any]
Record = dict[str, Any]
Measured = tuple[Setting, dict[str, Any]]
"""A setting and its result."""

KINDS = ("hardware", "threads", "backbone", "model", "epochs")
"""Where all settings of a study have one of these, records that differ in it are not drawn as one:
they are of different machines, networks or schedules."""

console = Console()


@dataclass(frozen=True)
class Options:
    """What a user may choose when running any study."""

    device: str = "cpu"
    seeds: int | None = None  # None: as many as the study wants
    quick: bool = False
    data: Path | None = None
    cache: Path | None = None  # a folder for what is costly to make again
    epochs: int | None = None  # of studies that train at length; None: the paper's
    parallel: int | None = None  # how many trainings share the device; None: the study's choice
    compiled: bool = False  # whether networks are compiled
    deadline: float | None = None  # in time.monotonic(): begin nothing more after it

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


class MissingData(RuntimeError):
    """A study needs data that are not there; the message says which."""


class Unfinished(RuntimeError):
    """The time given was up before a study was complete; what is done is on file."""


@dataclass(frozen=True)
class Study:
    """What is computed, what is stored, what is drawn."""

    name: str
    about: str
    settings: Callable[[Options], Iterable[Setting]]
    measure: Callable[[Setting, Options], dict[str, Any]]
    draw: Callable[[list[Record], Path], list[Path]]
    together: (
        Callable[[list[Setting], Options], Iterator[tuple[Setting, dict[str, Any]]]] | None
    ) = None
    """In place of `measure` where settings are measured side by side: each result as it comes."""


def run(study: Study, options: Options, folder: Path) -> list[Record]:
    """Measure what is missing and return all that the study is drawn from."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{study.name}.jsonl"
    done = {_key(r["setting"]): r for r in load(path)}
    wanted = list(study.settings(options))
    missing = [s for s in wanted if _key(s) not in done]
    where, trial = provenance(options.device), {"quick": True} if options.quick else {}
    with _progress() as progress:
        task = progress.add_task(
            study.name, total=len(wanted), completed=len(wanted) - len(missing)
        )

        def tell(setting: Setting) -> None:
            progress.update(task, description=f"{study.name}: {_brief(setting)}")

        for setting, result in _measured(study, missing, options, tell):
            record = {"setting": setting, "result": result, "where": where, **trial}
            _append(path, json.dumps(record))
            done[_key(setting)] = record
            progress.advance(task)
        progress.update(task, description=study.name)
    left = sum(_key(s) not in done for s in wanted)
    if left:
        raise Unfinished(f"{len(wanted) - left} of {len(wanted)} settings are on file")
    return stored(study, options, folder)


def _measured(
    study: Study, missing: list[Setting], options: Options, tell: Callable[[Setting], None]
) -> Iterator[Measured]:
    if study.together is not None:
        yield from study.together(missing, options)
        return
    for setting in missing:
        if options.late:
            return
        tell(setting)
        yield setting, study.measure(setting, options)


def stored(study: Study, options: Options, folder: Path) -> list[Record]:
    """The records a study is drawn from, those of the wanted settings first and in their order.

    All that is on file, whatever machine, data and packages it took: a drawing must not shrink
    because they are not here. Trials are for trials only, and of several kinds (see `KINDS`) it is
    the one that is wanted or, where none is on file, the most frequent.
    """
    wanted = list(study.settings(options))
    asked = {_key(s) for s in wanted}
    on_file = {_key(r["setting"]): r for r in load(folder / f"{study.name}.jsonl")}
    records = [r for key, r in on_file.items() if key in asked or trial(r) == options.quick]
    fields = [name for name in KINDS if all(name in r["setting"] for r in records)]

    def kind(setting: Setting) -> str:
        return _key({name: setting.get(name) for name in fields})

    counts = Counter(kind(r["setting"]) for r in records).most_common()
    kinds = [k for k in map(kind, wanted) if k in dict(counts)] + [k for k, _ in counts]
    places = {_elsewhere(s): i for i, s in enumerate(wanted)}
    return sorted(
        (r for r in records if kind(r["setting"]) == kinds[0]),
        key=lambda r: places.get(_elsewhere(r["setting"]), len(places)),
    )


def schedules(study: Study, options: Options, folder: Path) -> list[Options]:
    """The options, once for every number of epochs on file where none in particular is wanted."""
    records = [r for r in load(folder / f"{study.name}.jsonl") if trial(r) == options.quick]
    epochs = {r["setting"].get("epochs") for r in records}
    if options.epochs is not None or None in epochs or len(epochs) < 2:
        return [options]
    return [replace(options, epochs=n) for n in sorted(epochs, reverse=True)]


def trial(record: Record) -> bool:
    """Whether a record was made by a quick run."""
    return record.get("quick", False)


def load(path: Path) -> list[Record]:
    """The records of a results file; a line cut short by an interruption is passed over."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _append(path: Path, line: str) -> None:
    """Add a line; one that an interruption cut short is ended first."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read() == b"\n" else "\n" + line
        file.write((line + "\n").encode())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: on small problems more of them only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def provenance(device: str) -> dict[str, Any]:
    """Hardware, versions, commit and time."""
    packages = {"laprune": __version__}  # known in a source tree that is not installed, too
    peers = ("entmax", "diffsort", "numba", "jax", "jaxopt")
    for name in ("torch", "triton", "numpy", "scipy", *peers):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": packages,
        "commit": _commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def hardware(device: str) -> str:
    """The name of the device, as its maker gives it."""
    if torch.device(device).type == "cuda":
        available = torch.cuda.is_available()
        return torch.cuda.get_device_name(device) if available else "a GPU that is not here"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def _commit() -> str | None:
    """The commit of the source tree, "-dirty" where its source differs; results may. Of an
    installed wheel there is none."""
    package = Path(__file__).parents[1]

    def git(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", *command], cwd=package, capture_output=True, text=True, check=False
        )

    try:
        if not git("ls-files", "studies/lab.py").stdout:  # somebody else's repository, or none
            return None
        commit = git("rev-parse", "--short", "HEAD").stdout.strip()
        changed = git("status", "--porcelain", "--", ".").stdout.strip()
    except OSError:  # no git
        return None
    return commit + "-dirty" * bool(changed)


def _key(setting: Setting) -> str:
    return json.dumps(setting, sort_keys=True)


def _elsewhere(setting: Setting) -> str:
    """The key of a setting on no machine in particular."""
    return _key({name: x for name, x in setting.items() if name != "hardware"})


def _brief(setting: Setting) -> str:
    return " ".join(f"{k}={v}" for k, v in setting.items())


def _progress() -> Progress:
    # What is being measured comes last: on a narrow terminal it is cut, and nothing else.
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return Progress(
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", table_column=rest),
        console=console,
        expand=True,
        speed_estimate_period=3600,  # seconds; a single setting may take minutes
    )
