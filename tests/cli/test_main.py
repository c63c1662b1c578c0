"""The front door: help at once, closest names, one line and exit code 2 for what a user can cause."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from diladiff import __version__
from diladiff.cli import main as front
from diladiff.cli import recipes

HELP = Path(__file__).resolve().parents[2] / "docs" / "help"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(arguments, capsys):
    assert front.main(arguments) == 0
    said = capsys.readouterr().out
    for commands in front.COMMANDS.values():
        for name, summary in commands.items():
            assert f"  {name:10}{summary}\n" in said
    assert max(len(line) for line in said.splitlines()) <= 100


@pytest.mark.parametrize(
    ("file", "arguments"),
    [("diladiff", ["--help"]), ("train", ["train", "--help"]), ("recipes", ["recipes", "--help"])],
)
def test_the_saved_help_is_current(file, arguments, capsys):
    assert front.main(arguments) == 0
    command = f"diladiff {' '.join(arguments)} > docs/help/{file}.txt"
    assert capsys.readouterr().out == (HELP / f"{file}.txt").read_text(), f"save it again: {command}"


def test_version(capsys):
    assert front.main(["--version"]) == 0
    assert capsys.readouterr().out == f"diladiff {__version__}\n"


@pytest.mark.parametrize(("word", "hint"), [("trian", "did you mean train?"), ("xyzzy", "the commands are prepare, ")])
def test_an_unknown_command_gets_a_hint(word, hint, capsys):
    assert front.main([word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"diladiff: no command '{word}'; {hint}")
    assert err.count("\n") == 1


def raising(error: BaseException):
    """A command that fails."""

    def command(arguments: list[str]) -> int:
        raise error

    return command


def missing(package: str) -> ImportError:
    return ModuleNotFoundError(f"No module named '{package}'", name=package)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("two\nlines"), 2, "two lines"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.txt"), 2, "x.txt: No such file or directory"),
        (OSError("the disk is full"), 2, "the disk is full"),
        (missing("datasets.arrow"), 2, "this needs the package datasets.arrow: pip install 'diladiff[data]'"),
        (missing("wandb"), 2, "this needs the package wandb: pip install 'diladiff[track]'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_a_user_can_cause_is_one_line(error, code, line, capsys, monkeypatch):
    monkeypatch.setattr(recipes, "main", raising(error))
    assert front.main(["recipes"]) == code
    assert capsys.readouterr().err == f"diladiff: {line}\n"


@pytest.mark.parametrize("error", [missing("diladiff.nothing"), RuntimeError("a fault"), KeyError("a fault")])
def test_a_fault_of_the_package_is_not_hidden(error, monkeypatch):
    monkeypatch.setattr(recipes, "main", raising(error))
    with pytest.raises(type(error)):
        front.main(["recipes"])


def test_the_traceback_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(recipes, "main", raising(ValueError("wrong")))
    monkeypatch.setenv("DILADIFF_TRACEBACK", "1")
    with pytest.raises(ValueError, match="wrong"):
        front.main(["recipes"])


def test_other_ranks_say_who_they_are(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert front.main(["nothing-like-it"]) == 2
    assert capsys.readouterr().err.startswith("diladiff (rank 3): ")


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from diladiff.cli.main import main; code = main(['--help']); assert 'torch' not in sys.modules; "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (HELP / "diladiff.txt").read_text()


def test_a_process_ends_with_the_code_and_without_a_traceback():
    program = [sys.executable, "-c", "import sys; from diladiff.cli.main import main; sys.exit(main())"]
    done = subprocess.run([*program, "train", "mdlm_owl"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "diladiff: no recipe 'mdlm_owl'; did you mean mdlm_owt?\n"


def test_a_closed_output_is_no_error():
    program = f"{sys.executable} -c 'import sys; from diladiff.cli.main import main; sys.exit(main())' --help"
    done = subprocess.run(["bash", "-c", f"{program} >&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_is_no_error():
    program = f"{sys.executable} -c 'import sys; from diladiff.cli.main import main; sys.exit(main())' --help"
    script = f"set -o pipefail; {program} | exec < /dev/null"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
