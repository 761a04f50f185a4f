"""How figures look: legible in grey and to the colour-blind, saved as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, dark to light so that they keep their order in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def figure(
    panels: int = 1, width: float = 4.2, height: float = 3.2, columns: int | None = None
) -> tuple[Figure, list[Axes]]:
    """An empty figure of panels, all in one row unless told, with the project's look."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "legend.frameon": False,
            "svg.hashsalt": "laprune",
            "savefig.dpi": 200,
        }
    )
    columns = columns or panels
    rows = -(-panels // columns)
    size = (width * columns, height * rows)
    fig, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    axes = list(grid.flat)
    for empty in axes[panels:]:
        empty.remove()
    return fig, axes[:panels]


def log_scale(axis: Axes) -> None:
    """A logarithmic vertical axis whose numbers are written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def save(fig: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.svg`` and ``name.png`` and close the figure."""
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("svg", "png")]
    for path in paths:
        fig.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(fig)
    return paths
