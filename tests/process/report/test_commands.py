"""Commands that are printed to be pasted into a shell."""

import json
import shutil
import subprocess
import sys

import pytest

from gangline.report.commands import joined
from tests import hostile


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
def test_1000_hostile_words_can_be_pasted_and_mean_the_same(tmp_path):
    words = hostile.words(1000, tmp_path / "canary", seed=11)
    line = joined(words)
    assert line.isprintable()
    echo = "import sys, os, json; print(json.dumps([os.fsencode(word).hex() for word in sys.argv[1:]]))"
    command = joined([sys.executable, "-S", "-c", echo]) + " " + line
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [word.encode("utf-8", "surrogateescape").hex() for word in words]
    assert not (tmp_path / "canary").exists()
