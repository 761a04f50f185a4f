"""What studies share: seeds, aggregation over them, and the table of the paper beside ours."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .lab import Options, Record
from .style import COLOURS, LINES, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats: TypeAlias = NDArray[np.float64]

QUICK_SEEDS = 2


class Spread(NamedTuple):
    """A mean over seeds and the sample standard deviation, 0 for a single seed."""

    mean: float
    sd: float


class Row(NamedTuple):
    """One line of a table: what was measured, what the paper says, and what came out."""

    quantity: str
    paper: float | None
    """None where the paper gives no number."""
    ours: Spread
    form: str = ".3f"
    """How numbers are written, as in a format string."""
    bound: str = ""
    """Set where the paper's value is a bound: what to write before it."""


def seeds(options: Options, usual: int) -> range:
    """The seeds asked for, else as many as the study wants, else the few of a quick run.

    >>> seeds(Options(), 5), seeds(Options(quick=True), 5), seeds(Options(seeds=3, quick=True), 5)
    (range(0, 5), range(0, 2), range(0, 3))
    """
    few = min(usual, QUICK_SEEDS) if options.quick else usual
    return range(few if options.seeds is None else options.seeds)


def select(records: Iterable[Record], **wanted: object) -> list[Record]:
    """The records whose setting has these values.

    >>> select([{"setting": {"a": 0.1, "seed": 0}}, {"setting": {"a": 0.5, "seed": 0}}], a=0.5)
    [{'setting': {'a': 0.5, 'seed': 0}}]
    """
    wanted_items = wanted.items()
    return [
        r for r in records if all(r["setting"].get(key) == value for key, value in wanted_items)
    ]


def stack(records: Sequence[Record], key: str) -> Floats:
    """A result of each record, one row per record.

    >>> stack([{"result": {"x": [1, 2]}}, {"result": {"x": [3, 4]}}], "x").tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    return np.array([r["result"][key] for r in records], dtype=np.float64)


def spread(values: ArrayLike) -> Spread:
    """Mean and sample standard deviation of one number per seed.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, sd=1.4142135623730951)
    """
    numbers = [float(x) for x in np.ravel(values)]
    return Spread(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0)


def write(
    folder: Path, name: str, title: str, rows: Iterable[Row], notes: Sequence[str] = ()
) -> Path:
    """Write ``name.md``: the table quantity, paper, ours, difference, then the notes."""
    header = ("quantity", "paper", "ours (mean ± sd)", "difference")
    body = [(row.quantity, _paper(row), pm(row.ours, row.form), _difference(row)) for row in rows]
    return page(folder, name, title, [markdown(header, body), *notes])


def page(folder: Path, name: str, title: str, parts: Iterable[str]) -> Path:
    """Write ``name.md``: a title, then tables and paragraphs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.md"
    path.write_text("\n\n".join([f"# {title}", *parts]) + "\n")
    return path


def prose(doc: str | None) -> str:
    """A module's docstring without its first line, for a page: roles become plain code.

    >>> prose("Title.\\n\\nSee :class:`laprune.nn.SoftTopK`.")
    'See `laprune.nn.SoftTopK`.'
    """
    body = (doc or "").partition("\n\n")[2].strip()
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", body)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, first column to the left and the others to the right.

    >>> print(markdown(("x", "y"), [("a", "1")]))
    | x | y |
    |---|--:|
    | a | 1 |
    """
    rule = "|---|" + "--:|" * (len(header) - 1)
    return "\n".join([_line(header), rule, *map(_line, rows)])


def pm(value: Spread, form: str) -> str:
    """Mean ± standard deviation, the latter left out where it is nothing.

    >>> pm(Spread(0.5, 0.01), ".2f"), pm(Spread(1, 0), ".2f")
    ('0.50 ± 0.01', '1.00')
    """
    mean = f"{value.mean:{form}}"
    return f"{mean} ± {value.sd:{form}}" if value.sd else mean


def line(i: int) -> dict[str, Any]:
    """The i-th line style."""
    return {"color": COLOURS[i], "linestyle": LINES[i]}


def dots(i: int, hollow: bool = False, size: float = 4.5) -> dict[str, Any]:
    """The i-th marker style, without a line."""
    face = "white" if hollow else COLOURS[i]
    style = {"color": COLOURS[i], "marker": MARKERS[i], "markerfacecolor": face}
    return style | {"markersize": size, "linestyle": "none"}


def plot(
    axis: Axes, x: ArrayLike, y: Floats, i: int, label: str | None = None, **kwargs: Any
) -> None:
    """The mean over seeds (rows of y) in the i-th style, and a band of one standard deviation."""
    mean = y.mean(0)
    sd = y.std(0, ddof=1) if len(y) > 1 else np.zeros_like(mean)
    axis.plot(x, mean, label=label, **(dots(i, size=4) | line(i) | kwargs))
    axis.fill_between(x, mean - sd, mean + sd, color=COLOURS[i], alpha=0.2, linewidth=0)


def mark_paper(axis: Axes, x: ArrayLike, y: ArrayLike, label: str = "paper") -> None:
    """Stars where the paper gives a value."""
    style: dict[str, Any] = {"color": "black", "edgecolors": "white", "linewidths": 0.6}
    axis.scatter(x, y, marker="*", s=130, zorder=5, label=label, clip_on=False, **style)


def legend_below(axis: Axes, columns: int) -> None:
    """The legend under the axis, where it hides no data."""
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
    axis.legend(**place, ncols=columns, fontsize=8, columnspacing=1.2, handlelength=2.4)


def _paper(row: Row) -> str:
    return "not given" if row.paper is None else f"{row.bound}{row.paper:{row.form}}"


def _difference(row: Row) -> str:
    return "" if row.paper is None else f"{row.ours.mean - row.paper:+{row.form}}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
