"""One self-contained page with everything the results hold, the paper's value beside ours."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

import laprune
from laprune import explorer
from laprune.studies.lab import Record, load, trial

from . import UserError

NOTE = "not_reproduced.md"
"""A file among the results that says, in words, what could not be reproduced and why."""
ROUNDING = 1e-6
"""Where the paper says zero, what float32 masks may be off by."""
CLAIM = "the paper's claim"
"""The first head of tables that say, for each setting, whether a claim holds."""
BOUNDS = {"≲", "≤", "<"}
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_MEDIA = {".svg": "image/svg+xml", ".png": "image/png"}


class Comparison(NamedTuple):
    """One number, or one claim, of the paper and ours."""

    study: str
    quantity: str
    paper: str
    ours: str
    difference: str
    agrees: bool


class Figure(NamedTuple):
    name: str
    uri: str


@dataclass
class Section:
    """What the results hold of one study."""

    name: str
    about: str
    title: str = ""
    body: Markup = field(default_factory=Markup)
    figures: list[Figure] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    uncompared: bool = False
    """The paper's numbers stand beside ours, but are of something else."""
    records: int = 0
    trials: int = 0
    origins: list[dict[str, str]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.records or self.figures or self.body)

    @property
    def agreeing(self) -> int:
        return sum(c.agrees for c in self.comparisons)


@dataclass
class Page:
    sections: list[Section]
    missing: list[Section]
    note: Markup

    @property
    def trials(self) -> bool:
        """Whether there are records of quick runs."""
        return any(s.trials for s in self.sections)

    @property
    def largest(self) -> Section | None:
        """The study that most comparisons are of, if it is not the only one with some."""
        count = sum(len(s.comparisons) for s in self.sections)
        return next((s for s in self.sections if count / 2 < len(s.comparisons) < count), None)

    def comparison(self) -> list[dict[str, Any]]:
        """Every number that the paper gives, beside ours."""
        return [c._asdict() for s in self.sections for c in s.comparisons]


def gather(folder: Path, abouts: dict[str, str]) -> Page:
    """Read a results folder: the studies named, in order, then whatever else is there."""
    if not folder.is_dir():
        raise UserError(_nothing(folder))
    names = [*abouts, *(p.stem for p in sorted(folder.glob("*.jsonl")) if p.stem not in abouts)]
    files: dict[str, list[Path]] = {name: [] for name in names}
    for path in sorted(folder.iterdir()):
        owner = _owner(path, names)
        if owner is not None:
            files[owner].append(path)
    sections = [_section(name, abouts.get(name, ""), files[name]) for name in names]
    return Page(
        [s for s in sections if not s.empty],
        [s for s in sections if s.empty],
        _note(folder / NOTE),
    )


def _nothing(folder: Path) -> str:
    trials = folder.with_name("results-quick")
    hint = "run `laprune reproduce` first"
    if trials.is_dir():
        hint = f"those of --quick are shown by `laprune report --results {trials}`"
    return f"no results in {folder}: {hint}"


def write(page: Page, path: Path) -> None:
    """The page as one HTML file."""
    comparisons = [c for s in page.sections for c in s.comparisons]
    environment = Environment(
        loader=PackageLoader("laprune", "commands"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("report.html").render(
        page=page,
        comparisons=comparisons,
        agreeing=sum(s.agreeing for s in page.sections),
        records=sum(s.records for s in page.sections),
        figures=sum(len(s.figures) for s in page.sections),
        version=laprune.__version__,
        made=datetime.now(timezone.utc).strftime("%d %B %Y"),
        style=Markup(_asset("report.css") + explorer.asset("explorer.css")),
        script=Markup("\n".join([*map(explorer.asset, explorer.SCRIPTS), _asset("report.js")])),
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def agrees(paper: str, ours: str) -> bool | None:
    """Does a value printed as ``mean ± sd`` match the paper's? None where the paper has none.

    >>> agrees("0.980", "0.981 ± 0.001"), agrees("27%", "32% ± 7%"), agrees("0.3", "0.5")
    (True, True, False)
    >>> agrees("≲ 1.0e-07", "3.4e-13"), agrees("≲ 1.0e-07", "1.3e-06"), agrees("not given", "1")
    (True, False, None)

    They match within two standard deviations or one unit of the last printed digit; within the
    rounding of float32 where the paper says zero; a bound is a bound, whatever the spread.
    """
    found, mine = _NUMBER.search(paper), _NUMBER.findall(ours)
    if found is None or not mine:
        return None
    value, mean, *rest = map(_number, (found.group(), *mine))
    slack = _unit(found.group()) if value else ROUNDING
    if paper[: found.start()].strip() in BOUNDS:
        off = mean - value
    else:
        off = abs(mean - value)
        slack = max(slack, 2 * rest[0] if rest else 0.0)
    # A hair more: printed digits are no binary fractions.
    return off <= slack * (1 + 1e-9)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _unit(text: str) -> float:
    """One unit in the last digit of a printed number.

    >>> _unit("0.740"), _unit("27"), _unit("1.0e-07")
    (0.001, 1.0, 1e-08)
    """
    mantissa, _, exponent = text.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return float(f"1e{int(exponent or 0) - decimals}")


def _owner(path: Path, names: list[str]) -> str | None:
    """The study a file belongs to: the longest name its own name starts with."""
    if path.suffix not in {".jsonl", ".md", *_MEDIA} or path.name == NOTE:
        return None
    fits = [n for n in names if path.stem == n or path.stem.startswith(f"{n}_")]
    return max(fits, key=len, default=None)


def _section(name: str, about: str, files: list[Path]) -> Section:
    section = Section(name, about, title=name.replace("_", " ").capitalize())
    drawn = {p.stem for p in files if p.suffix == ".svg"}
    tables: list[tuple[str, Markup]] = []
    for path in files:
        if path.suffix == ".jsonl":
            records = load(path)
            section.records += len(records)
            section.trials += sum(map(trial, records))
            section.origins += _origins(records)
        elif path.suffix == ".md":
            tables.append(_read_table(path.read_text(encoding="utf-8"), section))
        elif path.suffix == ".svg" or path.stem not in drawn:
            data = base64.b64encode(path.read_bytes()).decode()
            uri = f"data:{_MEDIA[path.suffix]};base64,{data}"
            section.figures.append(Figure(path.stem.replace("_", " ").capitalize(), uri))
    shared, own = _titles([title for title, _ in tables])
    section.title = shared or section.title
    for title, (_, body) in zip(own, tables, strict=True):
        section.body += (Markup("<h3>{}</h3>\n").format(title) if title else Markup()) + body
    return section


def _titles(titles: list[str]) -> tuple[str, list[str]]:
    """What the titles of a study's tables have in common, and what each says beyond it.

    >>> _titles(["Loss, 200 epochs", "Loss, 30 epochs"]), _titles(["Loss, 200 epochs"])
    (('Loss', ['200 epochs', '30 epochs']), ('Loss, 200 epochs', ['']))
    """
    parts = [title.split(", ") if title else [] for title in titles]
    shared: list[str] = []
    for words in zip(*filter(None, parts), strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ", ".join(shared), [", ".join(p[len(shared) :]) for p in parts]


def _origins(records: list[Record]) -> list[dict[str, str]]:
    """Where records come from, one line per hardware and set of versions."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in records:
        where = record.get("where", {})
        versions = where.get("versions", {})
        key = tuple(
            str(x or "-")
            for x in (
                where.get("hardware"),
                where.get("python"),
                versions.get("torch"),
                versions.get("laprune"),
            )
        )
        groups.setdefault(key, []).append(where)
    lines = []
    for key, places in groups.items():
        times = sorted(str(w.get("time", ""))[:10] for w in places)
        commits = dict.fromkeys(str(w["commit"]) for w in places if w.get("commit"))
        named = dict(zip(("hardware", "python", "torch", "laprune"), key, strict=True))
        lines.append(
            named
            | {
                "records": str(len(places)),
                "commits": ", ".join(commits) or "-",
                "time": times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}",
            }
        )
    return lines


def _read_table(text: str, section: Section) -> tuple[str, Markup]:
    """Title and page fragment of one Markdown file of the results; the section gets its numbers."""
    title = ""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    if tokens and tokens[0].type == "heading_open" and tokens[0].tag == "h1":
        title, tokens = tokens[1].content, tokens[3:]
    for token in tokens:
        if token.type in {"heading_open", "heading_close"}:
            token.tag = f"h{min(int(token.tag[1]) + 1, 6)}"
    section.comparisons += _compare(tokens, section.name)
    section.uncompared |= any(map(_uncompared, _heads(tokens)))
    rendered = parser.renderer.render(tokens, parser.options, {})
    # Wide tables scroll inside their own frame.
    rendered = rendered.replace("<table>", '<div class="frame"><table class="sortable">')
    return title, Markup(rendered.replace("</table>", "</table></div>"))


def _note(path: Path) -> Markup:
    if not path.exists():
        return Markup()
    return _read_table(path.read_text(encoding="utf-8"), Section("", ""))[1]


def _heads(tokens: list[Token]) -> Iterator[list[str]]:
    """The head of every table."""
    head: list[str] = []
    for i, token in enumerate(tokens):
        if token.type == "th_open":
            head.append(tokens[i + 1].content)
        elif token.type == "thead_close":
            yield head
            head = []


def _compare(tokens: list[Token], study: str) -> list[Comparison]:
    """Mark the cells of tables that have the paper beside ours, or say which claims hold."""
    found: list[Comparison] = []
    heading = ""
    header: list[str] = []
    cells: list[tuple[Token, str]] = []
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            heading = tokens[i + 1].content.partition(":")[0] + ": "
        elif token.type == "table_open":
            header = []
        elif token.type == "th_open":
            header.append(tokens[i + 1].content)
        elif token.type == "tr_open":
            cells = []
        elif token.type == "td_open":
            cells.append((token, tokens[i + 1].content))
        elif token.type == "tr_close" and cells:
            judge = _judge_claims if header[0] == CLAIM else _judge_numbers
            found += judge(study, heading, header, cells)
    return found


def _judge_numbers(
    study: str, heading: str, header: list[str], cells: list[tuple[Token, str]]
) -> list[Comparison]:
    """Columns "paper" or "F1, paper", followed by ours and the difference."""
    found = []
    for j in _papers(header):
        if header[j + 2 : j + 3] != ["difference"]:
            continue
        of = header[j].rpartition(", ")[0]
        paper, ours, difference = (text for _, text in cells[j : j + 3])
        verdict = agrees(paper, ours)
        if verdict is not None:
            _mark(cells[j + 2][0], verdict)
            quantity = heading + cells[0][1] + (f", {of}" if of else "")
            found.append(Comparison(study, quantity, paper, ours, difference, verdict))
    return found


def _papers(header: list[str]) -> list[int]:
    """The columns of a table that hold the paper's numbers.

    >>> _papers(["method", "F1, paper", "F1", "paper", "ours", "difference"])
    [1, 3]
    """
    return [j for j, text in enumerate(header) if text.rpartition(", ")[2] == "paper"]


def _uncompared(header: list[str]) -> bool:
    return any(header[j + 2 : j + 3] != ["difference"] for j in _papers(header))


def _judge_claims(
    study: str, heading: str, header: list[str], cells: list[tuple[Token, str]]
) -> list[Comparison]:
    """One claim per line, one setting per column; the cell ends with what became of it."""
    found = []
    for name, (token, text) in zip(header[1:], cells[1:], strict=True):
        holds = text.endswith("holds")
        _mark(token, holds)
        numbers, _, verdict = text.rpartition(") ")
        found.append(
            Comparison(study, f"{name}: {cells[0][1]}", "claimed", f"{numbers})", verdict, holds)
        )
    return found


def _mark(cell: Token, agreeing: bool) -> None:
    cell.attrJoin("class", "agrees" if agreeing else "differs")


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")
