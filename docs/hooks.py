"""What the site needs beyond Markdown: formulas as MathML, the results, the explorer's files."""

from __future__ import annotations

import html
import logging
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
EXPLORER = ROOT / "src" / "laprune" / "explorer"
log = logging.getLogger("mkdocs.hooks.laprune")

_FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.S)
_FUNCTION = re.compile(r"<(m[io])>(log|ln)</\1>(?!<mo[^>]*>&#x00028;)")
_PLACE = re.compile(r"^\[\[results:(\w+)(?: (\d+))?\]\]$", re.M)


def on_files(files: Files, config: Any) -> Files:
    """The explorer's files and the figures of the results become part of the site."""
    extra = {f"assets/{p.name}": p for p in EXPLORER.iterdir() if p.suffix in {".js", ".css"}}
    extra |= {f"results/{p.name}": p for p in RESULTS.glob("*.svg")}
    for name, path in extra.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """``[[results:NAME]]`` stands for the figures and the table of a study; with a number, for its
    first so many sections."""
    up = "../" * page.file.src_uri.count("/")
    return _PLACE.sub(lambda m: _study(m.group(1), m.group(2), up), markdown)


def _study(name: str, sections: str | None, up: str) -> str:
    figures = sorted(p for p in RESULTS.glob("*.svg") if _belongs(p, name))
    tables = sorted(p for p in RESULTS.glob("*.md") if _belongs(p, name))
    if not figures and not tables:
        log.warning("results hold nothing of %s", name)
    parts = [f"![{p.stem.replace('_', ' ')}]({up}results/{p.name})" for p in figures]
    for path in tables:
        # The page has its own titles.
        text = re.sub(r"^# .*\n", "", path.read_text(encoding="utf-8"))
        if sections is not None:
            text = "".join(re.split(r"^(?=## )", text, flags=re.M)[: 1 + int(sections)])
            text += f"\n\nMore in `results/{path.name}`."
        parts.append(re.sub(r"^#", "###", text, flags=re.M))
    return "\n\n".join(parts)


def _belongs(path: Path, name: str) -> bool:
    return path.stem == name or path.stem.startswith(f"{name}_")


def on_page_content(content: str, **_: Any) -> str:
    """Formulas are MathML, which browsers draw themselves."""
    return _FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match.group(1) == "div" else "inline"
    formula = convert(html.unescape(match.group(2)).strip(), display=display)
    # A function's name stands apart from its argument, as in TeX.
    formula = _FUNCTION.sub(r'\g<0><mspace width="0.17em"></mspace>', formula)
    return f'<div class="formula">{formula}</div>' if display == "block" else formula
