"""`torch.distributed.run`, played: starts the ranks of a host and watches them. For programs that need no torch.

A copy of this file stands in the place of the real one in an environment on the hosts (`install`): the real one costs
many seconds of CPU time to import, and what these tests look at happens before and after it.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = "play"
NUMBERS = ("--nnodes", "--nproc-per-node", "--node-rank", "--max-restarts")
TEXTS = (
    "--rdzv-backend", "--rdzv-id", "--rdzv-conf", "--master-addr", "--master-port", "--local-addr",
    "--monitor-interval", "--shutdown-timeout", "--log-dir",
)  # fmt: skip


def install(user, hosts):
    """Make an environment with this file in each host's home folder; the path of its Python there."""
    files = {
        "torch/__init__.py": "",
        "torch/version.py": "__version__ = '2.13.0'\ncuda = None\nhip = None\n",
        "torch/distributed/__init__.py": "",
        "torch/distributed/run.py": Path(__file__).read_text(),
        "torch-2.13.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n",
    }
    for host in hosts:
        user.check(["python3", "-m", "venv", "--without-pip", FOLDER], on=host)
        (site,) = user.check(["sh", "-c", f"echo {FOLDER}/lib/python3*/site-packages"], on=host).split()
        for name, text in files.items():
            user.write(f"{site}/{name}", text, on=host)
    return f"~/{FOLDER}/bin/python"


def main():
    """Entry point; 1 if a rank ended badly or all were told to leave."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in NUMBERS:
        parser.add_argument(name, type=int)
    for name in TEXTS:
        parser.add_argument(name)
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    told = parser.parse_args()
    ranks = []

    def leave(*_):
        for rank in ranks:
            rank.terminate()
        for rank in ranks:
            rank.wait()
        sys.exit(1)

    signal.signal(signal.SIGTERM, leave)
    for number in range(told.nproc_per_node):
        place = {
            "RANK": told.node_rank * told.nproc_per_node + number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": told.nnodes * told.nproc_per_node,
            "MASTER_ADDR": told.master_addr,
            "MASTER_PORT": told.master_port,
        }
        env = {**os.environ, **{name: str(value) for name, value in place.items()}}
        ranks.append(subprocess.Popen(told.words, env=env))
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.05)
    bad = [rank for rank in ranks if rank.poll()]
    for rank in bad:
        print(f"  exitcode  : {rank.returncode} (pid: {rank.pid})", flush=True)  # noqa: T201 as torchrun does
    if bad:
        leave()


if __name__ == "__main__":
    main()
