"""Every recipe is a job that fits the machines in its first lines."""

from pathlib import Path

import pytest

import gangline
from gangline.cli.main import main
from gangline.config.load import load_job
from gangline.errors import UsageError
from gangline.recipes import FOLDER, find_recipe, recipe_names

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_enough_of_them():
    assert len(recipe_names()) >= 20


@pytest.mark.parametrize("name", recipe_names())
def test_it_fits_its_machines_and_says_what_it_is(name):
    recipe = find_recipe(name)
    plan = gangline.plan(FOLDER / f"{name}.yaml", hosts=recipe.machines, link=recipe.link)
    assert plan.fits
    assert plan.document["verdict"]["runnable"] is not None, "gangline trains it itself"
    assert recipe.title.endswith(".")
    assert ("," in recipe.machines) == (recipe.link is not None)
    assert recipe.guide is None or (ROOT / "docs" / "guides" / f"{recipe.guide}.md").is_file()


@pytest.mark.parametrize("name", recipe_names())
def test_the_strategy_that_it_names_is_the_one_that_is_planned(name):
    recipe = find_recipe(name)
    asked = load_job(FOLDER / f"{name}.yaml", needs_data=False).strategy.kind
    plan = gangline.plan(FOLDER / f"{name}.yaml", hosts=recipe.machines, link=recipe.link)
    assert asked in {plan.strategy, "auto"}


def test_copying_one(folder, capsys, monkeypatch):
    monkeypatch.setattr("gangline.cli.output.is_live", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["recipes", "cp", "chat-4b-lora"]) == 0
    said = capsys.readouterr()
    assert said.out == "chat-4b-lora.yaml\n"
    plan = "  gangline plan chat-4b-lora.yaml --hosts pc1=rtx4090,pc2=rtx4090 --link 10gbit"
    assert plan in said.err.splitlines()  # whole, to be pasted, also on a narrow terminal
    assert (folder / "chat-4b-lora.yaml").read_text() == find_recipe("chat-4b-lora").text
    assert main(["recipes", "cp", "chat-4b-lora"]) == 2
    assert "chat-4b-lora.yaml exists" in capsys.readouterr().err
    assert main(["recipes", "cp", "chat-4b-lora", "--to", "my.yaml"]) == 0
    assert main(["recipes", "cp", "chat-4b-lora", "--to", "no/such/my.yaml"]) == 2


def test_listing_them(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert main(["recipes", "ls", "chat-4b-lora"]) == 2
    assert main(["recipes", "cp"]) == 2


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UsageError) as caught:
        find_recipe("chat-4b")
    assert "chat-4b-lora" in caught.value.seen
