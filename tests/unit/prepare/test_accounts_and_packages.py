"""Steps `python`, `user` and `container`: facts in, changes out."""

import pytest

from gangline.prepare import gpu_containers, host_python, shared_account
from gangline.prepare.gpu_containers import CONTAINER, LOADED, SPECIFICATION
from gangline.prepare.host_python import PYTHON_STEP
from gangline.prepare.prepare_step import FileRead, HostReading, StepPlan, StepView
from gangline.prepare.shared_account import AUTHORIZED, USER_STEP
from gangline.runs.cluster import Cluster, Environment, Host

APT = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--yes")
REFRESH = ("apt-get", "update")


def reading(*, user="alice", uid=1000, commands=None, programs=(), files=None, folders=None):
    known = {AUTHORIZED: FileRead(), LOADED: FileRead()}
    return HostReading(
        user=user,
        uid=uid,
        home=f"/home/{user}",
        files={**known, **{path: FileRead(content=text) for path, text in (files or {}).items()}},
        folders={**dict.fromkeys((*host_python.FOLDERS, *gpu_containers.CDI_FOLDERS)), **(folders or {})},
        commands=commands or {},
        programs=dict.fromkeys(programs, "/usr/bin/x"),
    )


def planned(step, own, *, others=(), kind="locked"):
    host = Host(name="pc1", workdir="/w", python="", environment=Environment(kind=kind))
    readings = {"pc1": own, **{f"pc{number}": each for number, each in enumerate(others, start=2)}}
    return step.plan(StepView(host=host, cluster=Cluster(name="home", hosts=(host,)), reading=own, readings=readings))


def words(plan):
    return [change.argv for change in plan.changes]


def policy(*names):
    return "\n".join(f"{name}:\n  Installed: (none)\n  Candidate: 1.0" for name in names)


def test_a_python_that_fits_is_enough_and_only_where_gangline_builds_one():
    assert planned(PYTHON_STEP, reading(commands={"python3": "Python 3.11.2"})).changes == ()
    assert planned(PYTHON_STEP, reading(folders={"/usr/local/bin": ("python3.13",)})).changes == ()
    assert planned(PYTHON_STEP, reading(commands={"python apt": policy("python3.12")}), kind="conda").changes == ()


def test_the_distributions_own_python_is_taken_the_best_first():
    own = reading(
        commands={"python3": "Python 3.8.10", "python apt": policy("python3.10", "python3.12")}, programs=("apt-get",)
    )
    plan = planned(PYTHON_STEP, own)
    assert words(plan) == [REFRESH, (*APT, "install", "python3.12")]
    assert plan.changes[-1].undo == (*APT, "remove", "python3.12")
    assert "E-SW-14" in plan.reason
    assert "what came with them" in plan.risk


@pytest.mark.parametrize(
    ("manager", "output", "argv"),
    [
        ("dnf", {"python dnf": "python3.11\npython3.12"}, ("dnf", "--assumeyes", "install", "python3.12")),
        (
            "zypper",
            {"python zypper": "S | Name | Summary\n  | python312 | x"},
            ("zypper", "--non-interactive", "install", "python312"),
        ),
    ],
)
def test_dnf_and_zypper_have_words_of_their_own(manager, output, argv):
    assert words(planned(PYTHON_STEP, reading(commands=output, programs=(manager,)))) == [argv]


def test_uv_comes_after_the_distribution_and_needs_no_root():
    (change,) = planned(PYTHON_STEP, reading(commands={"python3": "Python 3.8.10"}, programs=("uv", "apt-get"))).changes
    assert (change.argv, change.scope) == (("uv", "python", "install", "3.12"), "user")
    assert "install uv" in planned(PYTHON_STEP, reading(programs=("dnf",))).remains[0]
    assert "neither apt, dnf nor zypper" in planned(PYTHON_STEP, reading()).remains[0]


ALICE = reading(user="alice", uid=1001)
ROOT_ACCOUNTS = {"accounts": "root:x:0:0::/root:/bin/bash\nbob:x:1000:1000::/home/bob:/bin/sh", "groups": "video:x:44:"}


def test_the_account_of_most_hosts_is_made_with_its_uid_and_your_keys():
    own = reading(
        user="bob", uid=0, commands=ROOT_ACCOUNTS, programs=("useradd",), files={AUTHORIZED: b"ssh-ed25519 AAAA\n"}
    )
    plan = planned(USER_STEP, own, others=(ALICE, ALICE, reading(user="zoe")))
    made, folder, keys = plan.changes
    assert made.argv[-5:] == ("--uid", "1001", "--groups", "video", "alice")
    assert made.undo == ("userdel", "alice")
    assert (folder.argv[-1], keys.argv[-2:]) == (
        "/home/alice/.ssh",
        ("/home/bob/.ssh/authorized_keys", "/home/alice/.ssh/authorized_keys"),
    )
    assert "leaves its home folder" in plan.risk
    assert plan.remains == (
        "alice has no password, and no sudo",
        "then write `ssh: alice@...` for pc1 into the cluster file",
    )


def test_a_uid_that_somebody_has_is_left_to_useradd():
    own = reading(
        user="bob", uid=0, commands=ROOT_ACCOUNTS, programs=("useradd",), files={AUTHORIZED: b"ssh-ed25519 AAAA\n"}
    )
    assert "--uid" not in planned(USER_STEP, own, others=(reading(user="alice", uid=1000),)).changes[0].argv


def test_an_account_that_is_there_or_that_no_key_would_open_is_left():
    there = {"accounts": "alice:x:1001:1001::/home/alice:/bin/sh"}
    assert planned(USER_STEP, reading(commands=there), others=(ALICE,)) == StepPlan()
    own = reading(user="root", uid=0, programs=("useradd",))
    assert "no authorized_keys" in planned(USER_STEP, own, others=(ALICE,)).remains[0]
    assert "reached as root" in planned(USER_STEP, own).remains[0]
    assert shared_account.USER_STEP.only_by_name


DRIVER = {LOADED: b"NVRM version"}


def test_podman_sees_gpus_by_cdi():
    own = reading(
        files=DRIVER, programs=("podman", "apt-get"), commands={"container apt": policy("nvidia-container-toolkit")}
    )
    plan = planned(CONTAINER, own)
    make = ("nvidia-ctk", "cdi", "generate", f"--output={SPECIFICATION}")
    assert words(plan) == [REFRESH, (*APT, "install", "nvidia-container-toolkit"), make]
    assert plan.changes[-1].undo == ("rm", "-f", SPECIFICATION)
    has_toolkit = reading(files=DRIVER, programs=("podman", "apt-get", "nvidia-ctk"))
    assert words(planned(CONTAINER, has_toolkit)) == [make]


def test_nothing_is_done_without_an_engine_a_driver_or_where_cdi_is_there():
    assert planned(CONTAINER, reading(files=DRIVER, programs=("apt-get",))).changes == ()
    assert planned(CONTAINER, reading(programs=("podman", "apt-get"))).changes == ()
    refreshed = reading(files=DRIVER, programs=("podman", "apt-get"), folders={"/var/run/cdi": ("nvidia.yaml",)})
    assert planned(CONTAINER, refreshed).changes == ()


def test_what_no_repository_offers_is_told():
    assert "NVIDIA's repository" in planned(CONTAINER, reading(files=DRIVER, programs=("docker", "dnf"))).remains[0]
    assert (
        "no repository of this host offers apptainer"
        in planned(CONTAINER, reading(programs=("dnf",)), kind="apptainer").remains[0]
    )
    old = reading(
        files=DRIVER,
        programs=("docker", "nvidia-ctk", "dnf"),
        commands={"docker": "Docker version 27.5.1, build 9f9e405"},
    )
    assert "daemon.json" in planned(CONTAINER, old).remains[0]
