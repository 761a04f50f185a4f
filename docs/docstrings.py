"""Docstrings as the site shows them: examples fenced, references as links."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod):`~?([\w.]+)`")
_EXAMPLE = re.compile(r"((?:^[ ]*>>> .*\n?)(?:^[ ]*\S.*\n?)*)", re.M)


class Readable(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _fence(_ROLE.sub(_link, obj.docstring.value))


def _link(match: re.Match[str]) -> str:
    name = match.group(1)
    target = name if name.startswith("laprune") else f"laprune.{name}"
    return f'<autoref identifier="{target}" optional><code>{name}</code></autoref>'


def _fence(text: str) -> str:
    """Examples, which Markdown takes for quotations, as code."""

    def block(match: re.Match[str]) -> str:
        lines = match.group(1).rstrip("\n")
        indent = re.match(r" *", lines).group()  # type: ignore[union-attr]
        return f"{indent}```pycon\n{lines}\n{indent}```\n"

    return _EXAMPLE.sub(block, text)
