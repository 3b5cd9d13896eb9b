"""Is there a place to write to, and is a shared folder really shared?"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.checks.rules import Evidence, Rule, Seen, adders
from gangline.inventory.facts import Folder, HostFacts, Inventory
from gangline.inventory.folders import CopyOnHost
from gangline.runs.cluster import Cluster, Host
from gangline.units import format_bytes

WARN_BYTES = 2 << 30
"""Below this, two checkpoints of a small model may not fit."""
FAIL_BYTES = 200 << 20
"""Below this, logs and token files alone may fill the disk."""
WARN_INODES = 10_000
SLOW_S = 3.0
"""To write and sync 1 MiB: a disk that spins takes 0.1 s."""
MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}


ROOM = "free some space there, or set `workdir` of this host to a larger disk"
RULES: list[Rule] = []
each_host, whole_cluster = adders(RULES)


def _is_known(facts: HostFacts) -> bool:
    folder = facts.work_folder
    return folder is None or folder.error is None


@each_host.fail(
    "E-DISK-01",
    title="no room in the work folder",
    meaning="a checkpoint cannot be saved",
    fix=ROOM,
)
def _no_room(facts: HostFacts, _host: Host) -> Iterator[str]:
    if _is_known(facts) and facts.disk_free_bytes < FAIL_BYTES:
        yield _free(facts)


@each_host.warn(
    "E-DISK-02",
    title="little room in the work folder",
    meaning="a save may fail once the disk is full",
    fix=ROOM,
)
def _little_room(facts: HostFacts, _host: Host) -> Iterator[str]:
    if _is_known(facts) and FAIL_BYTES <= facts.disk_free_bytes < WARN_BYTES:
        yield _free(facts)


def _free(facts: HostFacts) -> str:
    return f"{format_bytes(facts.disk_free_bytes)} free in {facts.workdir}"


@each_host.fail(
    "E-DISK-03",
    title="the work folder cannot be written",
    meaning="nothing can be brought there, and no checkpoint saved",
    fix="set `workdir` of this host to a folder that you may write",
)
def _not_writable(facts: HostFacts, _host: Host) -> Iterator[str]:
    folder = facts.work_folder
    if folder is not None and folder.read_only:
        yield f"{facts.workdir} is on {folder.mount}, which is mounted read-only"
    elif folder is not None and folder.writable is False:
        yield f"{facts.workdir} {'is' if folder.exists else 'would be'} in a folder that this user may not write"


@whole_cluster.fail(
    "E-DISK-03",
    title="the work folder cannot be written",
    meaning="nothing can be brought there, and no checkpoint saved",
    fix="set `workdir` of this host to a folder that you may write; a quota or a broken disk are other causes",
)
def _not_written(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for row in inventory.writes:
        if row.error is not None:
            yield Seen(hosts=(row.host,), evidence=f"a file could not be written in {row.folder}: {row.error}")


@whole_cluster.warn(
    "E-DISK-10",
    title="the work folder is very slow",
    meaning="saving a checkpoint holds up the training",
    fix="set `workdir` of this host to a local disk; look for a disk that is failing: dmesg",
)
def _slow(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for row in inventory.writes:
        if row.seconds is not None and row.seconds > SLOW_S:
            yield Seen(hosts=(row.host,), evidence=f"1 MiB took {row.seconds:.1f} s in {row.folder}")


@each_host.warn(
    "E-DISK-04",
    title="few inodes left",
    meaning="no new file can be made once they are used up, whatever room there is",
    fix="delete many small files there, or set `workdir` of this host to another disk",
)
def _few_inodes(facts: HostFacts, _host: Host) -> Iterator[str]:
    folder = facts.work_folder
    if folder is not None and folder.inodes_free is not None and folder.inodes_free < WARN_INODES:
        yield f"{folder.inodes_free} of {folder.inodes_total} inodes free on {folder.mount}"


@each_host.fail(
    "E-DISK-11",
    title="the work folder is somebody else's",
    meaning="its owner can change the files that the ranks read and run",
    fix="set `workdir` of this host to a folder of your own, in one that not everybody may write",
)
def _somebody_elses(facts: HostFacts, _host: Host) -> Iterator[str]:
    folder = facts.work_folder
    if folder is not None and folder.owner is not None:
        yield folder.owner


@each_host.warn(
    "E-DISK-12",
    title="others can put something else in the place of the work folder",
    meaning="another user can change the files that the ranks read and run",
    fix="there: chmod o-w on that folder (or chmod +t); or set `workdir` of this host to a folder in your home",
)
def _within_reach_of_others(facts: HostFacts, _host: Host) -> Iterator[str]:
    folder = facts.work_folder
    if folder is not None and folder.owner is None and folder.may_replace is not None:
        yield folder.may_replace


@each_host.warn(
    "E-DISK-08",
    title="the work folder is in memory",
    meaning="checkpoints take memory from the ranks and are gone after a restart of the host",
    fix="set `workdir` of this host to a folder on a disk",
)
def _in_memory(facts: HostFacts, _host: Host) -> Iterator[str]:
    folder = facts.work_folder
    if folder is not None and folder.filesystem in MEMORY_FILESYSTEMS:
        yield f"{facts.workdir} is on {folder.mount}, a {folder.filesystem}"


@each_host.fail(
    "E-DISK-09",
    title="{folder} does not answer",
    meaning="programs that touch it hang until its file server is back",
    fix="there: df shows which mount hangs; bring its server back, or unmount it: sudo umount -l",
)
def _silent(facts: HostFacts, _host: Host) -> Iterator[Evidence]:
    for folder in facts.storage:
        if folder.error is not None:
            yield f"{folder.path}: {folder.error}", {"folder": _kind(folder, facts)}


def _kind(folder: Folder, facts: HostFacts) -> str:
    return "the work folder" if folder.path == facts.workdir else "a folder"


@whole_cluster.fail(
    "E-DISK-05",
    title="the shared folder is another one there",
    meaning="a file of one host is missing on the others: models would be missing and checkpoints incomplete",
    fix="mount the same file system there, at the same path; findmnt shows what is mounted",
    step="share",
)
def _another_folder(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    """Hosts that do not see what the most others see."""
    for probe in inventory.shared:
        able = [view for view in probe.views if view.error is None]
        groups: dict[tuple[str, ...], list[str]] = {}
        for view in able:
            groups.setdefault(view.sees, []).append(view.host)
        most = max(groups.values(), key=len, default=[])
        for sees, hosts in groups.items():
            if hosts is not most:
                seen = (
                    f"{', '.join(hosts)} sees {', '.join(sees) or 'nobody'}, {', '.join(most)} sees {', '.join(most)}"
                )
                yield Seen(hosts=tuple(hosts), evidence=f"{probe.folder}: {seen}")


@whole_cluster.fail(
    "E-DISK-06",
    title="the shared folder cannot be written",
    meaning="this host cannot save its part there",
    fix="there: check that it is mounted, not read-only, and that this user owns it or shares its group",
)
def _not_shared_for_writing(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for probe in inventory.shared:
        for view in probe.views:
            if view.error is not None:
                yield Seen(hosts=(view.host,), evidence=f"{probe.folder}: {view.error}")


@whole_cluster.warn(
    "E-DISK-07",
    title="a rename on another host is seen late",
    meaning="a checkpoint that is complete seems not to be there for a while",
    fix="mount it with a shorter attribute cache, such as actimeo=1",
)
def _rename_unseen(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for probe in inventory.shared:
        for view in probe.views:
            if view.sees_rename is False:
                yield Seen(hosts=(view.host,), evidence=f"{probe.folder}: not within 3 s")


# Are the model and the data there, and the same on all hosts?


@whole_cluster.info(
    "E-DATA-01",
    title="the {model_or_data} is not on all hosts",
    meaning="the start takes longer: it is brought there first",
    fix="nothing: gangline train brings it",
)
def _absent(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for compared in inventory.data:
        missing = [copy for copy in compared.copies if copy.tree is None and copy.error is None]
        there = [copy.host for copy in compared.copies if copy.tree is not None]
        if missing and there:
            evidence = (
                f"nothing at {', '.join(dict.fromkeys(copy.path for copy in missing))}; {', '.join(there)} has it"
            )
            yield Seen(
                hosts=tuple(copy.host for copy in missing), evidence=evidence, words={"model_or_data": compared.what}
            )


@whole_cluster.fail(
    "E-DATA-03",
    title="the {model_or_data} is on no host",
    meaning="nothing can be trained",
    fix="correct its path in the job, or bring it to the head",
)
def _nowhere(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for compared in inventory.data:
        if compared.copies and all(copy.tree is None and copy.error is None for copy in compared.copies):
            paths = ", ".join(dict.fromkeys(copy.path for copy in compared.copies))
            hosts = tuple(copy.host for copy in compared.copies)
            yield Seen(hosts=hosts, evidence=f"nothing at {paths}", words={"model_or_data": compared.what})


@whole_cluster.fail(
    "E-DATA-03",
    title="the {model_or_data} cannot be read",
    meaning="a rank there would end, or train on something else",
    fix="correct its rights there, or copy it anew",
)
def _unreadable(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for compared in inventory.data:
        for copy in compared.copies:
            if copy.error is not None:
                yield Seen(
                    hosts=(copy.host,), evidence=f"{copy.path}: {copy.error}", words={"model_or_data": compared.what}
                )


@whole_cluster.fail(
    "E-DATA-02",
    title="the {model_or_data} is not the same on all hosts",
    meaning="ranks would train different models, or on different samples, and nothing would say so",
    fix="decide which is right, and delete the others: gangline train brings it",
)
def _different(inventory: Inventory, _cluster: Cluster) -> Iterator[Seen]:
    for compared in inventory.data:
        groups: dict[str, list[CopyOnHost]] = {}
        for copy in compared.copies:
            if copy.tree is not None:
                groups.setdefault(copy.tree, []).append(copy)
        if len(groups) > 1:
            files = f"; not the same: {', '.join(compared.differing)}" if compared.differing else ""
            parts = [f"{_size(copies[0])} on {', '.join(copy.host for copy in copies)}" for copies in groups.values()]
            hosts = tuple(copy.host for copies in groups.values() for copy in copies)
            yield Seen(hosts=hosts, evidence="; ".join(parts) + files, words={"model_or_data": compared.what})


def _size(copy: CopyOnHost) -> str:
    files = "1 file" if copy.num_files == 1 else f"{copy.num_files} files"
    return f"{files}, {format_bytes(copy.num_bytes)}, {(copy.tree or '')[:8]}"
