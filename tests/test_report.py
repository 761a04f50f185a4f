"""The report holds what the results hold, needs nothing from outside, and judges fairly."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from laprune.commands import UserError, report
from laprune.studies.tables import Row, Spread, write

WHERE = {
    "hardware": "one machine",
    "python": "3.12",
    "versions": {"torch": "2.9", "laprune": "0.1"},
    "commit": "abc",
    "time": "2026-01-02T03:04:05+00:00",
}
SVG = "<svg xmlns='http://www.w3.org/2000/svg' width='10' height='10'></svg>"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [
        Row("near", 0.5, Spread(0.51, 0.01)),
        Row("far <b>", 0.5, Spread(0.6, 0.01)),
        Row("alone", None, Spread(1.0, 0.0)),
    ]
    write(tmp_path, "first", "The first", rows, ["Why it is so."])
    records = [{"setting": {}, "result": {}, "where": WHERE}] * 3
    (tmp_path / "first.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "other.jsonl").write_text(json.dumps(records[0]))
    for name in ("first.svg", "first_more.svg", "other.svg"):
        (tmp_path / name).write_text(SVG)
    (tmp_path / "first.png").write_bytes(b"the same picture again")
    (tmp_path / "other_two.png").write_bytes(b"a picture without an svg")
    (tmp_path / report.NOTE).write_text("No such *machine* here.")
    return tmp_path


@pytest.fixture
def page(results: Path) -> report.Page:
    return report.gather(results, {"first": "about it", "second": "never run"})


def test_everything_is_gathered(page: report.Page) -> None:
    first, other = page.sections
    assert (first.title, first.about, first.records) == ("The first", "about it", 3)
    assert [f.name for f in first.figures] == ["First", "First more"]
    assert (other.name, other.records, len(other.figures)) == ("other", 1, 2)
    assert [s.name for s in page.missing] == ["second"]
    assert first.origins[0]["hardware"] == "one machine"
    assert first.origins[0]["records"] == "3"


def test_the_paper_is_beside_ours(page: report.Page) -> None:
    found = {c["quantity"]: c["agrees"] for c in page.comparison()}
    assert found == {"near": True, "far <b>": False}


def test_tables_of_other_shapes_are_read(tmp_path: Path) -> None:
    (tmp_path / "wide.md").write_text(
        """# Wide

## setting: about it

| method | F1, paper | ours | difference | time, paper | ours | difference | more |
|---|--:|--:|--:|--:|--:|--:|--:|
| a | 0.5 ± 0.1 | 0.9 ± 0.1 | +0.4 | 1.0 | 1.0 | +0.0 | 3 |
| b |  | 0.9 |  | | 1.0 |  | 3 |

| the paper's claim | here | there |
|---|--:|--:|
| a above b | +0.1 (p = 0.01) holds | -0.1 (p = 0.2) no difference shown |
"""
    )
    found = report.gather(tmp_path, {"wide": ""}).comparison()
    assert [(c["quantity"], c["paper"], c["difference"], c["agrees"]) for c in found] == [
        ("setting: a, F1", "0.5 ± 0.1", "+0.4", False),
        ("setting: a, time", "1.0", "+0.0", True),
        ("here: a above b", "claimed", "holds", True),
        ("there: a above b", "claimed", "no difference shown", False),
    ]


@pytest.mark.parametrize(
    ("paper", "ours", "verdict"),
    [
        ("0.50", "0.51", True),
        ("0.50", "0.52", False),
        ("0.50", "0.52 ± 0.01", True),
        ("1,000", "1,001", True),
        ("-3", "3", False),
        ("0.0e+00", "8.7e-07", True),
        ("0.0e+00", "1.0e-03", False),
        ("≲ 1.0e-07", "2.0e-07 ± 1.0e-07", False),
        ("≲ 1.0e-07", "1.0e-13", True),
        ("not given", "0.5", None),
    ],
)
def test_agreement(paper: str, ours: str, verdict: bool | None) -> None:
    assert report.agrees(paper, ours) is verdict


class _Reader(HTMLParser):
    """Tags that are open, addresses that are asked for, and ids."""

    VOID = ("meta", "link", "img", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [str(given[key]) for key in ("src", "href") if key in given]
        self.ids |= {str(given["id"])} if "id" in given else set()
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone(page: report.Page, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    report.write(page, out)
    text = out.read_text(encoding="utf-8")
    reader = _Reader()
    reader.feed(text)
    assert reader.open == []
    assert all(a.startswith(("#", "data:")) for a in reader.addresses)
    assert {a[1:] for a in reader.addresses if a.startswith("#")} <= reader.ids
    assert "@import" not in text
    assert not re.search(r"url\(", text)
    for said in ("Why it is so.", "never run", "No such <em>machine</em> here.", "one machine"):
        assert said in text
    assert "far &lt;b&gt;" in text
    # Once under the study, once in the list of what differs.
    assert len(re.findall(r'<td[^>]* class="differs"', text)) == 2


def test_a_file_belongs_to_the_longest_name(tmp_path: Path) -> None:
    for name in ("first.svg", "first_second.svg", "first_second_third.svg"):
        (tmp_path / name).write_text(SVG)
    page = report.gather(tmp_path, {"first": "", "first_second": ""})
    assert [len(s.figures) for s in page.sections] == [1, 2]


def test_no_results_no_page(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no results in .*nowhere: run `laprune reproduce` first"):
        report.gather(tmp_path / "nowhere", {})
    (tmp_path / "results-quick").mkdir()
    with pytest.raises(UserError, match=r"laprune report --results .*results-quick"):
        report.gather(tmp_path / "results", {})


def test_trials_are_called_trials(page: report.Page, results: Path) -> None:
    said = "These are trials"
    report.write(page, results / "page.html")
    assert said not in (results / "page.html").read_text(encoding="utf-8")
    record = {"setting": {}, "result": {}, "where": WHERE, "quick": True}
    (results / "other.jsonl").write_text(json.dumps(record))
    report.write(report.gather(results, {}), results / "page.html")
    assert said in (results / "page.html").read_text(encoding="utf-8")


def test_numbers_of_something_else_are_not_compared(results: Path) -> None:
    table = "| method | FVU, paper | FVU |\n|---|--:|--:|\n| a | 0.1 | 0.2 |\n"
    (results / "other.md").write_text(table)
    page = report.gather(results, {"first": "about it", "other": "about that"})
    assert [(s.name, s.uncompared) for s in page.sections] == [("first", False), ("other", True)]
    assert len(page.comparison()) == 2
    report.write(page, results / "page.html")
    assert (results / "page.html").read_text(encoding="utf-8").count("are not compared") == 1


def test_two_tables_of_a_study_keep_their_titles(results: Path) -> None:
    for name, epochs in (("first_long", "200 epochs"), ("first_short", "30 epochs")):
        write(results, name, f"Loss, ResNet, {epochs}", [Row("x", 0.5, Spread(0.5, 0.01))])
    (results / "first.md").unlink()
    first, _ = report.gather(results, {"first": "about it"}).sections
    assert first.title == "Loss, ResNet"
    assert re.findall("<h3>(.*)</h3>", first.body) == ["200 epochs", "30 epochs"]


def test_the_study_that_most_comparisons_are_of_is_named(results: Path) -> None:
    assert report.gather(results, {}).largest is None
    write(results, "other", "The other", [Row("near", 0.5, Spread(0.5, 0.01))])
    largest = report.gather(results, {}).largest
    assert largest is not None
    assert (largest.name, largest.agreeing, len(largest.comparisons)) == ("first", 1, 2)


def test_the_projects_own_results_make_a_page(tmp_path: Path) -> None:
    folder = Path(__file__).parent.parent / "results"
    page = report.gather(folder, {})
    assert sum(len(s.figures) for s in page.sections) == len(list(folder.glob("*.svg")))
    assert len(page.comparison()) > 20
    uncompared = {s.name for s in page.sections if s.uncompared}
    assert uncompared == {"classification", "collapse", "sae_images"}  # some of their tables


def test_the_projects_note_counts_what_differs() -> None:
    page = report.gather(Path(__file__).parent.parent / "results", {})
    counts = Counter(
        (c["study"], c["paper"] == "claimed") for c in page.comparison() if not c["agrees"]
    )
    said = {
        ("classification", False): "Classification, 1 number",
        ("feature_selection", True): "Feature selection, 16 claims",
        ("feature_selection", False): "16 claims and 11 numbers",
        ("mean_field_agreement", False): "Mean-field agreement, 2 numbers",
        ("solver_diagnostic", False): "Solver, 2 numbers",
    }
    assert counts == {key: int(re.findall(r"\d+", text)[-1]) for key, text in said.items()}
    assert all(text in page.note for text in said.values())
