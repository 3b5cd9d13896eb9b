"""Slot leases: a run's claim on a GPU or a CPU slot of this host, so that two runs never share one by accident.

A lease is a file with a kernel lock (flock) on it. The host agent takes the leases of all its slots or none, before
anything starts, and what it starts inherits the locks: they are free once the last of it is gone, however it ended. The
file tells who holds it. Host agents of one run may share a slot (several ranks on one GPU), also one that rests and one
that serves the next attempt (gangline.agent.supervise.warm_pool).

GPUs are claimed by their UUID, for all runs of this user on this host. CPU slots are counted per work folder and host:
a host's `slots` is the wish of its user, also where it is more than the host has cores.

The same slots are claimed once more where all users of the host see it (gangline.agent.machine_leases). There a GPU has
one user. CPU slots of several users count against the cores of the host: a claim is refused where other users have some
and all together would be more than there are cores, for then one user's wish slows down another's run.

While a start copies and tokenises, the verb `reserve` holds the slots for it, until the file `released` is there, or
the controller is gone:

Request: the part of the request for this host (`launch.backend.HostRequest`), and `released`, a path
Answer:  {"kind": "held"}, {"kind": "beat"} every second, {"kind": "result"} at the end; or {"kind": "error"}: `Taken`
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from gangline.agent import machine_leases
from gangline.agent.bounded import run
from gangline.agent.host_facts import nvidia
from gangline.agent.host_files import as_record, read_text
from gangline.agent.machine_leases import Lease, Mine
from gangline.agent.netprobe.free_ports import PORT_SLOT
from gangline.agent.supervise import processes
from gangline.agent.verbs import VerbFailed

TAG = "GANGLINE_PART"
"""Environment variable with the host agent's folder, by which what it started is found after it is gone."""
CLAIM_S = 20.0
"""Claims are made one after the other, each in milliseconds."""
DRIVER = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
CAPABILITIES = Path("/proc/driver/nvidia/capabilities")
LISTED = re.compile(r"^(GPU|\s+MIG) .*\(UUID: ([A-Za-z0-9/-]+)\)$", re.MULTILINE)
"""A card or a MIG instance in what nvidia-smi -L prints; instances follow their card."""
UNFIT = re.compile(r"[^A-Za-z0-9-]")
"""What a file of ours is not called by."""
CPU_SLOT = "cpu"
"""What every CPU slot is called where all users see it: there they are counted."""
RENEW_S = 60.0
NAMED_PROCESSES = 100
"""As many as a lease has room for."""


class Taken(VerbFailed):
    """A slot is held by another run, or by another attempt of this one: `slot`, and `holder` as its lease says."""

    def __init__(self, slot: str, holder: Mapping[str, Any], *, run_id: str) -> None:
        run, attempt, pid = holder.get("run", "another run"), holder.get("attempt", "?"), holder.get("pid", "?")
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("since", 0)))
        super().__init__(
            f"{slot} is in use by {run}",
            f"its attempt {attempt} holds it since {since} (process {pid})",
            f"wait for it, or end it: gangline stop {run}"
            if run != run_id
            else "another computer continued the run, or it is still ending: look from there with gangline ps",
        )
        self.slot = slot
        self.holder = holder


class TakenByUser(VerbFailed):
    """Slots or a port are held by another user of this host."""

    def __init__(self, what: str, lease: Lease) -> None:
        super().__init__(
            f"{what} in use by {lease.whose}",
            f"{lease.user} has held it {lease.seen}",
            f"wait for it, or ask {lease.user}: only that user and root can end it",
        )


class Leases:
    """The leases of one host agent."""

    def __init__(self) -> None:
        self.slots: List[str] = []
        self._descriptors: List[int] = []
        self._folder: Optional[Path] = None
        self._of_machine: List[Mine] = []
        self._record: Dict[str, Any] = {}
        """What those say."""
        self._renew_at = 0.0

    @property
    def descriptors(self) -> List[int]:
        """What a process has to inherit for the leases to last as long as it runs."""
        return [*self._descriptors, *(mine.descriptor for mine in self._of_machine)]

    def claim(self, request: Mapping[str, Any]) -> None:
        """Take the slots of a host's request; raises Taken or TakenByUser, and then none is held, or OSError."""
        machine_leases.sweep()
        self._record = _claim_of_machine(request)
        if request.get("leases") is None:
            return
        gpus = _gpus(request)
        self._claim_of_user(gpus, request)
        slots = self.slots if gpus else [CPU_SLOT] * len(self.slots)

        def against() -> List[Lease]:
            return _against_gpus(slots) if gpus else _against_cpus(len(slots), request)

        self._of_machine, taken = machine_leases.take(slots, self._record, against=against)
        if taken:
            self.end()
            raise TakenByUser(_named(taken, wanted=len(slots)), taken[0])

    def claim_port(self, port: int) -> None:
        """Take the port where the gang is to meet; raises TakenByUser."""
        slot = f"{PORT_SLOT}{port}"
        mine, taken = machine_leases.take([slot], self._record, against=lambda: _others(slot))
        if taken:
            raise TakenByUser(f"port {port} is", taken[0])
        self._of_machine += mine
        for each in mine:
            machine_leases.supersede(each)

    def note(self, running: Sequence[processes.Process]) -> None:
        """Say which processes hold them, as long as those run, though they may not have inherited them."""
        if time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + RENEW_S
            self._of_machine = [machine_leases.renewed(mine, self._record) for mine in self._of_machine]
        named = [[process.pid, process.start_ticks] for process in running[:NAMED_PROCESSES]]
        if self._of_machine and named != self._record.get("processes"):
            self._rewrite(processes=named)

    def _rewrite(self, **changes: Any) -> None:
        self._record.update(changes)
        for mine in self._of_machine:
            with contextlib.suppress(OSError):  # the folder of all users is full: its lock still holds
                machine_leases.write(mine, self._record)

    def _claim_of_user(self, gpus: Sequence[str], request: Mapping[str, Any]) -> None:
        own = Path(request["leases"])
        if not gpus:
            return self._claim_in(own, gpus, request)
        try:
            return self._claim_in(_gpu_folder(), gpus, request)
        except OSError:  # a home folder that cannot be written, or knows no locks
            return self._claim_in(own, gpus, request)

    def _claim_in(self, folder: Path, gpus: Sequence[str], request: Mapping[str, Any]) -> None:
        """Take all these GPUs, or where there are none as many of the host's CPU slots as it has ranks."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        wanted = len(gpus or request["ranks"])
        slots = gpus or [f"cpu-{number}" for number in range(max(wanted, int(request["slots"])))]
        refused: List[Tuple[str, Mapping[str, Any]]] = []
        with _one_at_a_time(folder):
            for number, slot in enumerate(slots):
                if number - len(refused) == wanted:
                    return
                holder = self._take(folder, slot, request)
                if holder is not None:
                    refused.append((slot, holder))
                if len(slots) - len(refused) < wanted:
                    self.let_go()
                    raise Taken(*refused[0], run_id=request["run_id"])

    def _take(self, folder: Path, slot: str, request: Mapping[str, Any]) -> Optional[Mapping[str, Any]]:
        """Take one slot; who holds it if that is somebody else."""
        descriptor = os.open(folder / slot, os.O_RDWR | os.O_CREAT, 0o600)
        holder = _content(descriptor)
        same = _is_brother(slot, holder, request)
        if _lock(descriptor, fcntl.LOCK_EX):
            if holder and not same and processes.tagged(f"{TAG}={holder.get('tag')}"):
                os.close(descriptor)
                return holder
            _write(descriptor, _claim(request))
            # Nobody can come between: claims are made one at a time.
            _lock(descriptor, fcntl.LOCK_SH)
        elif not (same and _lock(descriptor, fcntl.LOCK_SH)):
            os.close(descriptor)
            return holder
        elif holder.get("folder") == request["folder"]:  # it was reserved for this very part
            _write(descriptor, _claim(request))
        self._descriptors.append(descriptor)
        self.slots.append(slot)
        return None

    def pass_on(self, request: Mapping[str, Any], *, tag: str) -> None:
        """Say that they serve another part of the run from now on; raises OSError. tag: that of what is started."""
        if self._folder is None:
            return
        with _one_at_a_time(self._folder):
            for descriptor in self._descriptors:
                _write(descriptor, dict(_claim(request), tag=tag))
        self._rewrite(attempt=request["attempt"], host=request["host"])

    def end(self) -> None:
        """Say that nothing of the run is left here, and let go. A slot that a brother host agent shares stays his."""
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                if _lock(descriptor, fcntl.LOCK_EX):
                    os.ftruncate(descriptor, 0)
        for mine in self._of_machine:
            machine_leases.withdraw(mine)
        self._of_machine = []
        self.let_go()

    def let_go(self) -> None:
        """Close them all."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self._descriptors, self._of_machine, self.slots = [], [], []


RESERVE_POLL_S = 0.05
BEAT_S = 1.0
"""A reservation writes a line so often: it fails once the controller is gone."""


def reserve(request: Dict[str, Any]) -> Iterator[Dict[str, Any]]:
    """The verb: hold the slots of a host's request until they are released; raises Taken."""
    mark, leases = Path(request["released"]), Leases()
    with contextlib.suppress(FileNotFoundError):
        mark.unlink()
    leases.claim(request)
    try:
        yield {"kind": "held"}
        beat_s = time.monotonic()
        while not mark.exists():
            time.sleep(RESERVE_POLL_S)
            if time.monotonic() - beat_s > BEAT_S:
                beat_s = time.monotonic()
                yield {"kind": "beat"}
        with contextlib.suppress(OSError):
            mark.unlink()
    finally:
        leases.end()
    yield {"kind": "result"}


def held(request: Mapping[str, Any]) -> List[str]:
    """Leases that are locked for this very part of a run."""
    found = []
    for folder in _folders(request):
        with contextlib.suppress(OSError):
            found += [name for name, descriptor in _own(folder, request) if not _lock(descriptor, fcntl.LOCK_EX)]
    return found


def forget(request: Mapping[str, Any]) -> None:
    """Clear leases that a part of a run has left behind, now that nothing of it runs; raises OSError."""
    for folder in _folders(request):
        with _one_at_a_time(folder):
            for _, descriptor in _own(folder, request):
                if _lock(descriptor, fcntl.LOCK_EX):
                    os.ftruncate(descriptor, 0)
    machine_leases.sweep()


def _folders(request: Mapping[str, Any]) -> List[Path]:
    """The folders in which a part may have leases."""
    folders = [Path(request["leases"]), _gpu_folder()] if request.get("leases") else []
    return [folder for folder in folders if folder.is_dir()]


def _own(folder: Path, request: Mapping[str, Any]) -> Iterator[Tuple[str, int]]:
    """Name and descriptor of each lease in a folder that was written for this part; raises OSError."""
    for path in sorted(folder.glob("*-*")):
        descriptor = os.open(path, os.O_RDWR)
        try:
            if _content(descriptor).get("folder") == request["folder"]:
                yield path.name, descriptor
        finally:
            os.close(descriptor)


def _gpus(request: Mapping[str, Any]) -> List[str]:
    """The leases of the GPUs that the ranks of a request use; [] if they run on CPUs."""
    env = {**os.environ, **request["env"]}
    visible = _visible(env.get("CUDA_VISIBLE_DEVICES"), _uuids(), _instances())
    if not visible:
        return []
    devices = request.get("devices") or [0]
    return sorted({"gpu-" + UNFIT.sub("_", visible[device % len(visible)]) for device in devices})


def _uuids() -> List[str]:
    """UUIDs of the GPUs in the order of their bus addresses, as nvidia-smi lists them.

    A job of Slurm may use some cards only, which CUDA numbers from 0; the driver's folder has all of them. A control
    group that denies a card denies its device file, which is asked for and not opened: that would wake the card.
    """
    found = []
    for path in sorted(DRIVER.glob("*/information")):
        rows = [line.partition(":") for line in (read_text(path) or "").splitlines()]
        said = {name.strip(): value.strip() for name, _, value in rows}
        device = DEVICES / f"nvidia{said.get('Device Minor')}"
        if "GPU UUID" in said and (not device.exists() or os.access(device, os.R_OK | os.W_OK)):
            found.append(said["GPU UUID"])
    return found if DRIVER.is_dir() else nvidia.uuids()


def _instances() -> Dict[str, List[str]]:
    """The MIG instances of the cards that are cut into some, by the UUID of the card; {} where none is."""
    found: Dict[str, List[str]] = {}
    program = nvidia.path() if next(CAPABILITIES.glob("gpu*/mig/gi*"), None) else None
    text, card = "", ""
    with contextlib.suppress(OSError):  # it cannot be started, or hangs on a dead driver
        text = run([program, "-L"]).stdout if program else ""
    for kind, uuid in LISTED.findall(text):
        card = uuid if kind == "GPU" else card
        found.setdefault(card, []).extend([uuid] if kind != "GPU" else [])
    return {uuid: cut for uuid, cut in found.items() if cut}


def _visible(words: Optional[str], uuids: List[str], cut: Mapping[str, List[str]]) -> List[str]:
    """What CUDA_VISIBLE_DEVICES leaves of them; as CUDA does, up to the first word that means none.

    cut: MIG instances. Of a card that is cut, CUDA takes the first, unless another is named.
    """
    if words is None or not uuids:
        return [cut.get(uuid, [uuid])[0] for uuid in uuids]
    known = [each for uuid in uuids for each in (uuid, *cut.get(uuid, []))]
    found: List[str] = []
    for word in (each.strip() for each in words.split(",")):
        if word.isdigit() and int(word) < len(uuids):
            matches = [uuids[int(word)]]
        else:
            matches = [uuid for uuid in known if word and uuid.startswith(word)]
        if not matches and word.startswith("MIG-"):
            matches = [word]
        if len(matches) != 1:
            break
        found += [cut.get(uuid, [uuid])[0] for uuid in matches]
    return found


def _gpu_folder() -> Path:
    """One for all work folders of this user. Its files are named by UUID, so that hosts may share a home folder."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "gangline" / "leases"


def _is_brother(slot: str, holder: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
    """Whether a slot is held for the same attempt. Or, as a GPU may serve several hosts of a cluster file, for an
    earlier one whose host agents may rest: who starts an attempt has ended those before.
    """
    if holder.get("run") != request["run_id"]:
        return False
    if holder.get("attempt") == request["attempt"]:
        return True
    return slot.startswith("gpu-") and bool(holder.get("rests")) and bool(request.get("warm_pool"))


def _others(slot: str) -> List[Lease]:
    return [lease for lease in machine_leases.of_others(slot) if lease.slot == slot]


def _against_gpus(slots: Sequence[str]) -> List[Lease]:
    return [lease for lease in machine_leases.of_others("gpu-") if lease.slot in slots]


def _against_cpus(wanted: int, request: Mapping[str, Any]) -> List[Lease]:
    """CPU slots of other users, if there are any and all together would be more than there are cores."""
    this_part = (request["run_id"], request["attempt"], request["host"])  # with what was reserved for it
    all_of_them = [lease for lease in machine_leases.held(CPU_SLOT) if lease.slot == CPU_SLOT]
    others = [lease for lease in all_of_them if not lease.is_own]
    own = [lease for lease in all_of_them if lease.is_own and (lease.run, lease.attempt, lease.host) != this_part]
    return others if wanted + len(own) + len(others) > (os.cpu_count() or 1) else []


def _named(taken: Sequence[Lease], *, wanted: int) -> str:
    """The slots of other users that are in the way, with the verb."""
    slot = taken[0].slot
    if slot == CPU_SLOT:
        fit = "CPU slot does not fit" if wanted == 1 else "CPU slots do not fit"
        are = "is" if len(taken) == 1 else "are"
        return f"{wanted} {fit} beside others: {len(taken)} of {os.cpu_count()} cores {are}"
    numbers = {"gpu-" + UNFIT.sub("_", uuid): number for number, uuid in enumerate(_uuids())}
    return f"GPU {numbers[slot]} ({slot[4:]}) is" if slot in numbers else f"{slot[4:]} is"


def _claim_of_machine(request: Mapping[str, Any]) -> Dict[str, Any]:
    """What other users may read: no paths."""
    me = processes.this_process()
    names = {"run": request["run_id"], "attempt": request["attempt"], "host": request["host"]}
    return dict(names, since=time.time(), processes=[[me.pid, me.start_ticks]])


def _claim(request: Mapping[str, Any]) -> Dict[str, Any]:
    me = processes.this_process()
    names = {"run": request["run_id"], "attempt": request["attempt"], "host": request["host"]}
    folder, rests = request["folder"], bool(request.get("warm_pool"))
    process = {"pid": me.pid, "start_ticks": me.start_ticks, "since": time.time()}
    return dict(names, folder=folder, tag=folder, rests=rests, **process)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder / "claim.lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + CLAIM_S
    try:
        while not _lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise OSError(f"{folder / 'claim.lock'} was held by others for {CLAIM_S:g} s")
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _content(descriptor: int) -> Dict[str, Any]:
    return as_record(os.pread(descriptor, 1 << 16, 0))


def _write(descriptor: int, value: Dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    os.pwrite(descriptor, data, 0)  # over what is there: that needs no room on a full disk
    os.ftruncate(descriptor, len(data))
