"""Imports point one way: cli, commands, studies, applications, nn, functional, op, backends."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import laprune

ROOT = Path(laprune.__file__).parent
DEPTH = {
    "__main__": -2,
    "cli": -1,
    "commands": 0,
    "studies": 1,
    # baselines and every application: 2
    "nn": 3,
    "losses": 3,
    "schedules": 3,
    "diagnostics": 3,
    "functional": 4,
    "distributed": 4.2,
    "joint": 4.4,
    "_mesh": 4.6,
    "_arguments": 4.6,
    "_gamma": 7,
    "pieces": 4.8,
    "op": 5,
    "backends": 6,
}
APPLICATIONS = 2
OPERATOR = {name for name, depth in DEPTH.items() if depth >= 3}

# The package's own file gathers the public names of the layers.
MODULES = sorted(p.relative_to(ROOT) for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")
# `import laprune` gives the operator's public names, not those of the layers above it.
PUBLIC = "functional"


def part(module: str) -> str:
    """The part of the package a dotted name belongs to: laprune.nn.x -> nn."""
    names = module.split(".")
    if len(names) > 1 and ((ROOT / names[1]).is_dir() or (ROOT / f"{names[1]}.py").is_file()):
        return names[1]
    return PUBLIC


def imports(path: Path) -> set[str]:
    """The parts of the package that a module imports, wherever in its text."""
    package = ["laprune", *path.with_suffix("").parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{origin}.{alias.name}" for alias in node.names}
    return {part(x) for x in found if x.split(".")[0] == "laprune"}


def depth(name: str) -> float:
    return DEPTH.get(name, APPLICATIONS)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_down(path: Path) -> None:
    own = path.with_suffix("").parts[0]
    allowed = {name for name in imports(path) if name == own or depth(name) > depth(own)}
    # The theory belongs to no layer: it may be used by studies and applications alike.
    allowed |= {"theory"} if depth(own) <= APPLICATIONS else set()
    assert imports(path) - allowed == set()


@pytest.mark.parametrize("path", [p for p in MODULES if p.parts[0] == "theory"], ids=str)
def test_theory_stands_alone(path: Path) -> None:
    assert imports(path) <= {"theory"}


def test_the_walk_sees_what_it_should() -> None:
    assert imports(Path("functional.py")) >= {"op", "backends"}
    assert imports(Path("joint.py")) == {"_arguments", "_mesh", "pieces"}
    assert imports(Path("op.py")) == {"backends"}
    assert imports(Path("nn.py")) == {"_arguments", "_gamma", "functional"}
    assert "studies" in imports(Path("cli.py"))
    assert imports(Path("studies/scaling.py")) >= {"studies", "baselines", PUBLIC}
    assert imports(Path("sae/activations.py")) == {"_gamma", "functional"}
    assert imports(Path("studies/sae_images.py")) >= {"studies", "sae"}
    assert {p.parts[0].removesuffix(".py") for p in MODULES} >= OPERATOR
