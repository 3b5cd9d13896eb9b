"""Which files of a folder are brought to the hosts, and which stay behind, and why."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from gangline.errors import UsageError
from gangline.sync.private import HEAD_BYTES, VENV_FILES, is_no_source, is_private_key, is_secret
from gangline.sync.tell import shown
from gangline.units import format_bytes

GIT_TIMEOUT_S = 120.0
LIMIT_BYTES = 512 << 20
LIMIT_FILES = 20_000
PATH_BYTES = 2048
"""Longer ones do not fit below a work folder everywhere."""


@dataclass(slots=True, kw_only=True)
class Selection:
    """Files and links of a folder that are brought, and what is not."""

    folder: Path
    files: dict[str, Path] = field(default_factory=dict)
    """Name -> where it lies here; regular files only."""
    links: dict[str, str] = field(default_factory=dict)
    """Name -> what the link says; it stays inside the folder."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Name -> why it stays behind; caches and version control are not listed."""
    sizes: dict[str, int] = field(default_factory=dict)
    note: str = ""
    """What else the user should know of it."""

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(self.sizes.values())

    def lines(self, name: str) -> list[str]:
        """What will be copied, for people."""
        count = len(self.files) + len(self.links)
        first = f"{name}: {count} {'file' if count == 1 else 'files'}, {format_bytes(self.num_bytes)}"
        some = list(self.left_out.items())[:10]
        more = len(self.left_out) - len(some)
        left = [f"  stays here: {shown(path)} ({why})" for path, why in some]
        more_left = [f"  and {more} more stay here"] if more else []
        return [first, *([f"  {self.note}"] if self.note else []), *left, *more_left]


def select(folder: Path, *, limit_bytes: int = LIMIT_BYTES) -> Selection:
    """The files of a folder: what git knows or would add where it is a git tree, else all.

    Secrets, version control, caches and environments stay behind in any case; so do links that leave the folder, and
    what is neither file nor link. Raises UsageError for more than `limit_bytes`, naming the largest.
    """
    root = folder.resolve()
    if not root.is_dir():
        raise UsageError(
            f"{shown(str(folder))} is no folder", seen="expected a folder to bring to the hosts", fix="name one"
        )
    found = Selection(folder=root)
    known = git_names(root)
    if known is None and (root / ".git").exists():
        found.note = "git does not answer for this folder, so .gitignore does not count"
    names = _walk(root, found) if known is None else _without_environments(list(_expanded(root, known)))
    for name in names:
        _consider(name, found)
        if len(found.files) > 4 * LIMIT_FILES:
            break  # somebody's home folder: no need to read all of it
    _refuse_too_much(found, limit_bytes)
    return found


def git_names(root: Path) -> list[str] | None:
    """What git knows in a folder or would add; None where it is no git tree, or there is no git."""
    if _git(root, "rev-parse", "--is-inside-work-tree") != b"true\n":
        return None
    listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    if listing is None:  # before git 2.31
        listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return None if listing is None else sorted({os.fsdecode(name) for name in listing.split(b"\0") if name})


def git_state(root: Path) -> tuple[str | None, list[str]]:
    """The commit, and what differs from it or is new; (None, []) where it is no git tree."""
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    prefix = _git(root, "rev-parse", "--show-prefix")
    status = _git(root, "status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames", "--", ".")
    if status is None or prefix is None:
        return None, []
    above = os.fsdecode(prefix.removesuffix(b"\n"))
    dirty = [os.fsdecode(entry[3:]).removeprefix(above) for entry in status.split(b"\0") if len(entry) > 3]
    return (commit.decode("ascii").strip() if commit else None), sorted(dirty)


def _git(root: Path, *words: str) -> bytes | None:
    """The answer of git; None where it has none. Nothing that the folder's own settings name is run."""
    argv = ["git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", "-C", str(root), *words]
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=GIT_TIMEOUT_S, env=env
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _expanded(root: Path, names: Iterable[str]) -> Iterator[str]:
    """A submodule, or a clone within, is one name for git: its own files take its place."""
    for name in names:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            inner = git_names(path) if (path / ".git").exists() else None
            yield from (f"{name.rstrip('/')}/{below}" for below in _expanded(path, inner or []))
        else:
            yield name


def _without_environments(names: Sequence[str]) -> list[str]:
    """The names that do not lie in an environment that git was not told to ignore."""
    paths = [PurePosixPath(name) for name in names]
    roots = {path.parents[1] for path in paths if path.parent.name in VENV_FILES}
    roots |= {path.parent for path in paths if path.name in VENV_FILES}
    roots.discard(PurePosixPath())
    return [name for name, path in zip(names, paths, strict=True) if not roots.intersection(path.parents)]


def _walk(root: Path, found: Selection, base: str = "") -> Iterator[str]:
    """All that is no folder, without what is passed over anyway; no link is followed."""
    try:
        entries = sorted(os.scandir(root / base), key=lambda entry: entry.name)
    except OSError as error:
        found.left_out[base or "."] = error.strerror or "cannot be read"
        return
    if any(entry.name in VENV_FILES for entry in entries) and base:
        return
    for entry in entries:
        name = f"{base}/{entry.name}" if base else entry.name
        if not entry.is_dir(follow_symlinks=False):
            yield name
        elif is_secret(entry.name):
            found.left_out[name] = "may hold secrets"
        elif not is_no_source(entry.name) and len(os.fsencode(name)) <= PATH_BYTES:
            yield from _walk(root, found, name)


def _consider(name: str, found: Selection) -> None:
    """Take one name, or leave it out with the reason."""
    parts = PurePosixPath(name).parts
    if PurePosixPath(name).is_absolute() or ".." in parts or len(os.fsencode(name)) > PATH_BYTES:
        found.left_out[name] = "its name leads out of the folder, or is too long"
    elif any(map(is_secret, parts)):
        found.left_out[name] = "may hold secrets"
    elif not any(map(is_no_source, parts)):
        _take(name, found)


def _take(name: str, found: Selection) -> None:
    path = found.folder / name
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            _take_link(name, path, found)
        elif not stat.S_ISREG(status.st_mode):
            found.left_out[name] = "neither a file nor a link"
        elif _is_outside(found.folder, path.parent):
            found.left_out[name] = "it lies behind a link that leaves the folder"
        elif is_private_key(_beginning(path)):
            found.left_out[name] = "a private key"
        else:
            found.files[name] = path
            found.sizes[name] = status.st_size
    except FileNotFoundError:
        pass  # git knows it, and it was deleted
    except OSError as error:
        found.left_out[name] = error.strerror or "cannot be read"


def _take_link(name: str, path: Path, found: Selection) -> None:
    leads_to = os.readlink(path)  # noqa: PTH115  (Path.readlink makes a Path of it: other text, another hash)
    if PurePosixPath(leads_to).is_absolute() or _is_outside(found.folder, path):
        found.left_out[name] = "a link that leaves the folder"
    elif any(map(is_secret, path.resolve().relative_to(found.folder).parts)):
        found.left_out[name] = "a link to what may hold secrets"
    else:
        found.links[name] = leads_to


def _is_outside(folder: Path, path: Path) -> bool:
    try:
        end = path.resolve()
    except (OSError, RuntimeError):  # it leads in a circle
        return True
    return folder != end and folder not in end.parents


def _beginning(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read(HEAD_BYTES)


def _refuse_too_much(found: Selection, limit_bytes: int) -> None:
    if found.num_bytes <= limit_bytes and len(found.files) <= LIMIT_FILES:
        return
    largest = sorted(found.sizes, key=lambda name: -found.sizes[name])[:8]
    listing = "\n".join(f"    {format_bytes(found.sizes[name]):>10}  {shown(name)}" for name in largest)
    raise UsageError(
        f"{found.folder}: {len(found.files)} files, {format_bytes(found.num_bytes)} are too much to bring as source",
        seen=f"at most {LIMIT_FILES} files and {format_bytes(limit_bytes)}; the largest:\n{listing}",
        fix="list data and results in .gitignore (in a git tree), or start from a folder that holds source only",
    )
