"""Checkpoints recorded with gangline 0.1 are exported, of each strategy."""

import subprocess

import pytest

from tests.recorded import install


@pytest.mark.parametrize("kind", ["ddp-finished", "fsdp-finished", "pipeline-finished"])
def test_a_checkpoint_of_the_old_format_is_exported(tmp_path, monkeypatch, quick_python, kind):
    run = install(kind, tmp_path / "home", python=quick_python)
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    words = [str(quick_python.with_name("gangline")), "export", run, "--to", str(tmp_path / "model")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model/model.safetensors").stat().st_size > 10_000
