"""The interactive explorer: the operator in the browser, for the documentation and the report.

`mask.js` is the mathematics (the solver, LapSum, the mean field, the floor) without a page, and
`explorer.js` the sliders and pictures. Each element of class ``laprune-explorer`` or
``laprune-calculator`` on a page that loads them becomes one.
"""

from __future__ import annotations

from importlib import resources

SCRIPTS = ("mask.js", "explorer.js")
STYLES = ("explorer.css",)


def asset(name: str) -> str:
    """The text of one of the files.

    >>> "function solve" in asset("mask.js")
    True
    """
    return (resources.files(__name__) / name).read_text(encoding="utf-8")
