"""What recipes promise."""

import re

import pytest

from residua.recipes import RECIPES, Recipe


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_a_recipe_says_what_it_takes(recipe: Recipe) -> None:
    """A time, or that none was measured; where it comes from the time of a step, the two agree."""
    assert re.search(r"\d (minutes|hours) on|time not measured", recipe.cost)
    step, hours = re.search(r"([\d.]+) ms a step", recipe.cost), re.search(r"(\d+) hours", recipe.cost)
    assert (step is None) == (hours is None)
    if step and hours:
        seconds = recipe.settings["steps"] * float(step[1]) / 1000
        assert seconds / 3600 == pytest.approx(int(hours[1]), rel=0.05)


def test_steps_that_the_paper_does_not_give_are_called_a_guess() -> None:
    assert all(
        "a guess at the paper's" in recipe.cost
        for recipe in RECIPES.values()
        if recipe.command == "diffuse" and recipe.expect.startswith("paper:")
    )
