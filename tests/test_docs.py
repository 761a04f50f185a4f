"""Every block of the documentation runs as printed, and every command in it exists."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer.main

from laprune import cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(
    r"(?:<!-- needs: (?P<needs>[\w ]+) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$"
    r"(?:\n^```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    kind: str
    text: str
    printed: str | None
    needs: list[str]


def blocks(page: Path, kind: str) -> list[Block]:
    return [
        Block(m["kind"], m["text"], m["printed"], (m["needs"] or "").split())
        for m in BLOCK.finditer(page.read_text(encoding="utf-8"))
        if m["kind"] == kind
    ]


def named(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=lambda p: p.relative_to(DOCS).as_posix())


@pytest.fixture
def usual_printing() -> Iterator[None]:
    """A page may change how tensors print."""
    yield
    torch.set_printoptions(profile="default")


@pytest.mark.usefixtures("one_thread", "usual_printing")
@named([p for p in PAGES if blocks(p, "python")])
def test_code_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "page"}
    left_out = []
    for block in blocks(page, "python"):
        missing = [name for name in block.needs if importlib.util.find_spec(name) is None]
        if missing:
            left_out += missing
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            if block.needs:  # other people's packages may warn
                warnings.simplefilter("ignore")
            exec(compile(block.text, str(page), "exec"), space)
        if block.printed is not None:
            assert out.getvalue() == block.printed
    if left_out:
        pytest.skip(f"the rest of the page ran; not installed: {', '.join(left_out)}")


@named([p for p in PAGES if blocks(p, "console")])
def test_commands_exist(page: Path) -> None:
    lines = [line for b in blocks(page, "console") for line in b.text.splitlines()]
    commands = [shlex.split(x)[2:] for x in lines if x.startswith("$ laprune ")]
    assert commands
    for arguments in commands:
        parse(arguments)


def parse(arguments: list[str]) -> None:
    """Read a command line to the end without running it."""
    command: Any = typer.main.get_command(cli.app)
    context = command.make_context("laprune", list(arguments), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def test_studies_on_real_data_are_in_the_table() -> None:
    lines = (DOCS / "howto/command-line.md").read_text().splitlines()
    rows = [x.split("|")[1:3] for x in lines if x.startswith("| `")]
    found = {name: row[1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert found.keys() == cli.DATA.keys()
    for name, needed in cli.DATA.items():
        assert all(folder in found[name] for folder in re.findall(r"\w+/", needed))


def test_the_parser_refuses_what_is_not_there() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["solve", "x.npy", "--nonsense"])
    with pytest.raises(Exception, match="No such command"):
        parse(["bench", "nonsense"])


def test_navigation_and_pages_are_the_same() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    nav = text[text.index("\nnav:") : text.index("\nextra_css")]
    assert set(re.findall(r"[\w/-]+\.md", nav)) == {p.relative_to(DOCS).as_posix() for p in PAGES}


def test_nothing_comes_from_elsewhere() -> None:
    assert "font: false" in (ROOT / "mkdocs.yml").read_text()
    for path in [ROOT / "mkdocs.yml", *PAGES, *DOCS.glob("assets/*")]:
        assert not re.search(
            r"(src|href)=.https?:|url\(https?:|\bhttps?://\S+\.(js|css)", path.read_text()
        )


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "arithmatex" not in text, page
        assert "[[results" not in text, page
        fetched = re.findall(
            r'<(?:script|img|link|iframe)[^>]*?(?:src|href)="(https?:[^"]*)"', text
        )
        assert [x for x in fetched if "canonical" not in x] == [], page
