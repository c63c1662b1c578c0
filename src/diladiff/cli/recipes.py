"""`diladiff recipes [NAME]`: the table of recipes, or one recipe's docstring and resolved configuration."""

import inspect

from rich.console import Console
from rich.table import Table

from diladiff.config import closest, to_json
from diladiff.recipes import FULL_RECIPES, RECIPES
from diladiff.recipes.base import about

HELP = """usage: diladiff recipes [NAME]

Without a name: what can be trained, and what it costs. With one: what it is, the command, and every field of its
configuration, each of which `diladiff train` takes as a typed override.
"""


def main(arguments: list[str]) -> int:
    """Print the table, or one recipe."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if len(arguments) > 1:
        raise ValueError(f"recipes takes one name at most, got {' '.join(arguments)}")
    if arguments:
        show(arguments[0])
    else:
        table()
    return 0


def unknown_recipe(name: str) -> ValueError:
    """The error for a name that is no recipe."""
    near = closest(name, RECIPES)
    hint = f"did you mean {near}?" if near else "`diladiff recipes` lists them"
    return ValueError(f"no recipe {name!r}; {hint}")


def table() -> None:
    """Print every recipe but the debug twins with what it is and what it costs."""
    grid = Table("recipe", "what", "cost", box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for name, function in FULL_RECIPES.items():
        said = about(name, function)
        grid.add_row(name, said.summary, said.cost)
    console = Console()
    console.print(grid)
    console.print("Each has a twin NAME_debug that trains in seconds. `diladiff recipes NAME` shows one in full.")


def show(name: str) -> None:
    """Print a recipe's docstring, how to make its data, and its configuration."""
    if name not in RECIPES:
        raise unknown_recipe(name)
    recipe = RECIPES[name]()
    print(f"{name}: {inspect.getdoc(RECIPES[name])}\n")
    print(f"Data: {recipe.data.prepare}\n")
    print(to_json(recipe))
