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


def test_a_program_finds_its_number_under_the_names_of_other_launchers_also_inside_a_step_of_slurm(tmp_path):
    torchrun = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    variables = {**os.environ, **torchrun, "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3", "SLURM_PROCID": "2"}
    text = "import json, os; print(json.dumps(dict(os.environ)))"
    subprocess.run(
        [sys.executable, rank_start.__file__, str(tmp_path), sys.executable, "-c", text], env=variables, check=True
    )
    seen = json.loads((tmp_path / "rank-5.log").read_text())
    assert [seen[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "MV2_COMM_WORLD_RANK")] == [
        "5"
    ] * 4
    assert [seen[name] for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")] == ["6"] * 3
    assert [seen[name] for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")] == ["1"] * 3
    assert [seen[name] for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")] == ["2"] * 2
    assert (seen["SLURM_NODEID"], seen["SLURM_NNODES"], seen["NODE_RANK"]) == ("2", "3", "2")


def test_it_needs_nothing_of_gangline():
    assert "gangline" not in {line.split()[1].split(".")[0] for line in _imports(Path(rank_start.__file__))}


def _imports(path):
    return [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
