"""`gangline merge`: how adapters and weights are named, and what is refused before the trainer is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.cli.merge import command
from gangline.errors import UsageError


def test_a_folder_needs_a_weight(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the weight is missing") as caught:
        command([str(tmp_path)], to=tmp_path / "out")
    assert ":0.5 takes half of it" in caught.value.fix


def test_a_run_is_no_folder_and_the_way_to_one_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"calm-otter-7 is no folder") as caught:
        command(["calm-otter-7:0.5", f"{tmp_path}:0.5"], to=tmp_path / "out")
    assert "gangline export RUN" in caught.value.fix


def test_nothing_is_written_over(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"exists"):
        command([f"{tmp_path}:1"], to=tmp_path)


def test_a_method_that_peft_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"peft has no such method"):
        command([f"{tmp_path}:1", f"{tmp_path}:1"], to=tmp_path / "out", method="mean")
