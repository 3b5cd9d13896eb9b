"""Step `share`: what is exported and mounted, and when nothing is. Facts in, changes out; no NFS runs here."""

import pytest

from gangline.prepare.nfs_share import EXPORTS, MOUNTS, OWN_EXPORTS, SHARE, UNITS, unit_name
from gangline.prepare.prepare_step import CommandChange, FileChange, FileRead, HostReading, StepView
from gangline.runs.cluster import Cluster, Host

FOLDER = "/srv/my-models"
HOSTS = tuple(
    Host(name=f"pc{number}", workdir="/w", python="", transport="ssh", address=f"192.168.1.{10 + number}")
    for number in (1, 2, 3)
)
READY = {"nfsd": "/lib/nfsd.ko", "nfs": "(builtin)", "enabled": "disabled", "active": "inactive"}


def reading(*, mounts="/dev/sda1 / ext4 rw 0 0\n", commands=None, files=None, uid=1000, programs=None):
    texts = {MOUNTS: mounts, "/proc/filesystems": "\text4\n", **(files or {})}
    return HostReading(
        user="alice",
        uid=uid,
        home="/home/alice",
        files={
            EXPORTS: FileRead(),
            OWN_EXPORTS: FileRead(),
            **{path: FileRead(content=text.encode()) for path, text in texts.items()},
        },
        folders={UNITS: ("multi-user.target.wants", "data.mount")},
        commands=READY if commands is None else commands,
        programs=dict.fromkeys(programs or ("exportfs", "mount.nfs", "systemctl"), "/usr/sbin/x"),
    )


def planned(number, *, shared=(FOLDER,), hosts=HOSTS, **readings):
    cluster = Cluster(name="home", hosts=hosts, shared=shared)
    found = {host.name: readings.get(host.name) or reading() for host in hosts}
    host = hosts[number - 1]
    return SHARE.plan(StepView(host=host, cluster=cluster, reading=found[host.name], readings=found))


def texts(plan):
    return {change.path: change.content.decode() for change in plan.changes if isinstance(change, FileChange)}


def commands(plan):
    return [change.argv for change in plan.changes if isinstance(change, CommandChange) and change.argv]


def test_without_a_shared_folder_it_says_that_none_is_needed():
    plan = planned(1, shared=())
    assert plan.changes == ()
    assert "none is needed: gangline brings model and data" in plan.remains[0]


def test_the_head_exports_to_the_addresses_of_the_others_and_squashes_root():
    plan = planned(1)
    options = "(rw,sync,no_subtree_check,root_squash)"
    line = f"{FOLDER} 192.168.1.12{options} 192.168.1.13{options}\n"
    assert texts(plan) == {OWN_EXPORTS: f"# gangline prepare share\n{line}"}
    assert commands(plan) == [
        ("exportfs", "-ra"),
        ("systemctl", "enable", "nfs-server.service"),
        ("systemctl", "start", "nfs-server.service"),
    ]
    runs = {**READY, "enabled": "enabled", "active": "active"}
    assert planned(1, pc1=reading(commands=runs, files=texts(plan))).changes == ()


def test_the_others_mount_at_the_first_use():
    plan = planned(2)
    mount, auto = texts(plan).values()
    assert list(texts(plan)) == [f"{UNITS}/srv-my\\x2dmodels.mount", f"{UNITS}/srv-my\\x2dmodels.automount"]
    assert f"What=192.168.1.11:{FOLDER}\nWhere={FOLDER}\nType=nfs\n" in mount
    assert f"[Automount]\nWhere={FOLDER}\n" in auto
    assert ("systemctl", "start", "srv-my\\x2dmodels.automount") in commands(plan)
    mounted = f"/dev/sda1 / ext4 rw 0 0\nsystemd-1 {FOLDER} autofs rw 0 0\n"
    assert planned(2, pc2=reading(mounts=mounted, files=texts(plan))).changes == ()


@pytest.mark.parametrize(
    ("number", "readings", "told"),
    [
        (1, {"pc1": reading(commands={})}, "no NFS server (nfsd)"),
        (2, {"pc2": reading(commands={})}, "no NFS client (nfs)"),
        (1, {"pc1": reading(programs=("systemctl",))}, "apt install nfs-kernel-server"),
        (2, {"pc2": reading(programs=("systemctl",))}, "apt install nfs-common"),
        (2, {"pc2": reading(uid=1001)}, "alice is user 1001 here and 1000 on pc1"),
        (1, {"pc1": reading(files={EXPORTS: f"{FOLDER} 192.168.1.0/24(rw)\n"})}, "it stays as you wrote it"),
        (2, {"pc1": reading(mounts="/dev/sda1 / ext4\nfs@tcp:/l /srv lustre\n")}, "is lustre (fs@tcp:/l) on pc1"),
    ],
)
def test_what_is_missing_is_said(number, readings, told):
    plan = planned(number, **readings)
    assert texts(plan) == {}
    assert told in plan.remains[0]


def test_a_folder_that_is_shared_already_is_left_alone():
    nas = reading(mounts="/dev/sda1 / ext4\nnas:/m /srv/my-models nfs4\n")
    assert [planned(number, pc1=nas, pc2=nas, pc3=nas).changes for number in (1, 2)] == [(), ()]
    assert planned(2, pc2=nas).changes == ()


def test_names_for_everybody_are_never_exported():
    hosts = (HOSTS[0], Host(name="pc2", workdir="/w", python="", transport="ssh", address="pc2.lan"))
    plan = planned(1, hosts=hosts)
    assert plan.changes == ()
    assert "exports are for addresses alone" in plan.remains[0]
    assert planned(1, shared=("/srv/my models",)).changes == ()


@pytest.mark.parametrize(
    ("folder", "name"), [("/data", "data"), ("/srv/my-share.d/x_1", r"srv-my\x2dshare.d-x_1"), ("/.a/b", r"\x2ea-b")]
)
def test_units_are_named_as_systemd_names_them(folder, name):
    assert unit_name(folder) == name


def test_units_that_are_there_are_read_before_they_are_changed():
    assert SHARE.root_asks(reading()).files == (f"{UNITS}/data.mount",)
