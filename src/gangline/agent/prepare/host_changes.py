"""Changes of this host as data: looked at, made, and taken back.

A change is one of

    {"kind": "file", "path", "content": base64 or null (no file), "before": digest or null, "mode", "folder_mode"}
    {"kind": "command", "argv", "undo", "probe", "before", "after", "limit_s": seconds or null}

`before` is what the user was shown: a change of something that is different by now is refused. A file keeps mode, owner
and extended attributes, and is replaced in one step. A command comes with its reverse, and with a probe: a command that
only reads, whose output is the state of the thing. An empty `argv` or `undo` does nothing on the way there, or back.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from gangline.agent.bounded import run
from gangline.agent.host_files import sync
from gangline.agent.prepare import three_way
from gangline.agent.verbs import VerbFailed

Record = Dict[str, Any]
ABSENT: Record = {"kind": "absent"}
LIMIT_BYTES = 1 << 22
COMMAND_S = 120.0
PROBE_CHARACTERS = 4096
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
"""Programs of administrators, which a login without terminal does not always look in."""
FILE_MODE, FOLDER_MODE = 0o644, 0o755


# The state of a thing.


def real_path(root: Path, path: str) -> Path:
    """Where a path of a change lies: below `root`, links followed, so that a file that is a link stays one."""
    inside = Path(path)
    if not inside.is_absolute() or ".." in inside.parts:
        raise VerbFailed("a change names {!r}".format(path), "expected an absolute path without ..")
    return Path(os.path.realpath(str(root / inside.relative_to("/"))))


def file_state(path: Path) -> Record:
    """Content, mode, owner and extended attributes of a file, or ABSENT. Raises OSError, VerbFailed for no file."""
    try:
        descriptor = os.open(str(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return dict(ABSENT)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise VerbFailed("{} is no file".format(path), "expected a file or nothing there", "look at it: ls -l")
        if found.st_size > LIMIT_BYTES:
            raise VerbFailed("{} is too large".format(path), "expected at most 4 MiB")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            content = stream.read()
        return {
            "kind": "file",
            "content": encoded(content),
            "mode": stat.S_IMODE(found.st_mode),
            "uid": found.st_uid,
            "gid": found.st_gid,
            "xattrs": _xattrs(descriptor),
        }
    finally:
        os.close(descriptor)


def _xattrs(descriptor: int) -> Dict[str, str]:
    try:
        return {name: encoded(os.getxattr(descriptor, name)) for name in os.listxattr(descriptor)}
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EPERM):  # a file system without them
            return {}
        raise


def encoded(data: bytes) -> str:
    """Bytes as JSON takes them."""
    return base64.b64encode(data).decode("ascii")


def content_of(state: Record) -> Optional[bytes]:
    """The content of a file; None where there is none."""
    return base64.b64decode(state["content"]) if state["kind"] == "file" else None


def digest(content: Optional[bytes]) -> Optional[str]:
    """What stands for a content that the user was shown; None for no file."""
    return None if content is None else hashlib.sha256(content).hexdigest()


def probed(argv: List[str]) -> str:
    """The state that a probe prints; without a probe nothing. Its exit code does not count: `is-enabled` uses it."""
    if not argv:
        return ""
    try:
        return run(argv, timeout_s=COMMAND_S, env=_environment()).stdout.strip()[:PROBE_CHARACTERS]
    except OSError:  # TimeoutError is one, too
        return ""


def _environment() -> Dict[str, str]:
    return {"PATH": "{}:{}".format(os.environ.get("PATH", "/usr/bin:/bin"), SYSTEM_FOLDERS)}


def execute(argv: List[str], limit_s: Optional[float] = None) -> None:
    """Run a command of a change to its end; raises VerbFailed with the last line that it said.

    limit_s: for one that takes longer than COMMAND_S, such as the installation of a driver.
    """
    if not argv:
        return
    try:
        output = run(argv, timeout_s=limit_s or COMMAND_S, env=_environment())
    except OSError as error:
        raise VerbFailed("{} cannot be run".format(argv[0]), str(error)) from None
    if output.returncode:
        said = (output.stderr.strip() or output.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise VerbFailed("{} failed".format(" ".join(argv)), "exit code {}: {}".format(output.returncode, said[:500]))


def name_of(change: Record) -> str:
    """The change for people."""
    return str(change["path"]) if change["kind"] == "file" else " ".join(change["argv"] or change["undo"])


def state_of(change: Record, root: Path) -> Record:
    """The state of the thing that a change is about."""
    if change["kind"] == "file":
        return file_state(real_path(root, change["path"]))
    return {"kind": "probed", "text": probed(change["probe"])}


def is_as_shown(change: Record, state: Record) -> bool:
    """Whether a thing is as it was when the user was shown the change."""
    if change["kind"] == "file":
        return bool(digest(content_of(state)) == change["before"])
    return not change["probe"] or bool(state["text"] == change["before"])


# Make a change.


def wanted_state(change: Record, before: Record) -> Record:
    """The state of a file after a change."""
    if change["content"] is None:
        return dict(ABSENT)
    kept = before if before["kind"] == "file" else {"mode": FILE_MODE, "uid": os.geteuid(), "gid": os.getegid()}
    mode = kept["mode"] if change.get("mode") is None else change["mode"]
    owner: Record = {"uid": kept["uid"], "gid": kept["gid"], "xattrs": kept.get("xattrs", {})}
    return {"kind": "file", "content": change["content"], "mode": mode, **owner}


class Staged:
    """A file that is written beside its target, whole and on the disk, and waits to take its place."""

    def __init__(self, path: Path, state: Record, *, mark: str, folder_mode: int = FOLDER_MODE) -> None:
        """mark: tells the temporary files of one change from others. Raises OSError; then nothing of it is left."""
        self.path = path
        self._state = state
        self.temporary = temporary_of(path, mark)
        self.folders: List[str] = []
        try:
            self._make_folders(folder_mode)
            if state["kind"] == "file":
                self._write()
        except BaseException:
            self.discard()
            raise

    def _make_folders(self, mode: int) -> None:
        if self._state["kind"] != "file":
            return
        missing = [folder for folder in [self.path.parent, *self.path.parent.parents] if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir()
            self.folders.append(str(folder))
            folder.chmod(mode)  # whatever the umask is

    def _write(self) -> None:
        state = self._state
        with contextlib.suppress(FileNotFoundError):  # of a change that a crash interrupted
            self.temporary.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(str(self.temporary), flags, 0o600), "wb") as stream:
            stream.write(base64.b64decode(state["content"]))
            stream.flush()
            descriptor = stream.fileno()
            if os.geteuid() == 0:
                os.fchown(descriptor, state["uid"], state["gid"])
            os.fchmod(descriptor, state["mode"])
            _set_xattrs(descriptor, state["xattrs"])
            os.fsync(descriptor)

    def place(self) -> None:
        """Let the file be what was staged; raises OSError."""
        if self._state["kind"] == "file":
            self.temporary.replace(self.path)
        else:
            self.path.unlink()
        sync(self.path.parent)

    def discard(self) -> None:
        """Remove what waits, and the folders that were made for it."""
        with contextlib.suppress(OSError):
            self.temporary.unlink()
        remove_folders(self.folders)


def temporary_of(path: Path, mark: str) -> Path:
    """Where the new content of a file waits."""
    return path.with_name(".{}.gangline-{}".format(path.name, mark))


def remove_folders(folders: List[str]) -> None:
    """Remove folders that a change made, the inner ones first, as far as they are empty."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def _set_xattrs(descriptor: int, wanted: Dict[str, str]) -> None:
    """Those that the new file has already (a label of its folder) are left; raises OSError for one that cannot be."""
    have = _xattrs(descriptor)
    for name, value in wanted.items():
        if have.get(name) != value:
            os.setxattr(descriptor, name, base64.b64decode(value))


# Take a change back.


class Conflict(Exception):
    """Somebody has changed the thing since: `theirs` and `ours` are texts for people."""

    def __init__(self, change: Record, *, ours: str, theirs: str) -> None:
        super().__init__(name_of(change))
        self.record = {"what": name_of(change), "ours": ours, "theirs": theirs}


def state_to_undo(change: Record, before: Record, after: Record, current: Record) -> Record:
    """The state that takes a change back and keeps what others changed since. Raises Conflict."""
    if change["kind"] == "command":
        if change["probe"] and current["text"] not in (after["text"], before["text"]):
            raise Conflict(change, ours=after["text"], theirs=current["text"])
        return before
    if current == after:
        return before
    content = _content_to_undo(change, content_of(before), content_of(after), content_of(current))
    if content is None:
        return dict(ABSENT)
    known = current if current["kind"] == "file" else before
    result = {"kind": "file", "content": encoded(content)}
    for name in ("mode", "uid", "gid", "xattrs"):
        ours = before["kind"] == after["kind"] == "file" and known.get(name) == after.get(name)
        result[name] = before[name] if ours else known[name]
    return result


def _content_to_undo(
    change: Record, before: Optional[bytes], after: Optional[bytes], current: Optional[bytes]
) -> Optional[bytes]:
    if current in (after, before):
        return before
    if current is None or after is None:
        raise Conflict(change, ours=_text(after), theirs=_text(current))
    merged = three_way.merge(after, before or b"", current)
    if merged is None:
        raise Conflict(change, ours=_text(after), theirs=_text(current))
    return merged if merged or before is not None else None


def _text(content: Optional[bytes]) -> str:
    return "no file" if content is None else content.decode("utf-8", "replace")


def undo(change: Record, target: Record, *, root: Path, mark: str, folders: List[str]) -> None:
    """Bring the thing to `target`; raises OSError and VerbFailed."""
    if change["kind"] == "command":
        if not change["probe"] or probed(change["probe"]) != target["text"]:
            execute(change["undo"], change.get("limit_s"))
        return
    path = real_path(root, change["path"])
    if file_state(path) != target:
        staged = Staged(path, target, mark=mark)
        try:
            staged.place()
        except BaseException:
            staged.discard()
            raise
    if target["kind"] == "absent":
        remove_folders(folders)


def temporaries(changes: List[Record], root: Path, mark: str) -> Iterator[Path]:
    """Where files of these changes would wait: what a crash may have left."""
    for change in changes:
        if change["kind"] == "file":
            yield temporary_of(real_path(root, change["path"]), mark)
