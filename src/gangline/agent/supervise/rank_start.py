"""In front of a rank of the user's own program: notes who it is and where it writes, then becomes that program.

    python rank_start.py FOLDER PROGRAM [ARGUMENT...]

A file of its own beside the host agent's, because the environment that runs it need not know gangline. What the program
prints goes to FOLDER/rank-<r>.log, both streams in the order in which they are written. A Python program writes its
stacks to FOLDER/rank-<r>.stacks when it is asked (rank_stacks.py). It finds its number under the names that other
launchers use, too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Dict, List

NAMES: Dict[str, str] = {
    "RANK": "OMPI_COMM_WORLD_RANK PMI_RANK MV2_COMM_WORLD_RANK SLURM_PROCID",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE PMI_SIZE MV2_COMM_WORLD_SIZE SLURM_NTASKS SLURM_NPROCS",
    "LOCAL_RANK": (
        "OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_NODE_RANK MPI_LOCALRANKID MV2_COMM_WORLD_LOCAL_RANK SLURM_LOCALID"
    ),
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS MV2_COMM_WORLD_LOCAL_SIZE LOCAL_SIZE",
    "GROUP_RANK": "NODE_RANK SLURM_NODEID CROSS_RANK",
    "GROUP_WORLD_SIZE": "SLURM_NNODES SLURM_JOB_NUM_NODES CROSS_SIZE",
}
"""A variable of torchrun -> its names under OpenMPI, MPICH, Intel MPI, MVAPICH, Slurm, DeepSpeed and Lightning. Inside
a job of Slurm they replace those of the step, which has one task per host.
"""


def main(argv: List[str]) -> int:
    """Entry point; returns only if the program cannot be started."""
    folder, program = argv[0], argv[1:]
    rank = os.environ["RANK"]
    console = os.dup(2)
    os.set_inheritable(console, False)
    log = os.open(f"{folder}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    _write_pid(Path(folder, f"rank-{rank}.pid"))
    os.environ["GANGLINE_RANK_FILES"] = folder
    _let_say_where(folder, rank)
    _name_in_other_ways()
    try:
        os.execvp(program[0], program)  # noqa: S606  (no shell is wanted)
    except OSError as error:
        words = f"cannot start {program[0]}: {error.strerror}\n".encode()
        os.write(2, words)
        os.write(console, words)
    return 127


def _write_pid(path: Path) -> None:
    start_ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"pid": os.getpid(), "start_ticks": start_ticks}), encoding="ascii")
    part.replace(path)


def _let_say_where(folder: str, rank: str) -> None:
    own = Path(__file__).with_name("path")
    if own.is_dir():
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{own}{os.pathsep}{before}" if before else str(own)
        os.environ["GANGLINE_STACKS"] = f"{folder}/rank-{rank}.stacks"


def _name_in_other_ways() -> None:
    for variable, names in NAMES.items():
        if variable in os.environ:
            os.environ.update(dict.fromkeys(names.split(), os.environ[variable]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
