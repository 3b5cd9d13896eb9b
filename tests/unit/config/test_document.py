"""YAML 1.2 as plain values with places."""

import pytest

from gangline.config.document import MAX_NODES, read_document
from gangline.errors import SpecError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("5E3", 5000.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("12:34:56", "12:34:56"),
        ("2024-01-01", "2024-01-01"),
        ("2024-13-45", "2024-13-45"),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", 1000),
        ("+3", 3),
        ("~", None),
        ("null", None),
        ("", None),
        ("=", "="),
        ("'1'", "1"),
        ("1.10", 1.1),
        ("nan", "nan"),
    ],
)
def test_plain_values_follow_yaml_1_2(text, value):
    seen = read_document(f"k: {text}", "f").values["k"]
    assert seen == value
    assert type(seen) is type(value)


def test_a_scalar_is_remembered_as_it_was_written():
    assert read_document("env: {A: 1.10, B: 007}", "f").texts == {("env", "A"): "1.10", ("env", "B"): "007"}


def test_places_of_keys_and_values():
    document = read_document("a:\n  b: 3\n  c: [x, {d: y}]\ne:\n", "f")
    assert str(document.position(("a", "b"))) == "f:2:6"
    assert str(document.position(("a", "b"), key=True)) == "f:2:3"
    assert str(document.position(("a", "c", 1, "d"))) == "f:3:14"
    assert str(document.position(("a", "nothing"))) == "f:2:3"
    assert str(document.position(("e",))) == "f:4:1"


def test_aliases_and_merges():
    text = "base: &b {x: 1, y: 2}\none: {<<: *b, y: 3}\ntwo: {<<: [*b, {z: 4}]}\nthree: *b\n"
    document = read_document(text, "f")
    document.mistakes.raise_if_any()
    assert document.values["one"] == {"x": 1, "y": 3}
    assert document.values["two"] == {"x": 1, "y": 2, "z": 4}
    assert document.values["three"] == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    "text",
    [
        "k: !x 1",
        "k: !!python/object:os.system ls",
        "k: &a [*a]",
        "? [1]\n: 2",
        "? {a: 1}\n: 2",
        "<<: 3",
        "k: !!set {a}",
    ],
)
def test_what_is_no_plain_value_is_a_mistake(text):
    with pytest.raises(SpecError):
        read_document(text, "f").mistakes.raise_if_any()


def test_aliases_of_aliases_of_aliases_end():
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(SpecError, match=f"more than {MAX_NODES}"):
        read_document("l0: &l0 x\n" + "\n".join(levels), "f")


@pytest.mark.parametrize("text", ["[" * 600, "k: " + "{a: " * 600, "- " * 600])
def test_brackets_without_an_end(text):
    with pytest.raises(SpecError):
        read_document(text, "f").mistakes.raise_if_any()


def test_characters_that_json_writes_in_two_halves_are_whole():
    document = read_document('{"a": "\\ud83d\\ude00 \\u00e9"}', "job.json")
    assert document.values == {"a": "\U0001f600 é"}


@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00", "\\udcff", "\\ude00\\ud83d"])
def test_half_a_character_is_a_mistake(half):
    document = read_document(f'a: "x{half}"', "job.yaml")
    with pytest.raises(SpecError, match="half a character"):
        document.mistakes.raise_if_any()
