"""`gangline recipes`: job files for common models and machines, to copy and change."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import AsJson, argument, option
from gangline.cli.output import Terminal, print_answer, print_data
from gangline.errors import UsageError
from gangline.recipes import Recipe, find_recipe, recipe_names
from gangline.report.commands import joined, quoted


class RecipeOrder(str, enum.Enum):
    """What is done."""

    ls = "ls"
    cp = "cp"


def command(
    what: Annotated[RecipeOrder, typer.Argument(metavar="ls|cp", help="ls: list them. cp: copy one")] = RecipeOrder.ls,
    name: Annotated[str | None, argument("RECIPE", "cp: which one")] = None,
    to: Annotated[Path | None, option("cp: new file, or a folder; by default ./RECIPE.yaml", "FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """List whole job files for common models and machines, or copy one. cp prints the path of the new file."""
    if what is RecipeOrder.ls:
        if name is not None or to is not None:
            raise UsageError("recipes ls takes no name", seen=name or f"--to {to}", fix=f"gangline recipes cp {name}")
        recipes = [find_recipe(each) for each in recipe_names()]
        print_answer({"recipes": [_document(each) for each in recipes]}, _lines(recipes), as_json=as_json)
        return
    if name is None:
        raise UsageError("recipes cp needs a name", seen="none", fix="gangline recipes lists them")
    recipe = find_recipe(name)
    path = recipe.copy(to or Path())
    if as_json:
        print_answer({**_document(recipe), "file": str(path)}, [], as_json=True)
        return
    print_data([str(path)])
    console = Terminal()
    file = quoted(str(path))
    console.commands("plan it for its machines:", joined(("gangline", "plan", str(path), *recipe.plan_words)))
    console.commands("for yours:", "gangline init HOST ...", f"gangline plan {file}", f"gangline train {file}")


def _lines(recipes: list[Recipe]) -> list[str]:
    width = max(len(each.name) for each in recipes)
    return [f"{each.name:<{width}}  {each.title}" for each in recipes]


def _document(recipe: Recipe) -> dict[str, str | None]:
    return {
        "name": recipe.name,
        "title": recipe.title,
        "machines": recipe.machines,
        "link": recipe.link,
        "guide": recipe.guide,
    }
