"""A script of the user's own in containers of a real podman on two hosts: one has the image, the other gets it from there.

The image is made here of this machine's Python and the torch of the tests, by `podman import`.
"""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from tests.lab import limits
from tests.lab.hosts import lab_folders
from tests.lab.test_sync import entries
from tests.lab.user import NewUser, processes_of_runs

pytestmark = [pytest.mark.lab("root", "podman", "crun"), pytest.mark.timeout(1500)]

SCRIPT = """
import os, pathlib, sys, time
import torch, torch.distributed as dist

def asleep():
    time.sleep(3600)

dist.init_process_group("gloo")
rank = dist.get_rank()
saved = torch.zeros(1)
if rank == 0 and "--resume" in sys.argv:
    saved += int(pathlib.Path(sys.argv[1]).read_text())
dist.broadcast(saved, 0)
first = 1 + int(saved.item())
print("in the image:", pathlib.Path("/etc/made-for-tests").exists(), "host", os.uname().nodename, flush=True)
for step in range(first, 100000):
    value = torch.ones(1)
    dist.all_reduce(value)
    if rank == 0:
        pathlib.Path(sys.argv[1]).write_text(str(step))
        print(f"step {step} loss {value.item() / step}", flush=True)
    if "--resume" in sys.argv and step == first + 20 and rank == 2:
        asleep()
    time.sleep(0.1)
"""
NAME = "localhost/train:1"
STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{home}/containers"\nrunroot = "/run/containers"\n'
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
"""
GROUPS = """
mount -t tmpfs groups /sys/fs/cgroup
for name in cpu cpuacct cpuset memory devices freezer blkio pids; do
    mkdir /sys/fs/cgroup/$name; mount -t cgroup -o $name groups /sys/fs/cgroup/$name || rmdir /sys/fs/cgroup/$name
done
mkdir /sys/fs/cgroup/systemd; mount -t cgroup -o none,name=systemd groups /sys/fs/cgroup/systemd
"""
PROGRAMS = ("python3", "sh", "env", "sleep", "cat")
PACKAGES = (
    "torch",
    "typing_extensions",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "MarkupSafe",
    "filelock",
    "fsspec",
)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A tar of a root folder with Python and torch."""
    folder = tmp_path_factory.mktemp("image")
    root = folder / "root"
    for name in ("usr/bin", "usr/lib64", "etc", "proc", "sys", "dev", "tmp", "root"):
        (root / name).mkdir(parents=True)
    for link in ("bin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    (root / "etc/made-for-tests").touch()
    library = Path(sysconfig.get_path("stdlib"))
    left_out = shutil.ignore_patterns("__pycache__", "test", "site-packages", "dist-packages", "config-*", "idlelib")
    shutil.copytree(library, root / library.relative_to("/"), ignore=left_out)
    programs = [Path(sys.executable).resolve(), *(Path(shutil.which(name)).resolve() for name in PROGRAMS[1:])]
    for name, path in zip(PROGRAMS, programs, strict=True):
        shutil.copy(path, root / "usr/bin" / name)
    heavy = [file.locate() for file in metadata.files("torch") if "lib" in file.parts and ".so" in file.name]
    for path in _libraries([*programs, *library.glob("lib-dynload/*.so"), *heavy]):
        target = root / ("usr" if path.parts[1].startswith("lib") else "") / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for package in PACKAGES:
        for file in metadata.files(package):
            is_needed = "bin" not in file.parts or file.name == "torch_shm_manager"
            if is_needed and file.parts[0] != ".." and not {"include", "test", "__pycache__"} & set(file.parts):
                target = root / "usr/lib/packages" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), target)
    asked = [str(programs[0]), "-I", "-c", "import site; print(site.getsitepackages()[0])"]
    site = root / subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip().lstrip("/")
    site.mkdir(parents=True, exist_ok=True)
    (site / "packages.pth").write_text("/usr/lib/packages\n")
    subprocess.run(["tar", "cf", str(folder / "root.tar"), "-C", str(root), "."], check=True)
    shutil.rmtree(root)
    return folder


REGISTRY = """
version: 0.1
storage: {filesystem: {rootdirectory: registry}}
http: {addr: "127.0.0.1:5000"}
"""
PLAIN = """
[[registry]]
location = "localhost:5000"
insecure = true
"""
"""It speaks HTTP on its own host's loopback alone."""


def _libraries(files):
    said = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True).stdout
    found = {Path(path) for path in re.findall(r"(?<!\S)(/\S+\.so\S*)(?= \(0x)", said)}
    return {path for path in found if path.is_relative_to(sys.base_prefix) or path.parts[1] in {"lib", "lib64", "usr"}}


@pytest.fixture
def engines(lab):
    """`engines(2)`: so many hosts with podman and no image; binds: more folders of this machine."""

    def make(num_hosts, *binds):
        made = lab(
            num_hosts, binds=[*lab_folders(), *binds], meshed=True, disk="8g", shm="1g", ttl_s=1500, hide=("docker",)
        )
        groups = GROUPS if limits.version() == 1 else "mount -t cgroup2 groups /sys/fs/cgroup"
        for host in made.hosts:
            host.write("/etc/containers/storage.conf", STORAGE.format(home=host.home))
            host.write("/etc/containers/containers.conf", CONFIGURATION)
            host.run(["sh", "-c", groups])
        return made

    return make


def test_a_script_in_containers_starts_is_killed_and_resumed_hangs_and_stops_without_orphans(engines, image):
    made = engines(2, image)
    made["h0"].check(["podman", "import", "-q", str(image / "root.tar"), NAME], timeout_s=300)
    user = NewUser(made.user)
    user.desk.write("project/train.py", SCRIPT)
    user.types("init", "h0", "h1", "--yes")
    text = user.desk.read("cluster.yaml").decode()
    text = re.sub(r"(name: h1\b(?:.|\n)*?slots: )1", r"\g<1>2", text)
    user.desk.write("cluster.yaml", f"environment: {{podman: {NAME}}}\n{text}")
    words = ("--restarts", "1", "--resume-flag=--resume", "--stall-after", "15s", "--", "train.py", "saved")
    started = user.types("run", "--dir", "project", "--detach", *words, timeout_s=500)
    run = started.stdout.split()[-1]
    ids = {host.check(["podman", "image", "ls", "-a", "-q", "--no-trunc"]).strip() for host in made.hosts}
    assert len(ids) == 1
    assert made["h1"].run(["sh", "-c", "ls gangline/images"]).stdout == ""

    row = user.awaits(run, lambda row: (row["step"] or 0) > 10, "it trains", patience_s=300)
    assert row["phase"] == "running"
    home = f"gangline/runs/{run}"
    log = made["h1"].read(f"{home}/attempts/1/rank-2.log").decode()
    assert "in the image: True" in log
    rank = json.loads(made["h1"].read(f"{home}/attempts/1/rank-1.pid"))["pid"]
    made["h1"].check(["kill", "-9", str(rank)])
    user.awaits(run, lambda row: row["attempt"] == 2 and row["phase"] == "running", "again", patience_s=300)

    def told(row):
        events = made["h0"].read(f"{home}/events.jsonl").decode()
        return re.search(r"rank 2 on h1 stands at asleep \(train\.py:6\)", events)

    user.awaits(run, told, "the rank that hangs is named", patience_s=300)
    steps = [json.loads(line) for line in made["h0"].read(f"{home}/metrics.jsonl").decode().splitlines()]
    numbers = [line["step"] for line in steps if line["kind"] == "step"]
    assert numbers == sorted(numbers)  # it went on where it was
    user.types("stop", run)
    assert user.row(run)["phase"] == "stopped"
    for host in made.hosts:
        assert processes_of_runs(host) == []
        assert "conmon" not in host.check(["ps", "-eo", "args"])
        assert host.check(["podman", "ps", "-a", "-q"]) == ""


def test_a_host_without_podman_or_an_image_that_nobody_has_is_refused_before_anything_starts(engines):
    made = engines(1)
    user = NewUser(made.user)
    user.desk.write("project/train.py", SCRIPT)
    user.types("init", "h0", "--yes")
    text = user.desk.read("cluster.yaml").decode()
    user.desk.write("cluster.yaml", f"environment: {{podman: localhost/nobody:1}}\n{text}")
    refused = user.types("run", "--dir", "project", "--", "train.py", "saved", code=None, timeout_s=300)
    assert refused.returncode != 0
    assert "no host has the image localhost/nobody:1, and h0 cannot pull it" in refused.stderr
    user.desk.write("cluster.yaml", f"environment: {{docker: {NAME}}}\n{text}")
    refused = user.types("run", "--dir", "project", "--", "train.py", "saved", code=None, timeout_s=300)
    assert "h0: docker is not installed" in refused.stderr
    assert made["h0"].run(["sh", "-c", "ls gangline/runs"]).stdout == ""


@pytest.mark.lab("docker-registry")
def test_an_image_of_a_private_registry_is_pulled_by_its_digest_once_and_handed_on_by_its_id(engines):
    """The registry is reached by the first host alone, so that the other one can have it from nowhere else."""
    made = engines(2)
    first, _second = made.hosts
    first.write("registry.yml", REGISTRY)
    first.write("/etc/containers/registries.conf", PLAIN)
    first.write("root/made-here", "not the whole of a system, which is not run here")
    name = "localhost:5000/train"
    serve = "nohup docker-registry serve registry.yml > registry.log 2>&1 & for _ in $(seq 100); do "
    first.check(
        [
            "sh",
            "-c",
            serve
            + "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 5000))' && exit; sleep 0.2; done; exit 1",
        ]
    )
    first.check(["sh", "-c", f"tar cf root.tar -C root . && podman import -q root.tar {name}:1"])
    first.check(["podman", "push", "-q", "--digestfile", "digest", f"{name}:1"])
    digest = first.read("digest").decode().strip()
    first.check(["podman", "image", "rm", "-a", "-f"])
    assert first.check(["podman", "image", "ls", "-a", "-q"]) == ""

    found = made.user.call("tests.lab.cases_sync:images", hosts=entries(made), image=f"{name}@{digest}")
    ids = [host.check(["podman", "image", "ls", "-a", "-q", "--no-trunc"]).split() for host in made.hosts]
    assert ids[0] == ids[1] != []
    assert {prefix[-1] for prefix in found.values()} == {ids[0][0].removeprefix("sha256:")}
    pulls = re.findall(r'"GET /v2/train/manifests/[^"]*"', first.read("registry.log").decode())
    assert all(digest in pull for pull in pulls)
    assert pulls

    other = digest[:-4] + ("0000" if digest[-4:] != "0000" else "1111")
    refused = made.user.call("tests.lab.cases_sync:images", hosts=entries(made), image=f"{name}@{other}")["error"]
    assert f"no host has the image {name}@{other}, and h0 cannot pull it" in refused
