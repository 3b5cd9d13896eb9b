"""The contract of backends on a real node of Ray, which is there already; and what is said of clusters that do not fit.

`make ray` puts Ray into `.ray`; without it these tests are skipped.
"""

import dataclasses
import inspect
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import typing
from pathlib import Path

import pytest

from gangline.control.user_command import command_gang
from gangline.errors import RunFailed
from gangline.launch.config_files import FORMATS, RunForOthers
from gangline.launch.direct import DirectBackend
from gangline.launch.program import Program
from gangline.launch.ray import RayBackend
from gangline.runs.cluster import Cluster, Host
from tests.lab.hosts import ROOT
from tests.process.launch import test_contract as contract
from tests.waiting import wait_until

PYTHON = ROOT / ".ray" / "bin" / "python"
pytestmark = [pytest.mark.skipif(not PYTHON.exists(), reason="no .ray: make ray"), pytest.mark.timeout(180)]
TOKEN = "ab" * 32
CPUS = 3


class RayGang(contract.MpirunGang):
    """Host agents and scripts below actors of Ray."""

    KIND = RayBackend
    env: typing.ClassVar = {}

    def __init__(self, folder, modes, broken, has_warm_pool):
        contract.DirectGang.__init__(self, folder, modes, broken, has_warm_pool)
        self.backend = RayBackend()
        self.plan()

    def plan(self, *, addresses=None, env=None, num_ranks=None):
        changes = {"python": str(PYTHON), "env": {**self.env, **(env or {})}}
        hosts = [dataclasses.replace(host, **changes) for host in contract.cluster(self.folder).hosts]
        if addresses:
            hosts = [
                dataclasses.replace(host, transport="ssh", address=address)
                for host, address in zip(hosts, addresses, strict=True)
            ]
        if num_ranks:
            changes = {"ranks": tuple(range(num_ranks)), "devices": tuple(range(num_ranks))}
            parts = [dataclasses.replace(part, **changes) for part in self.request.hosts]
            self.request = dataclasses.replace(self.request, hosts=tuple(parts))
        cluster = dataclasses.replace(contract.cluster(self.folder), hosts=tuple(hosts))
        launcher = self.backend.launcher(cluster, self.request)
        self.request = dataclasses.replace(self.request, backend="ray", launcher=launcher)


@pytest.fixture(scope="module")
def node():
    """A node of Ray with a token, as somebody else has started it; its variables for the cluster file."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # its sockets have paths of 107 letters at the most
    (folder / "token").write_text(TOKEN)
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    words = [str(PYTHON), "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    words += [f"--num-cpus={CPUS}", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}/t"]
    words += ["--object-store-memory=80000000", "--include-log-monitor=false"]
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen(words, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: "Ray runtime started" in (folder / "log").read_text(), "Ray starts", timeout_s=90)
        yield {**env, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        started.terminate()
        try:
            started.wait(timeout=40)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
            shutil.rmtree(folder)


@pytest.fixture
def make(node, tmp_path):
    RayGang.env = node
    yield from contract.making(RayGang, tmp_path)


globals().update(
    {
        name: test
        for name, test in vars(contract).items()
        if name.startswith("test_") and "make" in inspect.signature(test).parameters
    }
)
"""Every promise of a backend, kept below Ray."""


def refusal(gang):
    with pytest.raises(RunFailed) as caught:
        gang.backend.start(gang.request, gang.transports)
    assert gang.left() == []
    return caught.value


def test_an_address_without_a_cluster_is_named(make):
    gang = make()
    gang.plan(env={"RAY_ADDRESS": "127.0.0.1:1"})
    assert refusal(gang).what == "there is no cluster of Ray at 127.0.0.1:1, or the head is no node of it"


@pytest.mark.parametrize("token", ["cd" * 32, None])
def test_a_cluster_that_wants_another_token_lets_nobody_in(make, tmp_path, token):
    gang = make()
    (tmp_path / "other").write_text(token or "")
    gang.plan(env={"RAY_AUTH_TOKEN_PATH": str(tmp_path / ("other" if token else "absent"))})
    failure = refusal(gang)
    assert "does not let us in: it wants another token" in failure.what, failure
    assert "RAY_AUTH_TOKEN_PATH: FILE" in failure.fix


def test_hosts_that_are_no_nodes_are_named_with_the_nodes_there_are(make):
    gang = make()
    gang.plan(addresses=["10.99.0.1", "10.99.0.2", "10.99.0.3"])
    failure = refusal(gang)
    assert "pc1 (10.99.0.1), pc2 (10.99.0.2), pc3 (10.99.0.3)" in failure.what
    assert "its nodes are " in failure.seen


def test_ranks_of_a_node_without_gpus_take_its_cpus(make):
    gang = make()
    gang.plan(num_ranks=CPUS // len(contract.HOSTS))
    gang.backend.start(gang.request, gang.transports)
    assert {status.phase for status in gang.backend.poll(gang.request, gang.transports)} == {"running"}


def test_a_cluster_without_room_says_so(make):
    gang = make()
    gang.plan(num_ranks=CPUS + 1)
    assert "has no room on " in refusal(gang).what


def test_a_python_without_ray_is_named(make):
    gang = make()
    argv = ("python3", *gang.request.launcher.argv[1:])
    launcher = dataclasses.replace(gang.request.launcher, argv=argv)
    gang.request = dataclasses.replace(gang.request, launcher=launcher)
    failure = refusal(gang)
    assert failure.what.startswith("Ray is not installed in ")
    assert "pip install ray" in failure.fix


SCRIPT = """
import os, sys
rank, size, local, word = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WORD"))
open(f"{sys.argv[1]}/{rank}-{size}-{local}-{word}", "x").close()
"""


def test_the_program_of_export_config_starts_the_ranks_of_every_host(node, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "seen").mkdir()
    hosts = tuple(
        Host(name=f"pc{number}", workdir=str(tmp_path), python=sys.executable, slots=slots, env={"WORD": f"w{number}"})
        for number, slots in enumerate((1, 2))
    )
    cluster = Cluster(name="c", hosts=hosts)
    program = Program(kind="command", argv=("train.py", str(tmp_path / "seen")))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gang = command_gang(cluster, "calm-otter-7", 1)
    request = DirectBackend(num_cpus=1).render(cluster, gang, port=port, program=program)
    files = FORMATS["ray"](RunForOthers(cluster=cluster, request=request, program=program))
    assert list(files) == ["ray-pc0.sh", "ray_job.py"]
    (tmp_path / "ray_job.py").write_text(files["ray_job.py"])
    done = subprocess.run(
        [str(PYTHON), "ray_job.py"], cwd=tmp_path, env={**os.environ, **node}, check=False, timeout=120
    )
    assert done.returncode == 0
    assert sorted(path.name for path in (tmp_path / "seen").iterdir()) == ["0-3-0-w0", "1-3-0-w1", "2-3-1-w1"]


def test_the_commands_of_export_config_make_hosts_nodes_of_one_cluster():
    hosts = tuple(
        Host(name=name, address=address, transport="ssh", workdir="/srv", python="/opt/py")
        for name, address in (("pc1", "10.0.0.1"), ("pc2", "10.0.0.2"))
    )
    cluster, program = Cluster(name="c", hosts=hosts), Program(kind="command", argv=("train.py",))
    request = DirectBackend(num_cpus=1).render(
        cluster, command_gang(cluster, "calm-otter-7", 1), port=29500, program=program
    )
    files = FORMATS["ray"](RunForOthers(cluster=cluster, request=request, program=program))
    assert "--head --port=6379" in files["ray-pc1.sh"]
    assert "--address=10.0.0.1:6379 --node-ip-address=10.0.0.2" in files["ray-pc2.sh"]
    for name in ("ray-pc1.sh", "ray-pc2.sh"):
        assert "RAY_AUTH_MODE=token" in files[name]
        words = shlex.split(files[name].splitlines()[-1])[2:]
        made = [
            str(PYTHON),
            "-c",
            "import sys; from ray.scripts.scripts import start; start.make_context('x', sys.argv[2:])",
        ]
        subprocess.run([*made, *words], check=True, timeout=60)  # every option is one of Ray's
