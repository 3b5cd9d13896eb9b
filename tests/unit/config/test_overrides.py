"""`key=value` on the command line."""

import pytest

from gangline.config.document import apply_overrides, read_document
from gangline.config.job_model import JobWords
from gangline.errors import SpecError


def applied(text, *overrides):
    document = read_document(text, "job.yaml")
    apply_overrides(document, overrides, JobWords)
    return document


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("k=1e-4", 1e-4),
        ("k=3", 3),
        ("k=no", "no"),
        ("k=true", True),
        ("k=none", "none"),
        ("k=null", None),
        ("k=", None),
        ("k=12:34:56", "12:34:56"),
        ("k=*.jsonl", "*.jsonl"),
        ("k=a=b", "a=b"),
        ("k=a: b # c", "a: b # c"),
        ("k=@home", "@home"),
        ("k=[1, 2.5, x]", [1, 2.5, "x"]),
        ("k={a: 1}", {"a": 1}),
        ("k='3'", "3"),
        ('k="a b"', "a b"),
        ("k=-", "-"),
        ("k=!tag", "!tag"),
    ],
)
def test_values_are_read_as_yaml(override, value):
    assert applied("{}", override).values == {"k": value}


def test_later_overrides_win_over_earlier_ones_and_over_the_file():
    assert applied("seed: 1", "seed=2", "seed=3").values == {"seed": 3}


def test_a_key_below_a_shorthand_keeps_what_the_shorthand_said():
    values = applied("model: ./llama\nmethod: lora", "model.start=random", "method.rank=4").values
    assert values == {"model": {"path": "./llama", "start": "random"}, "method": {"kind": "lora", "rank": 4}}


def test_a_fraction_is_a_shorthand_of_its_own():
    assert applied("data: {eval: 0.1}", "data.eval.fraction=0.2").values == {"data": {"eval": {"fraction": 0.2}}}


def test_a_bare_value_replaces_the_whole_mapping():
    assert applied("method: {kind: lora, rank: 4}", "method=full").values == {"method": "full"}


def test_missing_mappings_are_made():
    assert applied("{}", "data.fields.prompt=question").values == {"data": {"fields": {"prompt": "question"}}}


def test_items_of_a_list_by_number_and_by_name():
    document = applied("hosts: [{name: a}, b]", "hosts.0.slots=2", "hosts.a.share=1", "hosts.1=c")
    assert document.values == {"hosts": [{"name": "a", "slots": 2, "share": 1}, "c"]}


def test_a_mistake_is_placed_on_the_command_line():
    document = applied("optimizer: {learning_rate: 1e-4}", "optimizer.learning_rate=fast")
    assert str(document.position(("optimizer", "learning_rate"))) == "command line: optimizer.learning_rate=fast"
    assert document.from_command_line(("optimizer", "learning_rate"))


@pytest.mark.parametrize("override", ["", "=", "=1", "key", ".=1", "a..b=1", "a.=1", "--flag"])
def test_what_is_no_override(override):
    with pytest.raises(SpecError, match="no override"):
        applied("{}", override).mistakes.raise_if_any()


@pytest.mark.parametrize("override", ["k=[1, 2", "k={a: 1", 'k="x', "k='x' y", "k=[*x]", "k={a: 1, a: 2}", "k=[!x 1]"])
def test_lists_and_quotes_have_to_be_whole(override):
    with pytest.raises(SpecError) as caught:
        applied("{}", override).mistakes.raise_if_any()
    assert caught.value.what == f"command line: {override}"
    assert caught.value.fix
