"""What stands in front of the user's program notes who it is and where it writes, and is gone."""

import json
import os
import subprocess
import sys
from pathlib import Path

from gangline.agent.supervise import rank_start
from gangline.runs.state import ProcessId


def start(folder, *program, rank="3"):
    return subprocess.Popen(
        [sys.executable, rank_start.__file__, str(folder), *program],
        env={**os.environ, "RANK": rank},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_program_has_the_pid_that_was_noted_and_writes_both_streams_to_the_log_of_its_rank(tmp_path):
    text = "import os, sys; print(os.getpid(), flush=True); print('hm', file=sys.stderr, flush=True); input(); print('end')"
    process = start(tmp_path, sys.executable, "-c", text)
    log = tmp_path / "rank-3.log"
    while not (log.exists() and log.read_text().endswith("hm\n")):
        assert process.poll() is None
    record = json.loads((tmp_path / "rank-3.pid").read_text())
    assert ProcessId(**record).is_alive
    _, errors = process.communicate("\n")
    assert log.read_text().splitlines() == [str(record["pid"]), "hm", "end"]
    assert errors == ""
    assert log.stat().st_mode & 0o077 == 0


def test_a_program_that_is_not_there_is_told_in_the_log_and_on_the_console(tmp_path):
    _, errors = start(tmp_path, "/no/such/program").communicate()
    assert "cannot start /no/such/program: No such file" in errors
    assert (tmp_path / "rank-3.log").read_text() == errors


def test_it_needs_nothing_of_gangline():
    assert "gangline" not in {line.split()[1].split(".")[0] for line in _imports(Path(rank_start.__file__))}


def _imports(path):
    return [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
