"""What `export` writes is the trained model, and it says done only then."""

import pytest

from tests.train import cases_export
from tests.train.tolerances import LOGITS

pytestmark = pytest.mark.rotating

MIB = 1 << 20
CONSTANT = 48 * MIB
"""The largest tensors on their way (4 MiB each), what is imported meanwhile, and the heap of one that reads and writes.
30 MiB were seen, whatever the size of a file."""


def run(pool, tmp_path, case, **arguments):
    return pool(1).run(case, folder=str(tmp_path), **arguments)[0]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_lora_run_gives_the_logits_of_the_trained_model_in_plain_peft_and_transformers(pool, tmp_path, kind, merged):
    done = run(pool, tmp_path, cases_export.exported, kind=kind, merged=merged)
    assert done["difference"] <= LOGITS
    assert done["from_base"] > 0.05
    assert done["max_logit_difference"] <= done["tolerance"] == LOGITS
    assert done["left"] == ["base", "out", "root"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_full_run_gives_a_whole_model_folder(pool, tmp_path, kind):
    done = run(pool, tmp_path, cases_export.exported, kind=kind, method="full")
    assert done["difference"] <= LOGITS
    assert done["from_base"] > 0.05
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= set(done["files"])


def test_an_adapter_is_a_folder_in_pefts_format(pool, tmp_path):
    done = run(pool, tmp_path, cases_export.exported)
    assert done["files"] == ["adapter_config.json", "adapter_model.safetensors", "gangline.json"]


@pytest.mark.parametrize("merged", [False, True])
def test_after_qlora_the_adapter_is_over_the_base_models_own_weights(pool, tmp_path, merged):
    done = run(pool, tmp_path, cases_export.exported, method="qlora", merged=merged)
    assert done["difference"] <= LOGITS
    assert done["max_logit_difference"] <= done["tolerance"] == LOGITS
    assert any("rounded to 4 bits" in text for text in done["said"])


@pytest.mark.parametrize(
    ("how", "num_files"),
    [
        ({"method": "full", "file_bytes": 30_000, "model": {"tie_word_embeddings": True}}, 4),
        ({"method": "full", "kind": "mixture"}, 1),
        ({"method": "full", "kind": "gpt2", "dtype": "bfloat16"}, 1),
        ({"method": "lora"}, 1),
        ({"method": "lora", "merged": True, "dtype": "bfloat16", "file_bytes": 20_000}, 4),
        ({"method": "qlora-8", "merged": True, "kind": "llama"}, 1),
    ],
    ids=lambda value: "" if isinstance(value, int) else " ".join(map(str, value.values())),
)
def test_a_checkpoint_in_parts_is_exported_tensor_by_tensor_to_the_same_bits(pool, tmp_path, how, num_files):
    done = run(pool, tmp_path, cases_export.by_tensor, **how)
    assert (done["names"], done["values"]) == ([], [])
    assert done["tensors"] > 10
    assert done["loads"] == 0
    assert sum(name.endswith(".safetensors") for name in done["files"]) == num_files
    one, other = done["configs"]
    for config in (one, other):
        config.pop("base_model_name_or_path", None)
    assert one == other
    assert done["max_logit_difference"] is None
    assert done["left"] == ["base", "out", "root"]
    if how["method"] == "full" or how.get("merged"):
        assert run(pool, tmp_path, cases_export.stranger_loads)


def test_an_export_of_a_checkpoint_in_parts_takes_the_memory_of_one_file(pool, tmp_path):
    parts, whole = (
        run(pool, tmp_path / str(each), cases_export.memory, in_parts=each, file_bytes=32 * MIB)
        for each in (True, False)
    )
    assert sum(parts["files"]) > 140 * MIB
    assert max(parts["files"]) <= 33 * MIB
    assert parts["peak"] <= max(parts["files"]) + CONSTANT, parts
    assert whole["peak"] > sum(whole["files"])


def test_where_the_base_can_only_be_loaded_whole_it_is_and_that_is_said(pool, tmp_path):
    done = run(pool, tmp_path, cases_export.by_tensor, start="random", merged=True)
    assert (done["names"], done["values"], done["loads"]) == ([], [], 1)
    assert "the base model cannot be read tensor by tensor: it is loaded whole" in done["said"]


def test_tied_embeddings_stay_tied(pool, tmp_path):
    done = run(pool, tmp_path, cases_export.exported, merged=True, model={"tie_word_embeddings": True})
    assert done["difference"] <= LOGITS


def test_a_merged_model_has_the_precision_of_its_base(pool, tmp_path):
    done = run(pool, tmp_path, cases_export.exported, merged=True, dtype="bfloat16")
    assert done["dtype"] == "bfloat16"
    assert done["tolerance"] == 8 * 2**-7
    assert done["max_logit_difference"] <= done["tolerance"]
    assert run(pool, tmp_path, cases_export.dtypes) == ["torch.bfloat16"]


def test_a_merge_rounds_once(pool, tmp_path):
    assert run(pool, tmp_path, cases_export.merged_weights_that_differ) == {"wrong": [], "changed": 14}


def test_an_adapter_over_a_bf16_base_is_exact(pool, tmp_path):
    done = run(pool, tmp_path, cases_export.exported, dtype="bfloat16")
    assert done["difference"] <= LOGITS


def test_a_merged_model_brings_tokenizer_and_settings_of_its_base(pool, tmp_path):
    done = run(pool, tmp_path, cases_export.tokenizer_and_settings)
    assert done["tokens"] == done["expected_tokens"]
    assert done["use_cache"] is True
    assert done["eos"] == 1


@pytest.mark.parametrize(
    ("damage", "merged", "words"),
    [
        ("one_value_changed", False, "these tensors are not what was written"),
        ("one_value_changed", True, "these tensors are not what was written"),
        ("one_tensor_missing", False, ""),
        ("file_cut", False, "it cannot be loaded"),
        ("file_cut", True, "it cannot be loaded"),
        ("scale_changed", False, "expected logits within 1.0e-04"),
    ],
)
def test_a_damaged_export_is_refused_and_removed(pool, tmp_path, damage, merged, words):
    error = run(pool, tmp_path, cases_export.refused, damage=damage, merged=merged)
    assert error["kind"] == "RunFailed"
    assert words in error["seen"]
    assert error["left"] == ["base", "root"]


def test_a_folder_that_exists_is_never_written_to(pool, tmp_path):
    error = run(pool, tmp_path, cases_export.refused, to_exists=True)
    assert (error["kind"], error["exit_code"]) == ("UsageError", 2)
    assert list((tmp_path / "out").iterdir()) == []


def test_merging_needs_an_adapter(pool, tmp_path):
    assert "no adapter to merge" in run(pool, tmp_path, cases_export.refused, method="full", merged=True)["what"]


def test_an_adapter_of_a_weight_that_two_layers_share_is_not_merged(pool, tmp_path):
    error = run(
        pool, tmp_path, cases_export.refused, merged=True, targets=["lm_head"], model={"tie_word_embeddings": True}
    )
    assert "cannot be merged" in error["what"]
    assert error["left"] == ["base", "root"]


@pytest.mark.parametrize(("what", "words"), [("nan", "not finite"), ("fresh", "all B matrices")])
def test_weights_that_nobody_can_want_are_refused(pool, tmp_path, what, words):
    assert words in run(pool, tmp_path, cases_export.of_useless_weights, what=what)["seen"]


def test_a_checkpoint_without_commit_record_is_refused(pool, tmp_path):
    assert run(pool, tmp_path, cases_export.other_part)["kind"] == "CheckpointError"


def test_the_controller_reads_progress_and_a_result(pool, tmp_path):
    done = run(pool, tmp_path, cases_export.on_the_command_line)
    *progress, result = done["lines"]
    assert done["code"] == 0
    assert {line["kind"] for line in progress} == {"progress"}
    assert result["kind"] == "result"
    assert {"folder", "files", "max_logit_difference", "tolerance"} <= result.keys()
