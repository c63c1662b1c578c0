"""What the project's text says: one set of versions everywhere, and nothing of any one machine or package index."""

import re
import tomllib
from importlib.metadata import requires, version

import pytest

TEXT = (
    ".py",
    ".md",
    ".toml",
    ".sh",
    ".json",
    ".jsonl",
    ".cff",
    ".txt",
    ".yml",
    ".yaml",
    "Makefile",
    "run",
    ".gitignore",
)
# In pieces, so that this file does not hold what it looks for.
STRANGERS = {
    "a machine's path": re.compile(
        r"(?<![\w.])/(" + "wo" + r"rk|ro" + r"ot|op" + r"t|tm" + r"p|ho" + r"me|fa" + r"rm)/"
    ),
    "a package index's host": re.compile("py" + "pi[.]org|python" + "hosted|npm" + "js[.]|download[.]py" + "torch"),
    "the tracker": re.compile(r"\bissue #?\d"),
}


def strangers(path: str, text: str) -> list[str]:
    """The lines of a file that speak of what is not the project."""
    return [
        f"{path}:{number}: {what}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in STRANGERS.items()
        if pattern.search(line)
    ]


def test_the_project_speaks_of_itself_alone(root, project_files):
    texts = {path: (root / path).read_text("utf-8") for path in project_files if path.endswith(TEXT)}
    assert "README.md" in texts
    assert not [line for path, text in texts.items() for line in strangers(path, text)]


def test_other_talk_is_seen():
    lines = ["cd /wo" + "rk/main", "see py" + "pi.org", "as iss" + "ue 7 asks", "a network/root/x is fine"]
    assert len(strangers("x.md", "\n".join(lines))) == 3


def dead_links(root, path: str) -> list[str]:
    """The links of a page to files that are not there."""
    found = re.findall(r"\]\(([^)#:]+)\)", (root / path).read_text("utf-8"))
    return [f"{path}: {link}" for link in found if not (root / path).parent.joinpath(link).exists()]


def test_links_between_pages_lead_somewhere(root, project_files):
    pages = [path for path in project_files if path.endswith(".md") and "/" not in path.removeprefix("docs/")]
    assert len(pages) > 4
    assert not [link for path in pages for link in dead_links(root, path)]


def test_a_dead_link_is_seen(tmp_path):
    (tmp_path / "x.md").write_text("[a](x.md) [b](nowhere.md) ![c](no.svg) [d](https://example.org)")
    assert dead_links(tmp_path, "x.md") == ["x.md: nowhere.md", "x.md: no.svg"]


@pytest.fixture(scope="module")
def project(root):
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def test_versions_agree(root, project):
    readme = (root / "README.md").read_text()
    setup = (root / "tools/setup.sh").read_text()
    (torch,) = [line.removeprefix("torch") for line in project["dependencies"] if line.startswith("torch")]
    lowest, beyond = re.findall(r"3\.(\d+)", project["requires-python"])
    assert f"Python 3.{lowest} to 3.{int(beyond) - 1}" in readme
    assert f"`torch{torch}`" in readme
    assert f"(3, {lowest}) <= sys.version_info[:2] < (3, {beyond})" in setup
    assert torch == ">=2.11,<3"
    assert "(2, 11) <= v < (3, 0)" in setup
    assert f'version: "{project["version"]}"' in (root / "CITATION.cff").read_text()


def test_the_package_is_the_one_installed(project):
    import diladiff

    assert diladiff.__version__ == version("diladiff") == project["version"]
    assert any(line.startswith("torch<3,>=2.11") for line in requires("diladiff") or [])


def test_every_marker_is_declared_once(root):
    options = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert [marker.split(":")[0] for marker in options["markers"]] == ["slow", "gpu", "compile", "parts"]
    assert options["filterwarnings"] == ["error"]
    assert "--strict-markers" in options["addopts"]
