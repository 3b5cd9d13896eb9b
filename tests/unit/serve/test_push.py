"""What `export --push` refuses before anything is sent, and what it would send."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gangline.errors import UsageError
from gangline.runs.hub_names import is_hub_name
from gangline.runs.layout import EXPORT_NOTE
from gangline.serve.push import files_of, note_of, others_in, refuse_local_base, refuse_public, refuse_push


@pytest.mark.parametrize(
    "name",
    ["tea", "tea/", "/tea", "tea/a/b", "tea/a..b", "tea/a--b", "tea/-a", "tea/a.git", "tea/ü", f"tea/{'a' * 96}"],
)
def test_a_name_that_no_repository_can_have_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"this is no name of a repository"):
        refuse_push(name, {})


def test_names_and_folders_are_told_apart() -> None:
    assert is_hub_name("gpt2")
    assert is_hub_name("meta-llama/Llama-3.2-1B")
    assert not any(map(is_hub_name, ("/models/llama", "./llama", "~/llama", "C:\\llama", "")))


@pytest.mark.parametrize("name", ["GANGLINE_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_nothing_is_sent_where_the_hub_is_switched_off(name: str) -> None:
    with pytest.raises(UsageError, match=r"switched off") as caught:
        refuse_push("tea/adapter", {name: "1"})
    assert name in caught.value.fix
    refuse_push("tea/adapter", {name: "0"})


def test_an_adapter_over_a_folder_of_this_computer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"nobody else has"):
        refuse_local_base("/models/llama", is_adapter=True)
    refuse_local_base("/models/llama", is_adapter=False)
    refuse_local_base("kettles/base", is_adapter=True)


def test_a_folder_that_gangline_did_not_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no export of gangline"):
        note_of(tmp_path)
    (tmp_path / EXPORT_NOTE).write_text(json.dumps({"run": "calm-otter-7"}))
    assert note_of(tmp_path) == {"run": "calm-otter-7"}
    (tmp_path / "passwords").symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match=r"is a link"):
        note_of(tmp_path)


def test_only_the_same_run_in_the_same_form_is_written_over_without_a_question() -> None:
    seen = {"files": ["model.safetensors"], "run": "calm-otter-7", "merged": True}
    assert others_in(seen, "calm-otter-7", merged=True) == []
    assert others_in(seen, "calm-otter-7", merged=False) == ["model.safetensors"]
    assert others_in(seen, "other", merged=True) == ["model.safetensors"]


def test_private_is_no_wish_that_is_passed_over() -> None:
    with pytest.raises(UsageError, match=r"is there and public"):
        refuse_public("tea/a", {"exists": True, "private": False}, private=True)
    refuse_public("tea/a", {"exists": True, "private": True}, private=True)
    refuse_public("tea/a", {"exists": False}, private=True)


def test_files_of_folders_inside_are_sent_too(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_text("12345")
    (tmp_path / "b").write_text("1")
    assert files_of(tmp_path) == [("b", 1), ("code/a.py", 5)]
