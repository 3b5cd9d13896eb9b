"""Which GGUF files are refused before anything is done, and what is said of those that were written."""

from pathlib import Path

import pytest

from gangline.errors import UsageError
from gangline.serve.gguf_export import gguf_folder, lost_lines, refuse_forms


def test_a_form_that_is_not_written_names_what_makes_it():
    with pytest.raises(UsageError, match=r"--gguf q5_k_m: this form is not written here") as caught:
        refuse_forms(["f16", "q5_k_m"], check=False)
    assert "llama-quantize model-f16.gguf model-q5_k_m.gguf q5_k_m" in caught.value.fix


def test_a_check_of_no_file_is_refused():
    with pytest.raises(UsageError, match=r"--check is for GGUF files"):
        refuse_forms([], check=True)
    refuse_forms(["f16", "q8_0"], check=True)


def test_an_adapter_is_no_whole_model(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match=r"holds no whole model"):
        gguf_folder(tmp_path, tmp_path / "out", ["f16"], check=False, home=tmp_path)


def test_a_folder_that_is_there_is_not_written_to(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match=r"expected a new folder|exists"):
        gguf_folder(tmp_path, tmp_path, ["f16"], check=False, home=tmp_path)


def test_what_was_lost_is_said_for_each_file_and_what_was_not_written():
    lost = {"max_logit_difference": 0.0016, "top_agreement": 0.9896, "positions": 96}
    record = {"lost": {"f16": {**lost, "perplexity": 5.25, "model_perplexity": 5.0}}, "note": "no Modelfile"}
    assert lost_lines(record) == [
        (
            "f16: logits differ by 0.0016 at the most, the same likeliest word at 99.0% of 96 positions, perplexity 5.25 "
            "(the model's: 5)"
        ),
        "no Modelfile",
    ]
