"""TensorBoard's own files, which have the address that nobody else may read, lie in the folder of the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangline.serve.tensorboard import PATH_VARIABLE, SHOW


@pytest.mark.timeout(120)
def test_the_address_is_in_no_folder_of_everybody(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logs, everybodys = tmp_path / "logs", tmp_path / "tmp"
    logs.mkdir(mode=0o700)
    everybodys.mkdir()
    argv = [sys.executable, "-c", SHOW, "--logdir", str(logs), "--host", "127.0.0.1", "--port", "0"]
    env = {**os.environ, PATH_VARIABLE: "/nobody-can-guess", "TMPDIR": str(everybodys)}
    program = subprocess.Popen(argv, env=env, stdout=-3, stderr=-3)
    try:
        deadline = time.monotonic() + 90
        while not (found := list(logs.glob(".tensorboard-info/*.info"))):
            assert program.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert "nobody-can-guess" in found[0].read_text()
        assert list(everybodys.iterdir()) == []
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()
