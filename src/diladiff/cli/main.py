"""`diladiff COMMAND ...`: finds the command, and turns what a user can cause into one line and exit code 2.

Nothing heavy is imported before a command is known, so that `diladiff --help` answers at once.
"""

import importlib
import os
import sys

from diladiff import __version__
from diladiff.config import closest

COMMANDS: dict[str, dict[str, str]] = {
    "data": {"prepare": "turn text into checked token shards (presets, files, Hugging Face data sets)"},
    "train": {
        "recipes": "list what can be trained, or show one recipe in full",
        "train": "train a recipe, or carry an interrupted run on",
    },
    "use": {
        "sample": "write texts from a model, from nothing or around a prompt",
        "demo": "watch a text form out of masks",
    },
}
EXTRAS = {
    "datasets": "data",
    "matplotlib": "plots",
    "tensorboard": "track",
    "wandb": "track",
    "zstandard": "data",
}
BAD_INPUT = 2
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 2 bad input (one line on stderr), 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _dispatch(arguments)
        if sys.stdout is not None:  # None where it was closed before the start
            sys.stdout.flush()
        return code
    except SystemExit as stop:  # how tyro ends after printing its help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has left; without this, Python complains again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("DILADIFF_TRACEBACK") == "1":
            raise
        line = _explain(error)
        if line is None:
            raise
        _complain(line)
        return BAD_INPUT


def help_text() -> str:
    """What `diladiff --help` prints."""
    lines = [
        "diladiff: train, sample and measure diffusion language models",
        "",
        "usage: diladiff COMMAND [ARGUMENTS]        diladiff COMMAND --help says more",
    ]
    for group, commands in COMMANDS.items():
        lines += ["", f"{group}:", *(f"  {name:10}{summary}" for name, summary in commands.items())]
    lines += [
        "",
        "a first session:",
        "  diladiff demo                                        a model that ships, live",
        "  diladiff recipes                                     what can be trained, at what cost",
        "  diladiff recipes mdlm_stories_cpu                    one of them, and how to make its data",
        "  diladiff train mdlm_stories_cpu --data data/stories  train it; once more: resume",
        "  diladiff sample outputs/mdlm_stories_cpu --num 4     write with the result",
        "",
        "options: --help, --version; DILADIFF_TRACEBACK=1 shows where an error came from",
        "exit codes: 0 done or stopped and saved, 2 bad input (one line says what to do), 130 interrupted",
    ]
    return "\n".join(lines) + "\n"


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"diladiff {__version__}")
        return 0
    command, names = arguments[0], [name for commands in COMMANDS.values() for name in commands]
    if command not in names:
        near = closest(command, names)
        hint = f"did you mean {near}?" if near else f"the commands are {', '.join(names)}"
        raise ValueError(f"no command {command!r}; {hint}")
    return importlib.import_module(f"diladiff.cli.{command}").main(arguments[1:])


def _explain(error: Exception) -> str | None:
    """An error as one line for the user, or None where it is a fault of the package."""
    if isinstance(error, ImportError):
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            return None
        return f"this needs the package {error.name}: pip install 'diladiff[{extra}]'"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _complain(line: str) -> None:
    rank = os.environ.get("RANK", "0")
    where = "diladiff" if rank == "0" else f"diladiff (rank {rank})"
    print(f"{where}: {line}", file=sys.stderr)
