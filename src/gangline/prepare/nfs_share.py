"""Step `share`: the shared folders of the cluster file, exported by the head over NFS and mounted by the others.

Only by name: a run needs no shared folder, for gangline brings model and data, and gathers checkpoints.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from gangline.prepare.prepare_step import (
    Asks,
    Change,
    CommandChange,
    FileChange,
    FileRead,
    HostReading,
    PrepareStep,
    StepPlan,
    StepView,
    activated,
)
from gangline.units import is_address

MOUNTS = "/proc/self/mounts"
EXPORTS, OWN_EXPORTS = "/etc/exports", "/etc/exports.d/gangline.exports"
UNITS = "/etc/systemd/system"
SERVER = ("nfs-server.service", "nfs-kernel-server.service")
"""As the most distributions call it; Debian's older name is the same unit."""
PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")
LOCAL = frozenset({"ext4", "xfs", "btrfs", "zfs", "f2fs", "ext3", "ext2", "tmpfs", "overlay", "bcachefs", "autofs"})
"""File systems of one machine: any other one may be shared already."""
EXPORT = "rw,sync,no_subtree_check,root_squash"
MOUNT_OPTIONS = "nfsvers=4,hard,noatime,actimeo=1"
"""hard: a server that is away for a while is no error in a file; actimeo: a rename is seen elsewhere within 1 s."""
NEEDED = "none is needed: gangline brings model and data to every host, and gathers its checkpoints"
INSTALL = {
    "server": "sudo apt install nfs-kernel-server (Fedora: sudo dnf install nfs-utils)",
    "client": "sudo apt install nfs-common (Fedora: sudo dnf install nfs-utils)",
}
ASKS = Asks(
    files=(MOUNTS, EXPORTS, OWN_EXPORTS, "/proc/filesystems"),
    folders=(UNITS,),
    commands={
        "nfsd": ("modinfo", "-F", "filename", "nfsd"),
        "nfs": ("modinfo", "-F", "filename", "nfs"),
        "enabled": ("systemctl", "is-enabled", SERVER[0]),
        "active": ("systemctl", "is-active", SERVER[0]),
    },
    programs=("exportfs", "mount.nfs", "systemctl"),
)


def root_asks(reading: HostReading) -> Asks:
    """Units of mounts that are there already."""
    names = [name for name in reading.folders[UNITS] or () if name.endswith((".mount", ".automount"))]
    return Asks(files=tuple(f"{UNITS}/{name}" for name in names))


def plan(view: StepView) -> StepPlan:
    """An export on the head, mounts elsewhere; or why there is nothing to do."""
    head, folders = view.readings.get(view.cluster.head.name), view.cluster.shared
    if why := _why_none(view):
        return StepPlan(remains=(why,))
    if head is None:
        return StepPlan(remains=(f"{view.cluster.head.name}, which would export it, does not answer",))
    if foreign := [each for each in folders if not _is_local(head, each)]:
        kind, source = _file_system(head, foreign[0])
        there = f"{foreign[0]} is {kind} ({source}) on {view.cluster.head.name}"
        others = [each for each in foreign if _is_local(view.reading, each)]
        return StepPlan(remains=(f"{there}: mount the same here",) if others else ())
    if view.host.name == view.cluster.head.name:
        return _exported(view, folders)
    return _mounted(view, head, folders)


def _why_none(view: StepView) -> str:
    """Why this cluster shares no folder; "" where it does."""
    folders = view.cluster.shared
    if not folders:
        return f"{NEEDED}; for a folder of your own: shared: /srv/shared in the cluster file"
    if strange := [folder for folder in folders if not PATH.fullmatch(folder)]:
        return f"{strange[0]} has characters that an export cannot have: rename it"
    alone = len(view.cluster.hosts) < 2 or view.cluster.is_one_machine
    return "a cluster of one machine shares nothing" if alone else ""


def _file_system(reading: HostReading, folder: str) -> tuple[str, str]:
    """Kind and source of the file system that holds a folder."""
    best, found = "", ("", "")
    for row in reading.files[MOUNTS].text.splitlines():
        source, place, kind = [*row.split(), "", "", ""][:3]
        inside = PurePosixPath(folder).is_relative_to(place or "/")
        if inside and len(place) >= len(best):
            best, found = place, (kind, source)
    return found


def _is_local(reading: HostReading, folder: str) -> bool:
    return _file_system(reading, folder)[0] in LOCAL


def _kernel_has(reading: HostReading, kind: str) -> bool:
    return bool(reading.output(kind)) or f"\t{kind}\n" in reading.files["/proc/filesystems"].text


def _exported(view: StepView, folders: tuple[str, ...]) -> StepPlan:
    reading = view.reading
    guests = [host for host in view.cluster.hosts if host.name != view.host.name]
    if nameless := [host.name for host in guests if not is_address(host.address)]:
        return StepPlan(remains=(f"{nameless[0]} has no address in the cluster file: exports are for addresses alone",))
    if not _kernel_has(reading, "nfsd"):
        return StepPlan(remains=(f"the kernel here has no NFS server (nfsd); {NEEDED}",))
    if not reading.has("exportfs"):
        return StepPlan(remains=(f"no NFS server is installed: {INSTALL['server']}; then again",))
    own = {row.split()[0] for row in reading.files[EXPORTS].text.splitlines() if row.startswith("/")}
    rows = [
        " ".join([folder, *(f"{host.address}({EXPORT})" for host in guests)]) for folder in folders if folder not in own
    ]
    remains = tuple(
        f"{folder} stands in {EXPORTS} already: it stays as you wrote it" for folder in folders if folder in own
    )
    text = "# gangline prepare share\n" + "".join(f"{row}\n" for row in rows)
    before = reading.files[OWN_EXPORTS]
    changes: list[Change] = []
    if rows and before.text != text:
        changes += activated(
            (FileChange(path=OWN_EXPORTS, before=before.content, content=text.encode()),), ("exportfs", "-ra")
        )
    changes += _started(reading)
    return StepPlan(
        changes=tuple(changes),
        reason="the other hosts see these folders only if this one exports them" if changes else "",
        risk="whoever is one of these hosts, or takes its address, can read and write there as any user but root; "
        f"a folder that is not there yet: sudo install -d -o {reading.user} {folders[0]}"
        if changes
        else "",
        remains=remains,
    )


def _started(reading: HostReading) -> list[Change]:
    """The server, for every boot and now; each as it was after an undo."""
    unit, enabled, active = SERVER[0], reading.output("enabled"), reading.output("active")
    pairs = [("enable", "disable", "is-enabled", enabled, "enabled"), ("start", "stop", "is-active", active, "active")]
    return [
        CommandChange(
            argv=("systemctl", do, unit),
            undo=("systemctl", undo, unit),
            probe=("systemctl", ask, unit),
            before=before,
            after=after,
        )
        for do, undo, ask, before, after in pairs
        if before != after
    ]


def _mounted(view: StepView, head: HostReading, folders: tuple[str, ...]) -> StepPlan:
    reading = view.reading
    wanted = [each for each in folders if _is_local(reading, each)]  # another one was mounted by somebody; check looks
    if head.uid != reading.uid:
        whose = f"{reading.user} is user {reading.uid} here and {head.uid} on {view.cluster.head.name}"
        return StepPlan(remains=(f"{whose}: files there would be another user's; give both the same number",))
    if not wanted:
        return StepPlan()
    if not _kernel_has(reading, "nfs"):
        return StepPlan(remains=(f"the kernel here has no NFS client (nfs); {NEEDED}",))
    if not reading.has("mount.nfs") or not reading.has("systemctl"):
        return StepPlan(remains=(f"no NFS client is installed: {INSTALL['client']}; then again",))
    changes: list[Change] = []
    for folder in wanted:
        changes += _automount(reading, folder, f"{view.cluster.head.address}:{folder}")
    return StepPlan(
        changes=tuple(changes),
        reason="this host sees other files there than the head" if changes else "",
        risk="what lies in this folder here is hidden by the mount; a program that uses it waits while the head is off"
        if changes
        else "",
    )


def _automount(reading: HostReading, folder: str, source: str) -> tuple[Change, ...]:
    """Units that mount a folder at its first use: a boot does not wait for the head."""
    head = f"# gangline prepare share\n[Unit]\nDescription={source}, shared by the head of a training cluster\n"
    mount = f"{head}\n[Mount]\nWhat={source}\nWhere={folder}\nType=nfs\nOptions={MOUNT_OPTIONS}\nTimeoutSec=30\n"
    auto = f"{head}\n[Automount]\nWhere={folder}\n\n[Install]\nWantedBy=remote-fs.target\n"
    name = unit_name(folder)
    files = []
    for path, text in ((f"{UNITS}/{name}.mount", mount), (f"{UNITS}/{name}.automount", auto)):
        before = reading.files.get(path, FileRead())
        if before.text != text:
            files.append(FileChange(path=path, before=before.content, content=text.encode()))
    if not files:
        return ()
    unit = f"{name}.automount"
    return (
        *activated(tuple(files), ("systemctl", "daemon-reload")),
        CommandChange(argv=("systemctl", "enable", unit), undo=("systemctl", "disable", unit)),
        CommandChange(argv=("systemctl", "start", unit), undo=("systemctl", "stop", unit, f"{name}.mount")),
    )


def unit_name(folder: str) -> str:
    """The name that systemd gives the unit of a folder, as `systemd-escape --path` does."""
    text = folder.strip("/")
    escaped = "".join(
        "-" if sign == "/" else sign if sign.isalnum() or sign in "_." else f"\\x{ord(sign):02x}" for sign in text
    )
    return f"\\x2e{escaped[1:]}" if escaped.startswith(".") else escaped


SHARE = PrepareStep(
    name="share",
    summary="the shared folders of the cluster file over NFS, from the head; only where it is named",
    asks=ASKS,
    plan=plan,
    root_asks=root_asks,
    only_by_name=True,
)
