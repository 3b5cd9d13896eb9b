"""Loading models: what is refused, in which dtypes, with how much memory."""

import pytest

from tests.train import cases_model


def test_a_folder_without_weights_is_named(pool, tmp_path):
    pool(1).run(cases_model.write_folder, folder=str(tmp_path / "bare"), kind="bare")
    error = pool(1).run(cases_model.load_error, folder=str(tmp_path / "bare"))[0]
    assert error["kind"] == "ModelError"
    assert error["exit_code"] == 2
    assert "has no weights" in error["what"]
    assert "config.json" in error["seen"]
    assert "model.start: random" in error["fix"]


def test_a_folder_that_is_no_model_is_named(pool, tmp_path):
    error = pool(1).run(cases_model.load_error, folder=str(tmp_path))[0]
    assert error["kind"] == "ModelError"
    assert str(tmp_path) in error["what"]


def test_code_in_a_model_folder_is_refused_and_not_executed(pool, tmp_path):
    folder = tmp_path / "remote"
    pool(1).run(cases_model.write_folder, folder=str(folder), kind="old", auto_map="unheard-of")
    for case in (cases_model.load_error, cases_model.tokenizer_error):
        error = pool(1).run(case, folder=str(folder))[0]
        assert error["kind"] == "ModelError"
        assert "own code" in error["what"]
        assert "trust_remote_code" in error["fix"]
    assert not (folder / "canary").exists()


def test_code_beside_a_family_that_transformers_has_is_left_alone(pool, tmp_path):
    folder = tmp_path / "leftover"
    pool(1).run(cases_model.write_folder, folder=str(folder), kind="old", auto_map="llama")
    assert pool(1).run(cases_model.old_weights_equal, folder=str(folder)) == [True]
    assert not (folder / "canary").exists()


def test_a_pickle_among_old_weights_is_refused_and_not_executed(pool, tmp_path):
    folder = tmp_path / "evil"
    pool(1).run(cases_model.write_folder, folder=str(folder), kind="evil")
    error = pool(1).run(cases_model.load_error, folder=str(folder))[0]
    assert error["kind"] == "ModelError"
    assert "pickle" in error["what"]
    assert not (folder / "canary").exists()


def test_old_weights_are_loaded(pool, tmp_path):
    folder = tmp_path / "old"
    pool(1).run(cases_model.write_folder, folder=str(folder), kind="old")
    assert pool(1).run(cases_model.old_weights_equal, folder=str(folder)) == [True]


def test_targets_that_match_nothing_are_answered_with_names_that_do(pool):
    error = pool(1).run(cases_model.lora_error, targets=["qproj"])[0]
    assert "qproj" in error["what"]
    assert "q_proj" in error["seen"]


@pytest.mark.parametrize(
    ("method", "parameters", "expected"),
    [
        ("full", "auto", [["torch.float32"], []]),
        ("full", "compute", [["torch.bfloat16"], []]),
        ("lora", "auto", [["torch.float32"], ["torch.bfloat16"]]),
        ("lora", "compute", [["torch.bfloat16"], ["torch.bfloat16"]]),
    ],
)
def test_trained_weights_are_fp32_unless_the_job_wants_pure_bf16(pool, method, parameters, expected):
    assert pool(1).run(cases_model.dtypes, method=method, parameters=parameters) == [expected]


@pytest.mark.parametrize("old", [False, True])
def test_a_model_is_never_held_twice_while_loading(zygote, tmp_path, old):
    folder = str(tmp_path / "large")
    size = zygote.fork(cases_model.write_large, folder=folder, old=old).result()
    # in its own dtype it is mapped from the file: pages that the kernel can take back and ranks share
    mapped = zygote.fork(cases_model.loading_peak, folder=folder, converted=False).result()
    assert mapped["held"] == size
    assert mapped["peak"] < 0.3 * size
    converted = zygote.fork(cases_model.loading_peak, folder=folder, converted=True).result()
    assert converted["held"] == size // 2
    assert 0.8 * converted["held"] < converted["peak"] < 1.3 * converted["held"]
