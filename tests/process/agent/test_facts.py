"""The facts of a host: every section for itself, bounded, on any Python that a host may have."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import gangline
from gangline.agent import bounded
from gangline.agent.host_facts import collect, interfaces, nvidia, packages, paths, system
from gangline.inventory.gather import read_facts
from tests.lab import pythons

SOURCE = Path(gangline.__file__).parents[1]


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


# --- the verb


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_the_facts_are_told_by_any_python_of_a_host(version, tmp_path):
    if not pythons.has(version):
        pytest.skip(f"no Python {version} on this machine")
    request = {
        "workdir": str(tmp_path),
        "python_argv": [sys.executable],
        "names": ["localhost", "127.0.0.1"],
        "shared": [str(tmp_path)],
        "files": [str(tmp_path / "none")],
    }
    done = subprocess.run(
        [pythons.find(version).executable, "-W", "error", "-m", "gangline.agent", "facts"],
        input=json.dumps(request).encode(),
        capture_output=True,
        timeout=60,
        cwd=SOURCE,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )
    assert done.stderr == b""
    answer = json.loads(done.stdout)
    assert {name: value for name, value in answer.items() if isinstance(value, dict) and "error" in value} == {}
    read = read_facts("here", answer)
    assert read.system.agent_python is not None
    assert read.system.agent_python.startswith(version)
    assert read.python == ".".join(map(str, sys.version_info[:3]))
    assert read.packages["torch"] is None or read.torch is not None


def test_nothing_asked_is_answered_all_the_same():
    answer = collect.facts({})
    assert set(answer) == {"schema_version", *collect.SECTIONS}
    read_facts("here", json.loads(json.dumps(answer)))


def test_a_section_that_fails_or_hangs_spoils_no_other(monkeypatch):
    ended = threading.Event()

    def failing(_request):
        raise RuntimeError("broken")

    monkeypatch.setitem(collect.SECTIONS, "rdma", failing)
    monkeypatch.setitem(collect.SECTIONS, "topology", lambda _request: ended.wait(30))
    begun = time.monotonic()
    answer = collect.facts({}, total_s=2.0)
    ended.set()
    assert time.monotonic() - begun < 10
    assert answer["rdma"] == {"error": "RuntimeError: broken"}
    assert answer["topology"] == {"error": "no answer within 2 s"}
    assert answer["system"]["hostname"]


def test_an_answer_that_is_too_long_loses_its_longest_section():
    answer = dict.fromkeys(collect.SECTIONS, "short") | {"topology": "x" * (2 << 20)}
    short = collect.shortened(answer)
    assert short["topology"] == {"error": "too long to send"}
    assert short["system"] == "short"


def test_small_files_are_read_and_large_ones_are_not(tmp_path):
    (tmp_path / "small").write_text("<system/>")
    (tmp_path / "large").write_bytes(bytes(100_000))
    small, large, none = collect.files({"files": [str(tmp_path / name) for name in ("small", "large", "none")]})
    assert small["text"] == "<system/>"
    assert "larger than" in large["error"]
    assert none["error"] == "No such file or directory"


# --- programs that hang or talk without end


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path):
    """What it started holds a pipe open until it is gone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(TimeoutError, match="did not end within 1 s"):
            bounded.run(["/bin/sh", "-c", f"sleep 60 > {pipe} & wait"], timeout_s=1.0)
        assert select.select([reader], [], [], 5.0)[0] == [reader]
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


def test_of_a_long_output_the_beginning_is_kept():
    output = bounded.run([sys.executable, "-c", "print('begin' + 'x' * 5_000_000)"], limit_bytes=1000)
    assert output.stdout.startswith("begin")
    assert len(output.stdout) == 1000
    assert output.returncode == 0


def test_a_program_that_is_not_there_is_an_error():
    with pytest.raises(OSError, match="no-such-program"):
        bounded.run(["no-such-program"])


# --- sections


def control_group(folder, *, limit, used, cache, version=2):
    """The files of one group, with lines before and after the one that counts."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "" if version == 2 else "total_"
    own = "" if version == 2 else f"inactive_file {cache // 2}\n"
    (folder / "memory.stat").write_text(f"anon 5\n{own}{prefix}inactive_file {cache}\n{prefix}active_file 7\n")


def test_memory_that_a_control_group_allows_and_has_left(tmp_path):
    top = tmp_path / "cg"
    control_group(top, limit="max", used=90 << 30, cache=0)
    control_group(top / "user.slice", limit=4 << 30, used=3 << 30, cache=1 << 30)
    control_group(top / "user.slice" / "a.service", limit=8 << 30, used=7 << 30, cache=512 << 20)
    own = tmp_path / "own"
    own.write_text("0::/user.slice/a.service\n")
    groups = system.memory_groups(str(top), str(own))
    assert groups == [(8 << 30, (6 << 30) + (512 << 20)), (4 << 30, 2 << 30)]
    # the group with the higher limit has less left, and the machine least of all
    assert system.available(16 << 30, groups) == (1 << 30) + (512 << 20)
    assert system.available(1 << 30, groups) == 1 << 30
    assert system.available(16 << 30, []) == 16 << 30
    assert system.available(None, []) is None


def test_a_control_group_over_its_limit_has_nothing_left(tmp_path):
    control_group(tmp_path, limit=1 << 30, used=2 << 30, cache=0)
    own = tmp_path / "own"
    own.write_text("0::/\n")
    assert system.available(8 << 30, system.memory_groups(str(tmp_path), str(own))) == 0


def test_memory_that_a_control_group_of_version_1_allows_and_has_left(tmp_path):
    control_group(tmp_path / "memory", limit=9223372036854771712, used=5 << 30, cache=0, version=1)
    control_group(tmp_path / "memory" / "lab", limit=900 << 20, used=800 << 20, cache=300 << 20, version=1)
    own = tmp_path / "own"
    own.write_text("4:cpu,cpuacct:/\n3:memory:/lab\n")
    assert system.memory_groups(str(tmp_path), str(own)) == [(900 << 20, 500 << 20)]
    own.write_text("3:memory:/named/from/outside\n")
    assert system.memory_groups(str(tmp_path), str(own)) == []


def test_what_is_used_in_a_container_is_not_there_for_others(monkeypatch):
    monkeypatch.setattr(system, "meminfo", lambda: {"MemTotal": 64 << 30, "MemAvailable": 60 << 30})
    monkeypatch.setattr(system, "memory_groups", lambda: [(8 << 30, 6 << 30), (16 << 30, 7 << 30)])
    said = system.system({})
    assert said["memory_limit_bytes"] == 8 << 30
    assert said["memory_available_bytes"] == 2 << 30


def test_a_control_group_whose_use_cannot_be_read_has_its_limit(tmp_path):
    (tmp_path / "memory.max").write_text("1073741824\n")
    own = tmp_path / "own"
    own.write_text("0::/\n")
    assert system.memory_groups(str(tmp_path), str(own)) == [(1 << 30, 0)]


def interface(root, name, *, number=1, uevent="", folders=()):
    place = root / name
    place.mkdir()
    (place / "type").write_text(f"{number}\n")
    (place / "uevent").write_text(uevent)
    for folder in folders:
        (place / folder).mkdir()
    return place


@pytest.mark.parametrize(
    ("expected", "driver", "more"),
    [
        ("ethernet", "r8169", {}),
        ("ethernet", "hv_netvsc", {}),
        ("loopback", None, {"number": 772}),
        ("wifi", "iwlwifi", {"uevent": "DEVTYPE=wlan\n"}),
        ("wifi", "rtw", {"folders": ["wireless"]}),
        ("bridge", "bridge", {"uevent": "DEVTYPE=bridge\n", "folders": ["bridge", "brif"]}),
        ("bond", "bonding", {"folders": ["bonding"]}),
        ("infiniband", "ib_ipoib", {"number": 32}),
        ("tunnel", "wireguard", {"number": 65534, "uevent": "DEVTYPE=wireguard\n"}),
        ("tunnel", "tun", {"folders": ["tun_flags"]}),
        ("vlan", "802.1Q VLAN Support", {"uevent": "DEVTYPE=vlan\n"}),
        ("veth", "veth", {}),
        ("other", None, {"number": 280}),
    ],
)
def test_kinds_of_interfaces(tmp_path, expected, driver, more):
    assert interfaces.kind(interface(tmp_path, "x", **more), driver) == expected


def test_the_interfaces_of_this_machine():
    (loopback,) = [row for row in interfaces.nics({}) if row["name"] == "lo"]
    assert loopback["kind"] == "loopback"
    assert "127.0.0.1/8" in loopback["addresses"]
    assert interfaces.routes({"names": ["127.0.0.1"]}) == {"127.0.0.1": {"source": "127.0.0.1", "interface": "lo"}}


def test_an_infiniband_port_in_sysfs(tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    texts = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}
    for name, text in texts.items():
        (port / name).write_text(text + "\n")
    (port / "gids" / "0").write_text("fe80:0000:0000:0000:a088:c203:00b2:0001\n")
    (port / "gids" / "1").write_text(interfaces.NO_GID + "\n")
    (tmp_path / "mlx5_0" / "device" / "net" / "ib0").mkdir(parents=True)
    (tmp_path / "mlx5_0" / "device" / "numa_node").write_text("1\n")
    (row,) = interfaces.ports(tmp_path)
    assert row == {
        "device": "mlx5_0",
        "port": 1,
        "state": "ACTIVE",
        "physical_state": "LinkUp",
        "link_layer": "InfiniBand",
        "rate_gbps": 400.0,
        "interface": "ib0",
        "gids": ["fe80:0000:0000:0000:a088:c203:00b2:0001"],
        "numa_node": 1,
    }


MOUNTS = """22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 22 0:40 / /mnt/my\\040disk ro,relatime - nfs4 nas:/a\\040b rw,vers=4.2
31 22 0:41 / /mnt/nas rw - nfs4 nas:/old rw
32 31 0:42 / /mnt/nas rw - cifs //nas/new rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/u", ("/", "ext4", "/dev/nvme0n1p2")),
        ("/mnt/my disk/w", ("/mnt/my disk", "nfs4", "nas:/a b")),
        ("/mnt/nas/x", ("/mnt/nas", "cifs", "//nas/new")),
        ("/mnt/nasty", ("/", "ext4", "/dev/nvme0n1p2")),
    ],
)
def test_where_a_folder_is_mounted(tmp_path, path, expected):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert paths.mounted(path, str(tmp_path / "mountinfo")) == expected


def test_a_folder_that_is_not_there_yet_is_told_by_the_one_above(tmp_path):
    row = paths.folder(str(tmp_path / "not" / "yet"))
    assert row["exists"] is False
    assert row["real_path"] == str(tmp_path.resolve() / "not" / "yet")
    assert row["free_bytes"] > 0
    assert not (tmp_path / "not").exists()


def test_a_file_server_that_is_gone_hangs_nobody(monkeypatch, tmp_path):
    ended = threading.Event()
    real = paths.folder
    monkeypatch.setattr(paths, "FOLDER_S", 0.3)
    monkeypatch.setattr(paths, "folder", lambda path: ended.wait(30) if path == "/dead" else real(path))
    rows = paths.storage({"workdir": str(tmp_path), "shared": ["/dead"]})
    ended.set()
    assert rows[0]["free_bytes"] > 0
    assert rows[-1] == {"path": "/dead", "error": "no answer within 0.3 s"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("export OMP_NUM_THREADS=4", [("OMP_NUM_THREADS", "4")]),
        ("  declare -x NCCL_DEBUG=INFO  # loud", [("NCCL_DEBUG", "INFO")]),
        (
            "export NCCL_DEBUG=INFO NCCL_IB_HCA='mlx5_0,mlx5_1'",
            [("NCCL_DEBUG", "INFO"), ("NCCL_IB_HCA", "mlx5_0,mlx5_1")],
        ),
        ('GLOO_SOCKET_IFNAME="eth0"', [("GLOO_SOCKET_IFNAME", "eth0")]),
        ("# export NCCL_DEBUG=INFO", []),
        ("NCCL_DEBUG=INFO python train.py", [("NCCL_DEBUG", "INFO")]),
        ("echo NCCL_DEBUG=INFO", []),
        ("export EDITOR=vi", []),
        ("export NCCL_DEBUG='INFO", [("NCCL_DEBUG", "'INFO")]),
        ('if [ -z "$X" ]; then', []),
    ],
)
def test_what_a_line_of_a_shell_file_sets(line, expected):
    assert system.assignments(line) == expected


def test_variables_are_told_with_their_place_and_secrets_are_not(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    (tmp_path / ".bashrc").write_text("\nexport NCCL_DEBUG=INFO\nexport UCX_SECRET_KEY=hunter2\n")
    rows = system.variables({})
    assert {"name": "NCCL_DEBUG", "value": "WARN", "source": "environment"} in rows
    assert {"name": "NCCL_DEBUG", "value": "INFO", "source": f"{tmp_path}/.bashrc:2"} in rows
    assert {"name": "TORCH_HUB_TOKEN", "value": None, "source": "environment"} in rows
    assert "hunter2" not in json.dumps(rows)
    assert "HF_TOKEN" not in json.dumps(rows)


def test_packages_are_those_of_the_named_python_whatever_it_prints_before(tmp_path):
    loud = script(tmp_path / "loud", f'#!/bin/sh\necho "Loading modules..."; exec "{sys.executable}" "$@"\n')
    answer = packages.packages({"python_argv": [loud], "python_env": {"X": "1"}})
    assert answer["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(answer["packages"]) == set(packages.PACKAGES)
    assert "numpy" in packages.PACKAGES


def test_a_python_that_does_not_run_is_told_with_its_last_words(tmp_path):
    broken = script(tmp_path / "broken", "#!/bin/sh\necho 'libpython3.11.so: not found' >&2; exit 127\n")
    with pytest.raises(OSError, match=r"exit code 127: libpython3\.11\.so: not found"):
        packages.packages({"python_argv": [broken]})


def test_torch_is_known_by_its_files_and_never_imported(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    text = "from typing import Optional\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\ngit_version = 'abc'\n"
    (tmp_path / "torch" / "version.py").write_text(text)
    info = tmp_path / "torch-2.13.0+cu128.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cu128\n")
    answer = packages.packages({"python_argv": [sys.executable], "python_env": {"PYTHONPATH": str(tmp_path)}})
    assert answer["packages"]["torch"] == "2.13.0+cu128"
    assert answer["torch"] == {"cuda": "12.8", "hip": None, "git_version": "abc"}


# --- nvidia-smi, where the library cannot be asked. Its words are written after its public format, not recorded.


ROW = "0, NVIDIA GeForce RTX 3090, GPU-1, 24576, 24000, 8.6, 00000000:01:00.0, 1, 4, 16, 16, 35, 25.10, 350.00, 0, [N/A], [N/A], 570.1"


def smi(tmp_path, stdout, code=0):
    return script(tmp_path / "nvidia-smi", f"#!/bin/sh\ncat <<'END'\n{stdout}\nEND\nexit {code}\n")


def test_cards_by_nvidia_smi(tmp_path):
    answer = nvidia.query(smi(tmp_path, ROW))
    (card,) = answer["cards"]
    assert (answer["driver"], answer["faults"], answer["reason"]) == ("570.1", [], None)
    assert (card["name"], card["memory_total_bytes"], card["ecc_uncorrected"]) == (
        "NVIDIA GeForce RTX 3090",
        24 << 30,
        None,
    )
    assert (card["power_w"], card["compute_capability"], card["mig"]) == (25.1, "8.6", None)


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, "driver-not-loaded"),
        ("Failed to initialize NVML: Insufficient Permissions", 4, "no-permission"),
        ("Something new", 1, "other"),
    ],
)
def test_why_nvidia_smi_lists_nothing(tmp_path, words, code, kind):
    answer = nvidia.query(smi(tmp_path, words, code))
    assert answer["cards"] == []
    assert answer["reason"]["kind"] == kind


def test_no_devices_is_no_fault(tmp_path):
    assert nvidia.query(smi(tmp_path, "No devices were found", 6))["reason"] is None


def test_the_kernel_module_and_its_kind(tmp_path):
    (tmp_path / "open").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n"
    )
    (tmp_path / "closed").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\n")
    assert nvidia.kernel_module(str(tmp_path / "open")) == {"module": "570.124.06", "open_module": True}
    assert nvidia.kernel_module(str(tmp_path / "closed")) == {"module": "550.54.15", "open_module": False}
    assert nvidia.kernel_module(str(tmp_path / "none")) == {"module": None, "open_module": None}


def test_cards_that_the_kernel_sees(tmp_path):
    for number, (vendor, kind) in enumerate([("0x10de", "0x030000"), ("0x10de", "0x040300"), ("0x1002", "0x030000")]):
        device = tmp_path / f"0000:0{number}:00.0"
        device.mkdir()
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    assert nvidia.on_the_bus(tmp_path) == 1
