"""What STYLE.md asks of every Python file and a linter does not check: budgets, docstrings, and what is not used."""

import ast
import re

import pytest

FILE_LINES = 400
FUNCTION_LINES = 80
ALLOWANCES: dict[str, tuple[int, str]] = {}  # "path" or "path::function" -> (lines, reason)
BROAD_EXCEPTS: dict[str, str] = {}  # "path::function" -> reason

OPEN_ENDS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source):
    """Every function of a file, methods and nested ones included."""
    return [node for node in ast.walk(source.tree) if isinstance(node, Function)]


def over_budget(source) -> list[str]:
    """The file, and those of its functions, that are longer than they may be."""
    found = []
    lines = source.text.count("\n")
    if lines > ALLOWANCES.get(source.path, (FILE_LINES, ""))[0]:
        found.append(f"{source.path}: {lines} lines")
    for node in functions(source):
        lines = node.end_lineno - node.lineno + 1
        key = f"{source.path}::{node.name}"
        if lines > ALLOWANCES.get(key, (FUNCTION_LINES, ""))[0]:
            found.append(f"{key}: {lines} lines")
    return found


def undocumented(source, inherited: dict[str, set[str]]) -> list[str]:
    """Public names of a module that have no docstring, or one whose first sentence is not its first line."""
    found = []

    def check(node, name):
        lines = (ast.get_docstring(node) or "").splitlines()
        if not lines:
            found.append(f"{source.path}:{node.lineno}: {name} has no docstring")
        elif len(lines) > 1 and lines[1].strip():
            found.append(f"{source.path}:{node.lineno}: {name}: a docstring opens with one line")

    for node in source.tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            check(node, node.name)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            known = set().union(*(inherited.get(ast.unparse(base).split(".")[-1], set()) for base in node.bases))
            for method in node.body:
                if isinstance(method, Function) and not method.name.startswith("_"):
                    accessor = any(ast.unparse(d).endswith((".setter", "overload")) for d in method.decorator_list)
                    if method.name not in known | {"forward"} and not accessor:
                        check(method, f"{node.name}.{method.name}")
    return found


def forbidden(source) -> list[str]:
    """Constructs that the package does not use."""
    found = []
    where = {child: node.name for node in functions(source) for child in ast.walk(node)}
    for node in ast.walk(source.tree):
        at = f"{source.path}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Call(func=ast.Name(id="hasattr")):
                found.append(f"{at}: hasattr")
            case ast.Call(func=ast.Name(id="print")) if not source.path.startswith("src/diladiff/cli/"):
                found.append(f"{at}: print outside cli")
            case ast.FunctionDef(args=ast.arguments(kwarg=ast.arg())):
                found.append(f"{at}: {node.name} passes keywords through")
            case ast.ExceptHandler(type=None | ast.Name(id="Exception" | "BaseException")):
                tidies_up = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                if not tidies_up and f"{source.path}::{where.get(node)}" not in BROAD_EXCEPTS:
                    found.append(f"{at}: a broad except")
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                found.append(f"{at}: torch.load unpickles")
            case ast.Import() if any(alias.name.split(".")[0] in UNPICKLERS for alias in node.names):
                found.append(f"{at}: imports what unpickles")
            case ast.ImportFrom(module=str(name)) if name.split(".")[0] in UNPICKLERS:
                found.append(f"{at}: imports what unpickles")
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                found.append(f"{at}: allow_pickle")
    return found


UNPICKLERS = {"pickle", "dill", "cloudpickle", "shelve", "joblib"}


def marks(source) -> list[str]:
    """What no Python file of the project holds: open ends, stringified annotations, other letters than ASCII's."""
    found = []
    if "from __future__ import " + "annotations" in source.text:
        found.append(f"{source.path}: stringified annotations disable the shape checks")
    for number, line in enumerate(source.text.splitlines(), 1):
        if not line.isascii():
            found.append(f"{source.path}:{number}: not ASCII")
        if OPEN_ENDS.search(line):
            found.append(f"{source.path}:{number}: {line.strip()}")
    return found


def module_docstring(source) -> list[str]:
    """A file opens with one to six lines that say what it holds."""
    lines = (ast.get_docstring(source.tree) or "").splitlines()
    return [] if 1 <= len(lines) <= 6 else [f"{source.path}: a docstring of {len(lines)} lines"]


def collect(check, sources) -> list[str]:
    """All that a check finds."""
    return [line for source in sources for line in check(source)]


def test_files_and_functions_keep_their_budgets(python_files):
    assert not collect(over_budget, python_files)


def test_allowances_name_what_exists(python_files):
    names = {source.path for source in python_files}
    names |= {f"{source.path}::{node.name}" for source in python_files for node in functions(source)}
    assert {*ALLOWANCES, *BROAD_EXCEPTS} <= names


def test_files_say_what_they_hold(python_files):
    assert not collect(module_docstring, python_files)


def test_public_names_have_docstrings(sources):
    classes = [node for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    inherited = {
        cls.name: {node.name for node in cls.body if isinstance(node, Function) and ast.get_docstring(node)}
        for cls in classes
    }
    assert not [line for source in sources for line in undocumented(source, inherited)]


def test_what_the_package_does_not_use(sources):
    assert not collect(forbidden, sources)


def test_no_open_ends_and_ascii_only(python_files):
    assert not collect(marks, python_files)


@pytest.mark.parametrize(
    "line",
    [
        "x = hasattr(y, 'z')",
        "print(1)",
        "def f(**kwargs):\n    return g(**kwargs)",
        "try:\n    pass\nexcept Exception:\n    pass",
        "try:\n    pass\nexcept:\n    pass",
        "x = torch.load('file')",
        "import pickle",
        "from pickle import loads",
        "x = np.load('file', allow_pickle=True)",
    ],
)
def test_forbidden_constructs_are_seen(parsed, line):
    assert len(forbidden(parsed("src/diladiff/x.py", line))) == 1


def test_long_and_silent_code_is_seen(parsed):
    long = "def f():\n" + "    x = 1\n" * FILE_LINES
    assert len(over_budget(parsed("x.py", long))) == 2
    assert len(module_docstring(parsed("x.py", long))) == 1
    assert len(undocumented(parsed("x.py", "class A:\n    def b(self): ...\ndef c(): ...\ndef _d(): ..."), {})) == 3
    assert len(marks(parsed("x.py", "# TO" + "DO: caf\u00e9"))) == 2
