"""Step `limits`: open files, locked memory and shared memory that ranks need."""

from __future__ import annotations

import re

from gangline.prepare.prepare_step import Asks, Change, CommandChange, FileChange, PrepareStep, StepPlan, StepView

DROP_IN = "/etc/security/limits.d/60-gangline.conf"
FSTAB = "/etc/fstab"
NUM_FILES = 65536
SHM_BYTES = 1 << 30
"""As `check` (E-LIM-03)."""
PROC_LIMITS = "/proc/self/limits"
SHM = "/dev/shm"  # noqa: S108  (the place itself is meant)
SHM_SIZE = ("stat", "-f", "-c", "%b %S", SHM)
MOUNTED = "/proc/self/mounts"
ASKS = Asks(
    files=(DROP_IN, FSTAB, PROC_LIMITS, MOUNTED),
    folders=("/etc/security/limits.d", "/sys/class/infiniband"),
    commands={"shm": SHM_SIZE},
)
FSTAB_LINE = re.compile(r"^[^#\s]+\s+/dev/shm\s+tmpfs\s+(\S+)")


def plan(view: StepView) -> StepPlan:
    """A drop-in of pam_limits, and a larger /dev/shm where it is small."""
    changes, reasons, remains = _drop_in(view)
    shm, why, more = _shared_memory(view)
    return StepPlan(
        changes=(*changes, *shm),
        reason="; ".join(filter(None, (*reasons, why))),
        risk="new limits count from the next login on; what runs keeps the old ones" if changes else "",
        remains=(*remains, *more),
    )


def _drop_in(view: StepView) -> tuple[list[Change], list[str], list[str]]:
    """Lines for this user alone."""
    wanted, reasons = [], []
    soft, hard = _limit(view, "Max open files")
    if _is_below(soft, NUM_FILES):
        number = NUM_FILES if not _is_below(hard, NUM_FILES) else None
        wanted.append(f"{view.reading.user} soft nofile {NUM_FILES}")
        if number is None:
            wanted.append(f"{view.reading.user} hard nofile {NUM_FILES}")
        reasons.append(f"{soft} files may be open at once; data loaders and many ranks need more")
    if view.reading.folders["/sys/class/infiniband"] and _limit(view, "Max locked memory")[0] != "unlimited":
        wanted += [f"{view.reading.user} {kind} memlock unlimited" for kind in ("soft", "hard")]
        reasons.append("RDMA locks every buffer that it sends from")
    before = view.reading.files[DROP_IN]
    has = {line.strip() for line in before.text.splitlines()}
    missing = [line for line in wanted if line not in has]
    if not missing:
        remains = [f"{DROP_IN} is there: log in anew, then it counts"] if wanted else []
        return [], [], remains
    if view.reading.folders["/etc/security/limits.d"] is None:
        return [], [], [f"there is no pam_limits here: raise the limits of the container or service: {missing[0]}"]
    text = before.text or "# gangline prepare limits\n"
    content = text + "".join(f"{line}\n" for line in missing)
    return [FileChange(path=DROP_IN, before=before.content, content=content.encode(), mode=0o644)], reasons, []


def _limit(view: StepView, name: str) -> tuple[str, str]:
    """Soft and hard limit of a process there."""
    for line in view.reading.files[PROC_LIMITS].text.splitlines():
        if line.startswith(name):
            words = line[len(name) :].split()
            return words[0], words[1]
    return "unlimited", "unlimited"


def _is_below(limit: str, number: int) -> bool:
    return limit.isdigit() and int(limit) < number


def _shared_memory(view: StepView) -> tuple[list[Change], str, list[str]]:
    """Half of the memory for it, which is what the kernel gives by itself; for now and in /etc/fstab."""
    words = view.reading.output("shm").split()
    size = int(words[0]) * int(words[1]) if len(words) == 2 and all(map(str.isdigit, words)) else SHM_BYTES
    if size >= SHM_BYTES:
        return [], "", []
    if f" {SHM} tmpfs " not in view.reading.files[MOUNTED].text:
        return [], "", [f"{SHM} is small, but no tmpfs of its own: in a container, --shm-size=8g or --ipc=host"]
    before = view.reading.files[FSTAB]
    changes: list[Change] = []
    text = _fstab(before.text)
    if text != before.text:
        changes.append(FileChange(path=FSTAB, before=before.content, content=text.encode("utf-8", "surrogateescape")))
    remount = ("mount", "-o")
    changes.append(
        CommandChange(
            argv=(*remount, "remount,size=50%", SHM),
            undo=(*remount, f"remount,size={size}", SHM),
            probe=SHM_SIZE,
            before=view.reading.output("shm"),
        )
    )
    return changes, f"{SHM} has {size >> 20} MiB; NCCL between GPUs of one host and data loaders need more", []


def _fstab(text: str) -> str:
    """A size of half the memory for /dev/shm, where a line has another one; the kernel's own size needs no line."""
    rows = []
    for line in text.splitlines():
        found = FSTAB_LINE.match(line)
        if found and "size=" in found.group(1):
            options = [each for each in found.group(1).split(",") if not each.startswith("size=")]
            rows.append(line.replace(found.group(1), ",".join([*options, "size=50%"]), 1))
        else:
            rows.append(line)
    return "".join(f"{row}\n" for row in rows) if rows else text


LIMITS = PrepareStep(
    name="limits", summary="open files, locked memory for RDMA, a larger /dev/shm", asks=ASKS, plan=plan
)
