"""Three commands to a running job on hosts that have Python and sshd and nothing else: what ranks run in is built there.

The wheels come from a folder, as for a user whose computer is behind a firewall: the desk of a lab has no internet. pip
on this machine fills it once from whatever it is set up with; it is kept in pytest's cache.
"""

import platform
import subprocess
import sys

import pytest

from gangline.provision.requirements import own_lock
from tests.lab.user import NewUser, make_model, processes_of_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PYTHON = "/usr/bin/python3"
"""Of the hosts."""
NOT_THERE = ("pip", "pip3", "ensurepip", "venv", "uv", "rsync")
LOOK_FOR = """
import importlib.util
print(*filter(importlib.util.find_spec, ("pip", "ensurepip", "venv", "torch", "numpy", "gangline")))
"""
DOWNLOAD_S = 500


@pytest.fixture(scope="module")
def wheels(request):
    """Every package of our lock for the hosts' Python, and the CPU build of torch: 330 MB."""
    words = subprocess.check_output([PYTHON, "-c", "import sys; print(*sys.version_info[:3])"], text=True)
    version = tuple(map(int, words.split()))
    lock, machine, name = own_lock(), platform.machine(), "-".join(words.split()[:2])
    folder = request.config.cache.mkdir(f"lab-wheels-{lock.hash}-{name}")
    if not (folder / "whole").exists():
        lines = [f"{pin.line}+cpu" if pin.name == "torch" else pin.line for pin in lock.pins_for(version, machine)]
        (folder / "wanted.txt").write_text("\n".join([*lines, ""]))
        _download(folder, "--python-version", ".".join(map(str, version)), "--requirement", folder / "wanted.txt")
        (folder / "whole").touch()
    return folder


def _download(folder, *words):
    # Without --no-deps, another build of torch would bring gigabytes.
    command = [sys.executable, "-m", "pip", "download", "--dest", folder, "--no-deps", "--only-binary=:all:", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S)
    if done.returncode:
        pytest.skip(f"pip on this machine does not find the packages of our lock: {done.stderr.strip()[-300:]}")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def test_three_commands_on_hosts_with_nothing_but_python_and_sshd(lab, model, wheels):
    made = lab(3, disk="4g", shm="1g", hide=NOT_THERE)
    for host in made.hosts:
        assert host.check([PYTHON, "-c", LOOK_FOR]).split() == []
    user = NewUser(made.user)
    user.brings(model)
    user.desk.write(".config/pip/pip.conf", f"[global]\nno-index = true\nfind-links = {wheels}\n")
    user.desk.write("hostfile", "h0 slots=2\nh1\nh2\n")  # as DeepSpeed or MPI has it: the hosts have no GPU to count

    user.types("init", "--hostfile", "hostfile", "--yes")
    assert "python:" not in user.desk.read("cluster.yaml").decode()
    assert "0 failed" in user.types("check").stdout
    started = user.types("train", "job.yaml", "--detach", timeout_s=300)
    assert "environment built on h0 h1 h2: " in started.stderr

    run = started.stdout.strip()
    before = user.awaits(run, lambda row: (row["step"] or 0) > 5, "it trains")["step"]
    for host in made.hosts:
        # the wheels have been taken away again, and what was built is what runs
        assert host.check(["sh", "-c", "ls gangline/wheelhouse"]) == ""
        assert any("/gangline/environments/" in line for line in processes_of_runs(host))
    user.types("stop", run)
    logs = user.types("logs", run).stdout
    assert all(name in logs for name in ("h0 rank 0", "h0 rank 1", "h1 rank 2", "h2 rank 3"))

    again = user.types("resume", run, "--detach").stderr
    assert "packages" not in again
    assert "environment" not in again
    user.awaits(run, lambda row: row["step"] > before, "it goes on")
    user.types("stop", run)
    assert [line for host in made.hosts for line in processes_of_runs(host)] == []

    folder = user.types("export", run).stdout.strip()
    assert "adapter_model.safetensors" in user.desk.check(["ls", folder])
