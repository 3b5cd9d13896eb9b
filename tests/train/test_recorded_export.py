"""Checkpoints recorded with gangline 0.1 are exported, of each strategy."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.recorded import install


@pytest.mark.parametrize("kind", ["ddp-finished", "fsdp-finished", "pipeline-finished"])
def test_a_checkpoint_of_the_old_format_is_exported(tmp_path, monkeypatch, kind):
    run = install(kind, tmp_path / "home")
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    words = [str(Path(sys.executable).with_name("gangline")), "export", run, "--to", str(tmp_path / "model")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model/model.safetensors").stat().st_size > 10_000
