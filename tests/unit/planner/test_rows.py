"""The measured rows are complete, have a source each, and fall into two halves by a rule written before fitting."""

from collections import Counter

import pytest

from gangline.planner.config import read_architecture
from tests.unit.planner.rows import (
    FITTING,
    FIXTURES,
    GIB,
    HELD_OUT,
    MEASURES,
    anchor_rows,
    fitting_rows,
    held_out_rows,
    model_config,
    public_rows,
    read,
    split_of,
    verdicts,
)

ROWS = [*anchor_rows(), *public_rows()]
FILES = ("anchor_rows", "public_rows")
METHODS = ("full", "lora", "qlora")
CONFIGS = sorted(path.stem for path in (FIXTURES / "configs").glob("*.json"))


def test_ids_are_unique():
    counts = Counter(row.id for row in ROWS)
    assert [name for name, number in counts.items() if number > 1] == []


@pytest.mark.parametrize("file", FILES)
def test_every_row_has_a_source_that_says_where_and_when(file):
    document = read(file)
    assert {run["source"] for run in document["runs"]} <= set(document["sources"])
    for source in document["sources"].values():
        assert {"repository", "path", "commit", "date", "url", "about"} <= set(source)
        assert source["url"].startswith("https://")


@pytest.mark.parametrize("file", FILES)
def test_every_key_of_a_run_is_explained(file):
    document = read(file)
    keys = {key for run in document["runs"] for key in run}
    assert keys <= set(document["fields"]) | {"num_gpus", "gpu", "missing"}


def test_slopes_have_a_source_and_a_model():
    document = read("anchor_rows")
    assert {slope["source"] for slope in document["slopes"]} <= set(document["sources"])
    assert {slope["model"] for slope in document["slopes"]} <= set(CONFIGS)


def test_verdicts_say_which_runs_fit_and_which_die():
    assert {choice.outcome for choice in verdicts()} == {"completed", "out of memory", "died"}
    assert Counter(choice.fits for choice in verdicts())[True] >= 5
    assert Counter(choice.run for choice in verdicts()).most_common(1)[0][1] == 1
    assert {choice.source for choice in verdicts()} <= set(read("public_rows")["sources"])


def test_what_is_known_to_have_died_has_no_peak():
    dead = {choice.run for choice in verdicts() if choice.outcome == "died"}
    assert not dead & {row.run for row in ROWS}


def test_there_are_more_than_60_rows_of_at_least_5_repositories():
    document = read("public_rows")
    assert len(public_rows()) >= 60
    assert len({source["repository"] for source in document["sources"].values()}) >= 5


def test_the_rows_cover_methods_and_sharding():
    assert {row.method for row in ROWS} == set(METHODS)
    for method in METHODS:
        assert {"single", "fsdp1"} <= {row.strategy for row in public_rows() if row.method == method and row.complete}


@pytest.mark.parametrize("method", METHODS)
def test_both_halves_hold_rows_of_every_method(method):
    assert any(row.method == method for row in fitting_rows())
    assert any(row.method == method for row in held_out_rows())


def test_no_run_is_in_both_halves():
    assert not {row.run for row in fitting_rows()} & {row.run for row in held_out_rows()}


def test_each_half_holds_at_least_two_fifths_of_the_complete_rows():
    sizes = [len(fitting_rows()), len(held_out_rows())]
    assert min(sizes) >= 0.4 * sum(sizes)


def test_no_public_row_repeats_an_anchor():
    assert not {row.run for row in anchor_rows()} & {row.run for row in public_rows()}


@pytest.mark.parametrize(
    ("run", "half"),
    [  # their sha256 start with e, c, 7 and 3
        ("litgpt/llama-2-7b/lora/none/s1304/b1/n1", HELD_OUT),
        ("litgpt/llama-2-7b/lora/none/s1304/b2/n1", HELD_OUT),
        ("fsdp-qlora/yi-34b/qlora/fsdp1/s2048/b2/n2", FITTING),
        ("torchtune/llama-3.2-3b/full/packed/s4096/b2/n1", FITTING),
    ],
)
def test_the_rule_of_the_split_is_the_first_digit_of_the_name(run, half):
    assert split_of(run) == half


def test_the_rule_is_written_in_the_file_itself():
    rule = read("public_rows")["split_rule"]
    assert "sha256" in rule
    assert "first hex digit is even" in rule


def test_a_row_is_complete_exactly_if_nothing_had_to_be_assumed():
    assert [row.id for row in ROWS if row.complete == bool(row.missing)] == []


def test_a_complete_row_says_how_many_tokens_it_had():
    assert [row.id for row in ROWS if row.complete and row.num_tokens is None] == []


def test_adapters_belong_to_lora_and_quantisation_to_qlora():
    assert [row.id for row in ROWS if (row.adapter is None) != (row.method == "full")] == []
    assert [row.id for row in ROWS if (row.quant != "none") != (row.method == "qlora")] == []


def test_one_gpu_is_exactly_the_strategy_single():
    assert [row.id for row in ROWS if (row.num_gpus == 1) != (row.strategy == "single")] == []


def test_figures_are_bytes_of_a_gpu():
    assert {row.measured for row in ROWS} == set(MEASURES)
    assert [row.id for row in ROWS if not GIB <= row.value_bytes <= 100 * GIB] == []


def test_what_stays_resident_is_below_the_peak():
    assert [row.id for row in ROWS if row.resident_bytes and row.resident_bytes >= row.value_bytes] == []


def test_allocated_is_at_most_reserved_and_reserved_at_most_process():
    by_run: dict[str, dict[str, int]] = {}
    for row in ROWS:
        by_run.setdefault(row.run, {})[row.measured] = row.value_bytes
    for figures in by_run.values():
        in_order = [figures[measured] for measured in MEASURES if measured in figures]
        assert in_order == sorted(in_order)


def test_the_published_figure_of_a_well_known_row():
    (row,) = [row for row in anchor_rows() if row.id == "canifinetune/qwen2.5-7b/qlora/s1024/b1/r16/ckpt/allocated"]
    assert row.value_bytes / GIB == pytest.approx(10.0023, abs=5e-5)
    assert row.rounding_bytes == round(GIB / 20000)
    assert row.adapter is not None
    assert row.adapter.targets == ("q_proj", "k_proj", "v_proj", "o_proj")


def test_every_model_of_a_row_has_a_config():
    assert {row.model for row in ROWS} <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_names_its_source_and_its_type(name):
    config = model_config(name)
    assert config["_source"].startswith("https://")
    assert config["model_type"]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parameters_of_a_config_come_out_as_stated_in_it(name):
    config = model_config(name)
    assert read_architecture(config).num_parameters == config["_num_params"]
