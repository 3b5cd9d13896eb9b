"""A command with places for values: each value has a place, each place has values."""

from __future__ import annotations

import pytest

from gangline.errors import UsageError
from gangline.sweep.command_template import filled, require_places, split_command
from gangline.sweep.points import axes_of

COMMAND = ("train.py", "--lr", "{lr}", "--name=run-{lr}-{model.size}", '{"json": {lr}}')


def test_keys_end_where_the_command_begins() -> None:
    keys, command = split_command(("lr=1e-5,1e-4", "model.size=8", "train.py", "--lr={lr}", "a=b"))
    assert keys == ("lr=1e-5,1e-4", "model.size=8")
    assert command == ("train.py", "--lr={lr}", "a=b")


@pytest.mark.parametrize("words", [(), ("lr=1,2",), ("train.py", "--lr", "{lr}")])
def test_without_keys_or_without_a_command_there_is_nothing_to_try(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"needs keys with values, and a command"):
        split_command(words)


def test_values_go_to_their_places_and_other_braces_stay() -> None:
    words = filled(COMMAND, {"lr": "1e-4", "model.size": "8"})
    assert words == ("train.py", "--lr", "1e-4", "--name=run-1e-4-8", '{"json": 1e-4}')


def test_a_place_without_values_is_named() -> None:
    with pytest.raises(UsageError, match=r"a place for \{model.size\}, which has no values"):
        require_places(axes_of(["lr=1,2"]), COMMAND)


def test_values_without_a_place_are_named() -> None:
    with pytest.raises(UsageError, match=r"no place for batch"):
        require_places(axes_of(["lr=1,2", "model.size=8", "batch=1,2"]), COMMAND)
