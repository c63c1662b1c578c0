"""What the checks of the house read: every file of the project, and the syntax trees of those in Python."""

import ast
import dataclasses
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Source:
    """A Python file: its path from the root of the project, its text, its tree and, in src, its module's name."""

    path: str
    text: str
    tree: ast.Module
    module: str | None


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def project_files() -> list[str]:
    """Every file that is tracked or about to be, from the root of the project."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(path for path in set(listed.split("\0")) if path and (ROOT / path).is_file())


@pytest.fixture(scope="session")
def python_files(project_files: list[str]) -> list[Source]:
    """Every Python file of the project, parsed."""
    return [parse(path, (ROOT / path).read_text("utf-8")) for path in project_files if path.endswith(".py")]


@pytest.fixture(scope="session")
def sources(python_files: list[Source]) -> list[Source]:
    """The package's own modules."""
    found = [source for source in python_files if source.module is not None]
    assert len(found) > 20
    return found


def parse(path: str, text: str) -> Source:
    """A source from its path and text; a path in src names a module."""
    module = None
    if path.startswith("src/"):
        module = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return Source(path, text, ast.parse(text, filename=path), module)


@pytest.fixture(scope="session")
def parsed():
    """The function that parses, for tests that a check can fail."""
    return parse
