"""What recipes promise."""

import re

import pytest

from residua import cli
from residua.data import DataError, load
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


def test_the_images_of_a_recipe_are_named_as_data_understands_them(tmp_path, monkeypatch, capsys) -> None:
    """Every --data is understood: what is missing is the folder, or the answer of the Hub."""
    import huggingface_hub

    def not_there(*args: object, **kwargs: object) -> list[str]:
        raise OSError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", not_there)
    for recipe in RECIPES.values():
        for spec in re.findall(r"--data '([^']+)'", recipe.images):
            with pytest.raises(DataError, match=r"does not exist|no network"):
                load(spec)
    assert len(re.findall("--data", RECIPES["mae-tiny-imagenet"].images)) == 2
    assert cli.main(["recipes", "mae-tiny-imagenet"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "tiny-imagenet-200?classes=tiny-imagenet-100" in shown
