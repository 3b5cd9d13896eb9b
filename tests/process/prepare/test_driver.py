"""Step `driver` on ten hosts: the engine is real; the package managers are SIMULATED, and record what they are told.

No driver is installed by any test: what a real package brings, and a restart, are not shown here.
"""

from dataclasses import dataclass, field

import pytest

from gangline.agent.prepare.preparation import prepare
from gangline.prepare.gpu_driver import DRIVER_STEP, FABRIC, KERNEL, LOADED, PERSISTENCE, SECURE_BOOT, VERSIONLOCK
from gangline.prepare.prepare_step import FileRead, HostReading, StepView
from gangline.runs.cluster import Cluster, Host
from tests.process.prepare.simulated_packages import recorded, set_up

APT = ["apt-get", "--yes"]
CARD = "/sys/bus/pci/devices/0000:01:00.0/vendor:0x10de\n/sys/bus/pci/devices/0000:01:00.0/class:0x030000\n"
AMD = CARD.replace("0x10de", "0x1002")
SWITCH = "/sys/bus/pci/devices/0000:02:00.0/vendor:0x10de\n/sys/bus/pci/devices/0000:02:00.0/class:0x068000\n"
DEVICES = """driver   : nvidia-driver-570 - distro non-free
driver   : nvidia-driver-580-open - distro non-free recommended
driver   : xserver-xorg-video-nouveau - distro free builtin
"""
GPGPU = """nvidia-driver-535-server
nvidia-driver-570-server, (kernel modules provided by linux-modules-nvidia-570-server-generic)
nvidia-driver-570-server-open
nvidia-driver-580
"""
OPEN = "nvidia-driver-580-open"


@dataclass(frozen=True)
class State:
    """A distribution in some state, and what has to become of it."""

    family: str
    does: tuple = ()
    says: str = ""
    risks: str = ""
    pci: str = CARD
    files: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)


INSTALLS = (("apt-get", "update"), ("ubuntu-drivers", "install"), ("apt-mark", "hold", OPEN))
STATES = {
    "Ubuntu 24.04, a card, no driver": State("ubuntu", INSTALLS, "then restart it", options={"devices": DEVICES}),
    "Ubuntu 24.04 with Secure Boot": State(
        "ubuntu",
        INSTALLS,
        risks="MOK",
        files={SECURE_BOOT: b"\x06\0\0\0\x01"},
        options={"devices": DEVICES},
    ),
    "Ubuntu 22.04, eight GPUs and NVSwitch": State(
        "ubuntu",
        (
            ("apt-get", "update"),
            (*APT, "install", "nvidia-driver-570-server", "nvidia-fabricmanager-570"),
            ("apt-mark", "hold", "nvidia-driver-570-server", "nvidia-fabricmanager-570"),
            ("systemctl", "enable", FABRIC),
        ),
        pci=CARD + SWITCH,
        options={"devices": DEVICES, "gpgpu": GPGPU},
    ),
    "Ubuntu with a driver that is loaded": State(
        "ubuntu",
        (("apt-mark", "hold", OPEN), ("systemctl", "enable", PERSISTENCE)),
        files={LOADED: b"NVRM version"},
        options={"installed": (OPEN,), "units": {PERSISTENCE: "disabled"}},
    ),
    "Debian 12 without non-free": State("debian", says="non-free"),
    "Debian 12 with non-free": State(
        "debian",
        (("apt-get", "update"), (*APT, "install", "nvidia-driver"), ("apt-mark", "hold", "nvidia-driver")),
        options={"offered": ("nvidia-driver",)},
    ),
    "Fedora without RPM Fusion": State("fedora", says="RPM Fusion"),
    "Fedora 42 with RPM Fusion": State(
        "fedora",
        (
            ("dnf", "--assumeyes", "install", "akmod-nvidia", "xorg-x11-drv-nvidia-cuda"),
            ("dnf", "versionlock", "add", "akmod-nvidia", "xorg-x11-drv-nvidia-cuda"),
        ),
        options={"offered": ("akmod-nvidia", "xorg-x11-drv-nvidia-cuda"), "more": ("dnf5",)},
    ),
    "Rocky 9 with NVIDIA's repository": State(
        "fedora",
        (("dnf", "--assumeyes", "install", "nvidia-open"),),
        says="sudo dnf install python3-dnf-plugin-versionlock",
        options={"offered": ("nvidia-open",)},
    ),
    "Rocky 9 with dnf's plugin for locks": State(
        "fedora",
        (("dnf", "--assumeyes", "install", "nvidia-open"), ("dnf", "versionlock", "add", "nvidia-open")),
        files={VERSIONLOCK: b"[main]\nenabled = 1\n"},
        options={"offered": ("nvidia-open",)},
    ),
    "openSUSE Leap with NVIDIA's repository": State(
        "suse",
        (
            (
                "zypper",
                "--non-interactive",
                "install",
                "nvidia-open-driver-G06-signed-kmp-default",
                "nvidia-compute-utils-G06",
            ),
            ("zypper", "addlock", "nvidia-open-driver-G06-signed-kmp-default", "nvidia-compute-utils-G06"),
        ),
        options={"offered": ("nvidia-open-driver-G06-signed-kmp-default", "nvidia-compute-utils-G06")},
    ),
    "WSL2": State(
        "ubuntu",
        says="that of Windows",
        files={KERNEL: b"5.15.167.4-microsoft-standard-WSL2\n"},
        options={"devices": DEVICES},
    ),
    "a driver of a runfile": State(
        "ubuntu", says="runfile", options={"devices": DEVICES, "more": ("nvidia-uninstall",)}
    ),
    "an AMD card": State("ubuntu", says="ROCm is not installed", pci=AMD),
    "no GPU at all": State("ubuntu", pci=""),
}


@pytest.fixture
def host(tmp_path, monkeypatch, request):
    """The host of a case: its request goes to the real engine, in this process, below a folder of its own."""
    state = STATES[request.param]
    folder = set_up(tmp_path, state.family, **state.options)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return state, folder, tmp_path / "root"


def planned(state, programs):
    """What the step makes of what the engine reads there; files of the kernel and the bus are the case's own."""
    asks = DRIVER_STEP.asks
    commands = {name: argv for name, argv in asks.commands.items() if (programs / argv[0]).exists()}
    record = prepare({"do": "read", "scope": "user", "commands": commands, "programs": asks.programs})[0]
    own = {f"/usr/bin/{name}" for name in ("apt-get", "dnf", "zypper")}  # of the machine that runs this test
    reading = HostReading(
        user="alice",
        uid=1000,
        home="/home/alice",
        files={path: FileRead(content=state.files.get(path)) for path in asks.files},
        folders={},
        commands={name: row["stdout"].strip() for name, row in record["commands"].items()} | {"pci": state.pci},
        programs={name: None if path in own else path for name, path in record["programs"].items()},
    )
    host = Host(name="pc1", workdir="/w", python="")
    view = StepView(host=host, cluster=Cluster(name="c", hosts=(host,)), reading=reading, readings={"pc1": reading})
    return DRIVER_STEP.plan(view)


@pytest.mark.parametrize("host", STATES, indirect=True)
def test_the_driver_comes_by_the_distributions_own_means_and_goes_again(host):
    state, folder, root = host
    plan = planned(state, root.parent / "bin")
    assert state.says in " ".join(plan.remains)
    assert state.risks in plan.risk
    if not state.does:
        assert plan.changes == ()
        return
    (root / "etc").mkdir(parents=True)
    request = {"scope": "root", "root_folder": str(root), "step": "driver", "txn": "a" * 16, "by": "alice@desk"}
    changes = [change.to_json() for change in plan.changes]
    list(prepare({**request, "do": "apply", "changes": changes, "revert_s": None}))
    assert recorded(folder) == [list(words) for words in state.does]
    assert planned(state, root.parent / "bin").changes == ()
    assert plan.restart == any("install" in words for words in state.does)
    shown = list(prepare({**request, "do": "undo", "steps": ["driver"], "dry": True, "expect": None}))
    assert [row for row in shown if row["kind"] == "refused"] == []
    list(prepare({**request, "do": "undo", "steps": ["driver"], "dry": False, "expect": shown[-1]["token"]}))
    removed = [words for words in recorded(folder) if "remove" in words]
    assert bool(removed) == any("install" in words for words in state.does)
    assert all(words[-1] in str(state.does) or words[-1] == OPEN for words in removed)


@pytest.mark.parametrize("host", ["Ubuntu 24.04, a card, no driver"], indirect=True)
def test_what_an_undo_does_not_bring_back_is_said_before(host):
    plan = planned(host[0], host[2].parent / "bin")
    assert "what came with them, and caches, stay" in plan.risk
    words = [word for change in plan.changes for word in (*change.argv, *change.undo)]
    assert not [word for word in words if "curl" in word or word.endswith(".run")]
