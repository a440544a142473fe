"""`residua recipes`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from residua.commands.console import console, print_nested, say


def recipes(args: list[str]) -> None:
    """Rows of the paper, runnable."""
    from rich.table import Table

    from residua.recipes import RECIPES, get

    @dataclass(frozen=True)
    class RecipeOptions:
        """Settings with a name, their cost and the numbers to expect; `residua COMMAND NAME` runs one."""

        name: Annotated[str | None, tyro.conf.arg(metavar="[NAME]")] = None

    o = tyro.cli(RecipeOptions, args=args, prog="residua recipes", config=(tyro.conf.Positional,))
    if o.name is None:
        for command in dict.fromkeys(recipe.command for recipe in RECIPES.values()):
            table = Table("recipe", "what", "cost", "expect", title=f"residua {command} RECIPE", title_justify="left")
            table.columns[0].no_wrap = True
            for recipe in RECIPES.values():
                if recipe.command == command:
                    table.add_row(recipe.name, recipe.summary, recipe.cost, recipe.expect)
            console.print(table)
        return
    recipe = get(o.name)
    about = {"what": recipe.summary, "cost": recipe.cost, "expect": recipe.expect, "images": recipe.images}
    print_nested({name: text for name, text in about.items() if text} | {"settings": recipe.settings})
    say(f"\nrun it:  residua {recipe.command} {recipe.name}")
