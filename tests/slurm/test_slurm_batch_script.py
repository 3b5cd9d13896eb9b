"""The batch script of `gangline export-config sbatch`, submitted to Slurm: it starts the ranks on the nodes."""

import sys

from gangline.control.user_command import command_gang
from gangline.launch.config_files import FORMATS, RunForOthers
from gangline.launch.direct import DirectBackend
from gangline.launch.program import Program
from gangline.runs.cluster import Cluster, Host
from tests.slurm.user import Account

SCRIPT = """
import os, socket
rank, size, local = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
open(f"seen-{rank}-{size}-{local}-{socket.gethostname()}", "x").close()
"""


def test_slurm_starts_the_ranks_of_every_node(slurm):
    account = Account(slurm(2))
    hosts = tuple(Host(name=name, workdir="/w", python=sys.executable, slots=2) for name in ("a", "b"))
    cluster, program = Cluster(name="c", hosts=hosts), Program(kind="command", argv=("train.py",))
    gang = command_gang(cluster, "calm-otter-7", 1)
    request = DirectBackend(num_cpus=1).render(cluster, gang, port=29511, program=program)
    files = FORMATS["sbatch"](RunForOthers(cluster=cluster, request=request, program=program))
    account.desk.write("job.sbatch", files["job.sbatch"])
    account.desk.write("train.py", SCRIPT)
    account.desk.check(["sbatch", "--wait", "job.sbatch"], timeout_s=80)
    seen = account.desk.check(["sh", "-c", "ls seen-*"]).split()
    assert [name.rpartition("-")[0] for name in seen] == ["seen-0-4-0", "seen-1-4-1", "seen-2-4-0", "seen-3-4-1"]
    assert [name.rpartition("-")[2] for name in seen] == ["n0", "n0", "n1", "n1"]
