"""The verb `prepare`: what a step wants to know is read, changes are made, confirmed, listed, and taken back.

    {"do": "read", "scope", "files", "commands", "programs"}
    {"do": "apply", "scope", "step", "txn", "by", "changes", "revert_s"}
    {"do": "confirm", "scope", "txn"}
    {"do": "undo", "scope", "steps", "dry", "expect"}
    {"do": "status", "scope"}
    {"do": "restart", "scope"}

`scope` is `root`, or `user` for changes of the user's own files; each has a journal of its own. Without root, a request
of scope root goes through sudo (`sudo_session`); `password` is then the user's. `root_folder` is for tests alone: all
paths lie below it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Tuple

from gangline.agent.bounded import run
from gangline.agent.prepare import host_changes, revert_timer, sudo_session
from gangline.agent.prepare.change_journal import Journal, Transaction, journal_folder, now
from gangline.agent.prepare.host_changes import Conflict, Staged, file_state, name_of, state_of, state_to_undo
from gangline.agent.verbs import VerbFailed

Record = Dict[str, Any]
READ_S = 20.0
OUTPUT_CHARACTERS = 1 << 16


def prepare(request: Record) -> Iterable[Record]:
    """The verb; see above. Raises VerbFailed."""
    if request["scope"] == "root" and os.geteuid() != 0 and "root_folder" not in request:
        return sudo_session.ask_as_root(request)
    if request["do"] == "read":
        return [read(request)]
    return _in_words(_DO[request["do"]](request, _Place(request)))


def _in_words(records: Iterable[Record]) -> Iterable[Record]:
    """The records; a disk that is full or read-only is an error for the user."""
    try:
        yield from records
    except OSError as error:
        raise VerbFailed(_system_words(error), "nothing was changed", "see what the disk or the file lacks") from None


class _Place:
    """Where changes and their journal lie."""

    def __init__(self, request: Record) -> None:
        self.root = Path(request.get("root_folder") or "/")
        self.journal = Journal(journal_folder(request["scope"], root=self.root))


# What a step wants to know.


def read(request: Record) -> Record:
    """Files, outputs of commands and places of programs, as this user sees them; nothing is changed."""
    root = Path(request.get("root_folder") or "/")
    account = pwd.getpwuid(os.getuid())
    path = "{}:{}".format(os.environ.get("PATH", "/usr/bin:/bin"), host_changes.SYSTEM_FOLDERS)
    return {
        "kind": "read",
        "uid": os.getuid(),
        "user": account.pw_name,
        "home": account.pw_dir,
        "files": {name: _file(root, name, account.pw_dir) for name in request.get("files") or []},
        "commands": {name: _output(argv, path) for name, argv in (request.get("commands") or {}).items()},
        "programs": {name: shutil.which(name, path=path) for name in request.get("programs") or []},
        "folders": {name: _names(root, name, account.pw_dir) for name in request.get("folders") or []},
    }


def _inside(name: str, home: str) -> str:
    return str(Path(home) / name[2:]) if name.startswith("~/") else name


def _file(root: Path, name: str, home: str) -> Record:
    try:
        path = Path(_inside(name, home))
        if path.parts[:2] == ("/", "proc") or path.parts[:2] == ("/", "sys"):  # of the kernel; they have no size
            return {"kind": "file", "content": host_changes.encoded(path.read_bytes()[: 1 << 16])}
        return file_state(host_changes.real_path(root, str(path)))
    except (OSError, VerbFailed) as error:
        if isinstance(error, FileNotFoundError):
            return dict(host_changes.ABSENT)
        return {"kind": "unreadable", "why": str(error)[:300]}


def _names(root: Path, name: str, home: str) -> Any:
    try:
        return sorted(each.name for each in host_changes.real_path(root, _inside(name, home)).iterdir())[:1000]
    except OSError:
        return None


def _output(argv: List[str], path: str) -> Record:
    try:
        output = run(argv, timeout_s=READ_S, env={"PATH": path})
    except OSError as error:
        return {"returncode": 127, "stdout": "", "stderr": str(error)[:300]}
    return {
        "returncode": output.returncode,
        "stdout": output.stdout[:OUTPUT_CHARACTERS],
        "stderr": output.stderr[:1000],
    }


# Make the changes of a step.


def apply(request: Record, place: _Place) -> Iterable[Record]:
    """All changes of a step, or none of them."""
    with place.journal.locked():
        recovered = recover(place.journal, place.root)
        entries = _looked_at(request["changes"], place.root, recovered)
        txn = str(request["txn"])
        staged: Dict[int, Staged] = {}
        try:
            _write_intents(request, entries, place.journal)
            staged = _staged(txn, entries, place.root)
            if request["revert_s"] is not None:
                revert_timer.start(place.journal.folder, txn, root=place.root)
            for entry in entries:
                yield _made(entry, staged, txn, place)
            place.journal.append({"kind": "complete", "txn": txn})
        except (OSError, VerbFailed) as error:
            for each in staged.values():
                each.discard()
            raise _taken_back(error, txn, place) from None
        yield {"kind": "applied", "txn": txn, "num_changes": len(entries)}


def _looked_at(changes: List[Record], root: Path, recovered: List[str]) -> List[Record]:
    """Each change with the state of its thing; raises VerbFailed where one is not as the user was shown."""
    entries = []
    for seq, change in enumerate(changes):
        before = state_of(change, root)
        if not host_changes.is_as_shown(change, before):
            why = "a change that was interrupted has been taken back" if recovered else "somebody changed it since"
            raise VerbFailed(
                "{} is not as it was shown".format(name_of(change)), why, "nothing was changed; look again"
            )
        if change["kind"] == "file":
            after = host_changes.wanted_state(change, before)
            missing = _missing_folders(host_changes.real_path(root, change["path"]))
        else:
            after, missing = {"kind": "probed", "text": change["after"]}, []
        entries.append({"seq": seq, "change": change, "before": before, "after": after, "folders": missing})
    return entries


def _missing_folders(path: Path) -> List[str]:
    missing = [folder for folder in [path.parent, *path.parent.parents] if not folder.exists()]
    return [str(folder) for folder in reversed(missing)]


def _write_intents(request: Record, entries: List[Record], journal: Journal) -> None:
    """What is going to happen, on the disk."""
    txn = str(request["txn"])
    begin = {"kind": "begin", "txn": txn, "step": request["step"], "by": request["by"], "when": now()}
    journal.append({**begin, "who": _user(), "revert_s": request["revert_s"]})
    for entry in entries:
        journal.append({"kind": "intent", "txn": txn, **entry})


def _user() -> str:
    name = os.environ.get("SUDO_USER") if os.geteuid() == 0 else None
    return name or pwd.getpwuid(os.geteuid()).pw_name


def _staged(txn: str, entries: List[Record], root: Path) -> Dict[int, Staged]:
    """New contents of all files, on the disk: it is full, or read-only, before anything is changed."""
    found: Dict[int, Staged] = {}
    try:
        for entry in entries:
            change = entry["change"]
            if change["kind"] == "file":
                path = host_changes.real_path(root, change["path"])
                mode = change.get("folder_mode") or host_changes.FOLDER_MODE
                found[entry["seq"]] = Staged(path, entry["after"], mark=txn, folder_mode=mode)
    except BaseException:
        for each in found.values():
            each.discard()
        raise
    return found


def _made(entry: Record, staged: Dict[int, Staged], txn: str, place: _Place) -> Record:
    change, after = entry["change"], entry["after"]
    if change["kind"] == "file":
        staged[entry["seq"]].place()
    else:
        host_changes.execute(change["argv"], change.get("limit_s"))
        after = {"kind": "probed", "text": host_changes.probed(change["probe"])}
        if change["after"] is not None and change["argv"] and after["text"] != change["after"]:
            raise VerbFailed(
                "{} did not bring what it should".format(" ".join(change["argv"])),
                "expected {!r}, saw {!r}".format(change["after"], after["text"]),
            )
    line = {"kind": "done", "txn": txn, "seq": entry["seq"], "after": after}
    place.journal.append(line)
    return {"kind": "made", "txn": txn, "seq": entry["seq"], "what": name_of(change)}


def _taken_back(error: Exception, txn: str, place: _Place) -> VerbFailed:
    """Take back what was made of a transaction; the error for the user says how it stands."""
    begun = [each for each in place.journal.transactions() if each.txn == txn]
    left = _revert(begun[0], place.journal, place.root) if begun else []
    if not left:
        revert_timer.forget(txn)
    record = error.record if isinstance(error, VerbFailed) else {"what": _system_words(error), "seen": "", "fix": ""}
    what = "nothing was changed" if not left else "taken back, but for {}".format(", ".join(left))
    return VerbFailed(record["what"], "; ".join(filter(None, [record["seen"], what])), record["fix"])


def _system_words(error: Exception) -> str:
    name = getattr(error, "filename2", None) or getattr(error, "filename", None)
    text = getattr(error, "strerror", None) or str(error)
    return "{}: {}".format(name, text) if name else str(text)


def _transaction(journal: Journal, txn: str) -> Transaction:
    for found in journal.transactions():
        if found.txn == txn:
            return found
    raise VerbFailed("no change is called {!r}".format(txn), "the journal is {}".format(journal.path))


# After a crash, and when a timer was not told to keep what was made.


def recover(journal: Journal, root: Path) -> List[str]:
    """Take back what a crash left half-done, and timed changes that nobody confirmed in time; their steps.

    journal: locked by the caller, so that nobody else is at it.
    """
    found = []
    for transaction in reversed(journal.transactions()):
        is_lost = transaction.timer == "waiting" and not revert_timer.is_alive(journal.folder, transaction.txn)
        is_half_done = transaction.is_open and (transaction.is_undoing or not transaction.is_complete)
        if is_half_done or is_lost:
            _revert(transaction, journal, root, force=transaction.timer == "waiting")
            if transaction.timer == "waiting":
                journal.append({"kind": "expired", "txn": transaction.txn, "when": now()})
            revert_timer.forget(transaction.txn)
            found.append(transaction.step)
    return found


def expire(journal: Journal, root: Path, txn: str) -> None:
    """The timer's work at the end of its time: take the transaction back unless it was confirmed."""
    with journal.locked(wait_s=3600.0):
        transaction = _transaction(journal, txn)
        if transaction.timer == "waiting":
            _revert(transaction, journal, root, force=True)
            journal.append({"kind": "expired", "txn": txn, "when": now()})
        revert_timer.forget(txn)


def _revert(transaction: Transaction, journal: Journal, root: Path, *, force: bool = False) -> List[str]:
    """Take back every change of a transaction that stands or may stand; the names of those that could not be.

    force: where somebody else changed a file since, their text is kept beside the journal: a host that nobody can log
    in to is worse.
    """
    # first: a file that waits keeps its new folder from being removed
    for waiting in host_changes.temporaries(
        [each["change"] for each in transaction.entries.values()], root, transaction.txn
    ):
        if waiting.exists():
            waiting.unlink()
    left = []
    for entry in sorted(transaction.entries.values(), key=lambda each: -each["seq"]):
        if entry["state"] not in {"intent", "done"}:
            continue
        change = entry["change"]
        try:
            current = state_of(change, root)
            target = _target(entry, current, keep=_kept(journal, transaction, entry) if force else None)
            host_changes.undo(change, target, root=root, mark=transaction.txn, folders=entry["folders"])
        except (OSError, VerbFailed):
            left.append(name_of(change))
            continue
        except Conflict:
            left.append(name_of(change))
            if entry["state"] == "done":
                continue
        with contextlib.suppress(OSError):  # a disk that is full: the next call finds that it is taken back
            journal.append({"kind": "void", "txn": transaction.txn, "seq": entry["seq"]})
    return left


def _kept(journal: Journal, transaction: Transaction, entry: Record) -> Path:
    return journal.folder / "kept-{}-{}".format(transaction.txn, entry["seq"])


def _target(entry: Record, current: Record, *, keep: Any) -> Record:
    change, after = entry["change"], entry["after"]
    try:
        if change["kind"] == "command" and entry["state"] == "intent":
            after = current  # whatever it did before it was interrupted
        return state_to_undo(change, entry["before"], after, current)
    except Conflict:
        if keep is None:
            raise
        if current["kind"] == "file":
            Staged(keep, {**current, "mode": 0o600}, mark="kept").place()
        before: Record = entry["before"]
        return before


# Confirm, undo, list.


def confirm(request: Record, place: _Place) -> Iterable[Record]:
    """Keep what a timer would take back."""
    with place.journal.locked():
        transaction = _transaction(place.journal, request["txn"])
        if transaction.timer == "expired":
            raise VerbFailed(
                "the change was taken back",
                "nobody confirmed within {:.0f} s that a new login works".format(transaction.begin["revert_s"]),
                "nothing is changed; look at why the login failed, then try again",
            )
        if transaction.timer == "waiting":
            place.journal.append({"kind": "confirmed", "txn": transaction.txn, "when": now()})
            revert_timer.release(place.journal.folder, transaction.txn)
    yield {"kind": "confirmed", "txn": request["txn"]}


def undo(request: Record, place: _Place) -> Iterable[Record]:
    """Take changes back, the last one first; a transaction of which somebody changed a thing since is refused."""
    if not place.journal.path.exists():  # and no journal is made for it
        yield {"kind": "token", "token": _token([])}
        return
    with place.journal.locked():
        recover(place.journal, place.root)
        rows, refused = _undo_rows(_chosen(request, place.journal), place.root)
        token = _token(rows)
        if request["dry"]:
            yield from ({"kind": "would undo", **row["shown"]} for row in rows)
            yield from refused
            yield {"kind": "token", "token": token}
            return
        if request["expect"] != token:
            raise VerbFailed("something is not as it was shown", "somebody changed it since", "look again")
        for txn in dict.fromkeys(row["shown"]["txn"] for row in rows):
            place.journal.append({"kind": "undoing", "txn": txn})
        for row in rows:
            host_changes.undo(
                row["entry"]["change"],
                row["target"],
                root=place.root,
                mark=row["shown"]["txn"],
                folders=row["entry"]["folders"],
            )
            line = {"kind": "undone", "txn": row["shown"]["txn"], "seq": row["entry"]["seq"], "when": now()}
            place.journal.append(line)
            yield {"kind": "undone", **row["shown"]}
        yield from refused


def _token(rows: List[Record]) -> str:
    """Stands for what was shown."""
    return hashlib.sha256(json.dumps([row["shown"] for row in rows]).encode()).hexdigest()


def _chosen(request: Record, journal: Journal) -> List[Transaction]:
    found = [each for each in reversed(journal.transactions()) if each.made()]
    return [each for each in found if request["steps"] is None or each.step in request["steps"]]


def _undo_rows(transactions: List[Transaction], root: Path) -> Tuple[List[Record], List[Record]]:
    """What undoing means, in order, and the refusals. A later row sees the things as the earlier ones leave them."""
    rows, refused = [], []
    states: Dict[str, Record] = {}
    for transaction in transactions:
        mine, theirs = dict(states), []
        for entry in transaction.made():
            change = entry["change"]
            key = name_of(change) if change["kind"] == "file" else json.dumps(change["probe"] or change)
            current = mine[key] if key in mine else state_of(change, root)
            try:
                mine[key] = state_to_undo(change, entry["before"], entry["after"], current)
            except Conflict as conflict:
                theirs.append({"kind": "refused", "step": transaction.step, "txn": transaction.txn, **conflict.record})
                continue
            shown = {"txn": transaction.txn, "step": transaction.step, "change": change}
            rows_of = {"current": current, "target": mine[key]}
            rows.append({"entry": entry, "target": mine[key], "shown": {**shown, **rows_of}})
        if theirs:
            rows = [row for row in rows if row["shown"]["txn"] != transaction.txn]
            refused += theirs
        else:
            states = mine
    return rows, refused


def status(request: Record, place: _Place) -> Iterable[Record]:
    """Every change that stands, and whether it still is what was made."""
    del request
    if not place.journal.path.exists():
        return
    with place.journal.locked():
        recover(place.journal, place.root)
        for transaction in place.journal.transactions():
            for entry in reversed(transaction.made()):
                try:
                    current = state_of(entry["change"], place.root)
                    is_same = current == entry["after"] or not (entry["change"].get("probe", True))
                except (OSError, VerbFailed):
                    is_same = False
                begin = {name: transaction.begin[name] for name in ("txn", "step", "who", "by", "when")}
                yield {"kind": "change", **begin, "what": name_of(entry["change"]), "as_made": is_same}


def restart(request: Record, place: _Place) -> Iterable[Record]:
    """Restart the host by its own means: what runs is told to end. Raises VerbFailed while a change is on trial."""
    del request
    if any(each.timer == "waiting" for each in place.journal.transactions()):
        raise VerbFailed("it is not restarted", "a change waits for its new login", "wait a minute, then try again")
    has_systemd = (place.root / "run/systemd/system").is_dir()
    host_changes.execute(["systemctl", "--no-block", "reboot"] if has_systemd else ["shutdown", "-r", "now"])
    yield {"kind": "restarting"}


_DO: Dict[str, Callable[[Record, _Place], Iterable[Record]]] = {
    "apply": apply,
    "confirm": confirm,
    "restart": restart,
    "status": status,
    "undo": undo,
}
