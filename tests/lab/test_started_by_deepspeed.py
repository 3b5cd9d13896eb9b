"""The files of `gangline export-config deepspeed`, used by DeepSpeed's own launcher with pdsh on real hosts."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.lab.hosts import lab_folders
from tests.lab.user import NewUser

pytestmark = pytest.mark.timeout(300)
SCRIPT = """
import os
rank, size, local = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
print(f"found {rank} of {size}, {local} here, {os.environ['NCCL_DEBUG']}", flush=True)
"""


def test_deepspeed_and_pdsh_start_the_ranks_of_every_host(lab):
    if shutil.which("pdsh") is None:
        pytest.skip("no pdsh on this computer")
    made = lab(2, binds=lab_folders(), meshed=True)
    user = NewUser(made.user)
    user.describes(*(host.name for host in made.hosts))
    user.desk.write("cluster.yaml", user.desk.read("cluster.yaml").decode().replace("slots: 1", "slots: 2", 1))
    user.types("export-config", "deepspeed", "-o", "files", "--", "NCCL_DEBUG=INFO", "torchrun", "train.py")
    head = made.hosts[0]
    for name in ("hostfile", ".deepspeed_env", "deepspeed.sh"):
        head.write(f"job/{name}", user.desk.read(f"files/{name}").decode())
    for host in made.hosts:
        host.write("job/train.py", SCRIPT)
    folder = head.check(["sh", "-c", "cd job && pwd"]).strip()
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    done = head.run(["sh", "deepspeed.sh"], cwd=folder, env={"PATH": path, "PDSH_RCMD_TYPE": "ssh"}, timeout_s=200)
    # Ranks of one host may write into one line.
    found = sorted(re.findall(r"found (\d of \d, \d here, INFO)", done.stdout))
    assert found == ["0 of 3, 0 here, INFO", "1 of 3, 1 here, INFO", "2 of 3, 0 here, INFO"], (done.stdout, done.stderr)
