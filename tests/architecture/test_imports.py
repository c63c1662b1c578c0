"""Imports go one way: DESIGN's order, read off the syntax trees, imports inside functions included."""

import ast
import sys

import pytest

ORDER = (
    ("shapes", "config", "rng", "files"),
    ("processes",),
    ("nn",),
    ("models",),
    ("data", "objectives", "samplers"),
    ("pipelines", "likelihood", "metrics"),
    ("analyses",),
    ("engine",),
    ("recipes",),
    ("reports",),
    ("experiments",),
    ("cli",),
)
RANK = {layer: rank for rank, layers in enumerate(ORDER) for layer in layers}
ALWAYS_THERE = {"torch", "jaxtyping"}  # what processes/ may import besides the standard library


def imported(node: ast.AST, module: str, *, package: bool) -> list[str]:
    """The modules that an import statement names, in full."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parents = module.split(".") if package else module.split(".")[:-1]
        parents = parents[: len(parents) - node.level + 1]
        base = ".".join([*parents, base] if base else parents)
    return [f"diladiff.{alias.name}" for alias in node.names] if base == "diladiff" else [base]


def broken(sources) -> list[str]:
    """Every import that goes against the order."""
    found = []
    for source in sources:
        if source.module in ("diladiff", "diladiff.__main__"):
            continue
        own = source.module.split(".")[1]
        for node in ast.walk(source.tree):
            for name in imported(node, source.module, package=source.path.endswith("__init__.py")):
                if not name.startswith("diladiff."):
                    continue
                other = name.split(".")[1]
                rank = RANK.get(other, RANK["cli"] - 0.5)  # a name of the package itself: for the command line alone
                if own not in RANK or (other != own and rank >= RANK[own]):
                    found.append(f"{source.path}:{node.lineno}: {own} may not import {name}")
    return found


def test_imports_go_one_way(sources):
    assert not broken(sources)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("src/diladiff/processes/masked.py", "from diladiff.nn.blocks import Block"),
        ("src/diladiff/samplers/tokens.py", "import diladiff.objectives.base"),
        ("src/diladiff/objectives/masked.py", "def f():\n    from ..samplers import tokens"),
        ("src/diladiff/engine/loop.py", "from diladiff import recipes"),
        ("src/diladiff/rng.py", "from . import config"),
        ("src/diladiff/pipelines/masked_lm.py", "from diladiff import MaskedLM"),
    ],
)
def test_a_wrong_import_is_seen(parsed, path, line):
    assert len(broken([parsed(path, line)])) == 1


def test_every_module_has_its_place(sources):
    top = {source.module.split(".")[1] for source in sources if source.module.count(".")}
    assert top - set(RANK) - {"__main__"} == set()


def test_importing_the_package_imports_no_layer(sources):
    """Or else deleting a later layer would break the earlier ones."""
    (root,) = [source for source in sources if source.module == "diladiff"]
    names = [name for node in root.tree.body for name in imported(node, "diladiff", package=True)]
    assert not [name for name in names if name.startswith("diladiff")]


def test_processes_are_pure_torch(sources):
    wrong = []
    for source in sources:
        if source.module.startswith("diladiff.processes"):
            for node in ast.walk(source.tree):
                tops = {name.split(".")[0] for name in imported(node, source.module, package=False)}
                wrong += [
                    f"{source.path}: {top}" for top in tops - ALWAYS_THERE - {"diladiff"} - sys.stdlib_module_names
                ]
    assert not wrong
