"""Source on the hosts: gangline's own with the plug-ins of a job, and the user's folder for `gangline run -- CMD`.

Many small files travel as one tar file that is the same for the same content. gangline's own code is looked through by
hash at every start, so that the same code runs everywhere and nothing has to be installed there; the entry points in
the metadata of plug-ins, which lie beside it, make them rows of the same tables there. A user's folder lies in
`projects/NAME-HASH` and stays as it is; every run works in a copy of its own. Files that may hold secrets, and what is
no source at all, never leave the user's computer by themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import io
import os
import re
import stat
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO

import gangline
from gangline.errors import CheckFailed, GanglineError, RunFailed, UsageError
from gangline.plugins import package_files
from gangline.provision.ask import ask_agent
from gangline.provision.console import SILENT, Console, shown
from gangline.provision.trees import (
    How,
    Mark,
    Spot,
    Tree,
    differing,
    host_layout,
    is_shared,
    look_everywhere,
    name_from,
    place,
    spot_on,
    tree_of,
)
from gangline.runs.cluster import Cluster, Host
from gangline.runs.manifest import digest_of
from gangline.runs.record_versions import Record
from gangline.runs.training_environment import runs_gangline, training_python
from gangline.transport.fanout import in_parallel, once
from gangline.transport.local import LocalTransport
from gangline.transport.transport import Transport
from gangline.units import format_bytes

SECRET_NAMES = (
    ".env*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk", "*.kdbx", "*.gpg",
    ".ssh", ".netrc", "_netrc", ".aws", ".azure", ".gcloud", ".kube", ".docker", ".dockercfg", ".gnupg", ".pypirc",
    ".npmrc", ".pgpass", ".htpasswd", ".git-credentials", "credentials*", "client_secret*", "service_account*.json",
    ".huggingface", ".kaggle", ".bash_history", ".zsh_history", ".python_history",
)  # fmt: skip
"""Names of files and folders, whatever their case."""
SECRETS_OR_SOURCE = ("secret.*", "secrets.*")
"""Files of secrets; a file of source may be called so, too."""
KEYS_OR_DATA = "id_*"
"""Private keys of ssh; a file of source or data may be called so, too, and then its content tells."""
SOURCE_NAME = re.compile(r".*\.(py|pyi|pyx|c|cc|cpp|cu|cuh|h|hpp|rs|go|js|ts|md|rst|ipynb)", re.DOTALL)
DATA_NAME = re.compile(r".*\.(json|jsonl|txt|csv|tsv|yaml|yml|toml|parquet|npy)", re.DOTALL)
NOT_SOURCE_NAMES = (
    ".git", ".hg", ".svn", ".bzr", "__pycache__", "*.pyc", "*.pyo", ".mypy_cache", ".pytest_cache", ".ruff_cache",
    ".cache", ".tox", ".nox", ".eggs", ".ipynb_checkpoints", "node_modules", ".venv", "venv", ".DS_Store", ".idea",
    ".vscode", "*.swp",
)  # fmt: skip
"""Version control, caches, environments, and what editors leave."""
VENV_FILES = ("pyvenv.cfg", "conda-meta")
"""A folder that holds one of these is an environment, whatever it is called."""
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY( BLOCK)?-----|PuTTY-User-Key-File")
HEAD_BYTES = 4096
"""A private key says what it is at its beginning, whatever it is called."""


def is_secret(name: str) -> bool:
    """Whether a file or folder of this name may hold secrets."""
    low = name.lower()
    if fnmatch.fnmatchcase(low, KEYS_OR_DATA):
        return not (SOURCE_NAME.fullmatch(low) or DATA_NAME.fullmatch(low))
    if any(fnmatch.fnmatchcase(low, pattern) for pattern in SECRETS_OR_SOURCE):
        return SOURCE_NAME.fullmatch(low) is None
    return any(fnmatch.fnmatchcase(low, pattern) for pattern in SECRET_NAMES)


def is_no_source(name: str) -> bool:
    """Whether a file or folder of this name is version control, a cache or an environment."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in NOT_SOURCE_NAMES)


def is_private_key(beginning: bytes) -> bool:
    """Whether a file that begins so is a private key."""
    return PRIVATE_KEY.search(beginning[:HEAD_BYTES]) is not None


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
        left = [f"  stays on this computer: {shown(path)} ({why})" for path, why in some]
        more_left = [f"  and {more} more stay on this computer"] if more else []
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


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file to read, whose name is no link; opening a pipe does not wait for somebody to write."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
        yield stream


def _beginning(path: Path) -> bytes:
    with _opened(path) as stream:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A tar file on this computer, and what it holds."""

    path: Path
    tree: Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The content of one file."""

    data: bytes
    is_program: bool

    @property
    def mark(self) -> Mark:
        """As the agent says it where programs count as programs."""
        return len(self.data), digest_of(self.data) + (":x" if self.is_program else "")


def write_archive(path: Path, files: Mapping[str, Path | Plain], links: Mapping[str, str] | None = None) -> Archive:
    """Pack files (name -> where it lies here, or what it holds) and links (name -> what it says).

    Every file is read once, for the tar file and for its hash, so that both are about the same bytes. No time, owner
    or mode goes in but whether a file is a program. Raises UsageError for a file that cannot be read.
    """
    leads_to = dict(links or {})
    marks: dict[str, Mark] = {}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted([*files, *leads_to]):
            entry = tarfile.TarInfo(name)
            if name in leads_to:
                entry.type, entry.linkname = tarfile.SYMTYPE, leads_to[name]
                tar.addfile(entry)
                marks[name] = (0, f"link:{leads_to[name]}")
                continue
            file = files[name]
            plain = file if isinstance(file, Plain) else read_plain(file)
            entry.size, entry.mode = len(plain.data), 0o700 if plain.is_program else 0o600
            tar.addfile(entry, io.BytesIO(plain.data))
            marks[name] = plain.mark
    return Archive(path=path, tree=tree_of(marks))


def read_plain(path: Path) -> Plain:
    """A file that is no link, pipe or device; raises UsageError for anything else."""
    try:
        with _opened(path) as stream:
            mode = os.fstat(stream.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(22, "it is no file")
            return Plain(data=stream.read(), is_program=bool(mode & 0o100))
    except OSError as error:
        raise UsageError(
            f"{shown(str(path))} cannot be read", seen=error.strerror or str(error), fix="correct that, or take it away"
        ) from error


def place_archive(archive: Archive, targets: Sequence[Spot], *, kind: type[GanglineError] = RunFailed) -> None:
    """Have it unpacked at every target, all at the same time; raises `kind` where it does not come out whole."""
    in_parallel(lambda target: _place(archive, target, kind), targets, at_once=16)


def _place(archive: Archive, target: Spot, kind: type[GanglineError]) -> None:
    incoming = PurePath(target.host.workdir) / "incoming" / f"{archive.tree.hash}-{uuid.uuid4().hex}.tar"
    target.transport.push(archive.path, incoming)
    wrong = place(target, archive.tree, exact=True, archive=str(incoming))
    if wrong is None:
        return
    names = ", ".join(map(shown, wrong[:5]))
    raise kind(
        f"{target.host.name}: {target.path} did not come out whole",
        seen=f"different by hash: {names}",
        fix="look at the disk of that host: free space, errors",
    )


def scratch_folder(home: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A private folder for something on its way, in `home` if there is one."""
    if home is not None:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=".on-its-way-", dir=home)


@dataclass(frozen=True, slots=True, kw_only=True)
class Project(Record):
    """What was brought: enough to know it again."""

    name: str
    tree: str
    """One hash over all names and content."""
    num_files: int
    num_bytes: int
    commit: str | None = None
    """None: no git tree, or nothing committed yet."""
    dirty: tuple[str, ...] = ()
    """What differs from the commit, or is new."""
    diff: str | None = None
    """One hash over the content of what is dirty; None: nothing is."""
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    """What stayed behind, and why."""
    marks: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name -> mark of its content, by which a changed file is known."""

    def folder(self, host: Host) -> PurePath:
        """Where it lies on a host."""
        return PurePath(host.workdir) / "projects" / f"{self.name}-{self.tree[:16]}"


def place_project(
    folder: Path,
    cluster: Cluster,
    transports: Mapping[str, Transport],
    *,
    console: Console = SILENT,
    limit_bytes: int = LIMIT_BYTES,
) -> Project:
    """Bring a folder to every host that lacks it, and verify it there; says what is copied and what stays behind.

    Raises UsageError for a folder that is too large, CheckFailed where a host has it with other content.
    """
    with packed_project(folder, limit_bytes) as (project, archive, chosen):
        _say(project, chosen, console)
        absent = _verified(project, _spots(project, cluster, transports))
        lacking = [spot for spot in absent if spot.path.name not in spot.transport.names(spot.path.parent)]
        if lacking:
            console.progress(f"bringing {project.name} to {' '.join(spot.host.name for spot in lacking)}")
            place_archive(archive, lacking)
        if absent:
            bare = dataclasses.replace(cluster, hosts=tuple(spot.host for spot in absent))
            verify_project(project, bare, transports)
    return project


def preview_project(folder: Path, *, console: Console = SILENT, limit_bytes: int = LIMIT_BYTES) -> Project:
    """What `place_project` would bring; says the same and changes nothing."""
    with packed_project(folder, limit_bytes) as (project, _archive, chosen):
        _say(project, chosen, console)
    return project


def verify_project(project: Project, cluster: Cluster, transports: Mapping[str, Transport]) -> None:
    """Raise CheckFailed unless every host has the project byte for byte, naming host and file.

    What a program wrote beside the source since then does not count.
    """
    if absent := _verified(project, _spots(project, cluster, transports)):
        raise _other(absent[0], project, sorted(project.marks))


def _verified(project: Project, spots: Sequence[Spot]) -> list[Spot]:
    """Where it is not at all; raises CheckFailed where it is other than it was brought."""
    expected = {name: (0, mark) for name, mark in project.marks.items()}
    trees = look_everywhere(spots, How(exact=True, names=tuple(project.marks)))
    for spot, tree in zip(spots, trees, strict=True):
        if tree.kind is not None and (wrong := differing(expected, tree.files)):
            raise _other(spot, project, wrong)
    return [spot for spot, tree in zip(spots, trees, strict=True) if tree.kind is None]


def _other(spot: Spot, project: Project, wrong: Sequence[str]) -> CheckFailed:
    return CheckFailed(
        f"{spot.host.name}: {', '.join(map(shown, wrong[:5]))} is not what was brought there",
        seen=f"{len(wrong)} of {len(project.marks)} files of {spot.path} differ by hash or are missing",
        fix=f"see what changed them, and on that host: rm -r {spot.path}; it is brought again",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """What was done to the working folder of a run that was there already."""

    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    """No more of the project."""
    kept: tuple[str, ...] = ()
    """No more of the project, but rewritten by the run's program."""

    def lines(self, attempt: int) -> list[str]:
        """What is other than in that attempt, for people."""
        kept = "gone on this computer, and kept as the run left it"
        said = {"changed": self.changed, "gone": self.removed, kept: self.kept}
        return [
            f"project    {', '.join(map(shown, names[:5]))}{_and_more(names[5:])} {word} since attempt {attempt}"
            for word, names in said.items()
            if names
        ]


def lay_out(project: Project, run_id: str, cluster: Cluster, transports: Mapping[str, Transport]) -> Laid:
    """Fill the working folder of a run on every host from the project that was brought there.

    Where it is there already, what has changed since is laid over it, and what the run's program wrote stays.
    """
    request = {"marks": project.marks}

    def lay(host: Host) -> dict[str, Any]:
        places = {"source": str(project.folder(host)), "target": str(host_layout(host, run_id).project)}
        return ask_agent(transports[host.name], "lay", request | places)

    once = {_folder_of(host, cluster): host for host in reversed(cluster.hosts)}
    answers = [answer for answer in in_parallel(lay, list(once.values())) if not answer["fresh"]]
    changed, removed, kept = (
        tuple(sorted({name for answer in answers for name in answer[key]})) for key in ("laid", "removed", "kept")
    )
    return Laid(changed=changed, removed=removed, kept=kept)


def _folder_of(host: Host, cluster: Cluster) -> tuple[str, str]:
    """The same for hosts with one work folder in a shared one."""
    return ("" if is_shared(host.workdir, cluster.shared) else host.name, host.workdir)


def _and_more(names: tuple[str, ...]) -> str:
    return f" and {len(names)} more" if names else ""


@contextlib.contextmanager
def packed_project(folder: Path, limit_bytes: int = LIMIT_BYTES) -> Iterator[tuple[Project, Archive, Selection]]:
    """A folder as one tar file on this computer, which goes at the end; raises UsageError for one that is too large."""
    chosen = select(folder, limit_bytes=limit_bytes)
    with scratch_folder() as scratch:
        archive = write_archive(Path(scratch) / "project.tar", chosen.files, chosen.links)
        yield _described(chosen, archive), archive, chosen


def _described(chosen: Selection, archive: Archive) -> Project:
    commit, changes = git_state(chosen.folder)
    files = dict(archive.tree.files)
    dirty = [name for name in changes if name in files or not os.path.lexists(chosen.folder / name)]
    changed = {name: files.get(name, (0, "gone")) for name in dirty}
    assert archive.tree.hash is not None
    return Project(
        name=name_from(chosen.folder, otherwise="project"),
        tree=archive.tree.hash,
        num_files=len(files),
        num_bytes=archive.tree.num_bytes,
        commit=commit,
        dirty=tuple(dirty),
        diff=tree_of(changed).hash if changed else None,
        left_out=dict(chosen.left_out),
        marks={name: mark for name, (_, mark) in files.items()},
    )


def _say(project: Project, chosen: Selection, console: Console) -> None:
    changed = f" and {len(project.dirty)} changed files" if project.dirty else ""
    state = f", commit {project.commit[:12]}{changed}" if project.commit else ""
    for line in chosen.lines(f"project    {project.name}{state}"):
        console.report(line)


def _spots(project: Project, cluster: Cluster, transports: Mapping[str, Transport]) -> list[Spot]:
    return [spot_on(host, transports, project.folder(host)) for host in cluster.hosts]


SOURCE = How(exact=True, skip=("__pycache__",))
"""All but what Python adds by itself."""


def place_code(
    cluster: Cluster, transports: Mapping[str, Transport], *, packages: Collection[str] = (), console: Console = SILENT
) -> Cluster:
    """Bring the source to every host that lacks it; the cluster with `code` set there.

    What a host has is hashed there; a folder that differs in one byte is replaced. The Python that runs us has gangline
    installed, so it gets the folder only with `packages`: plug-ins, which it need not have.
    Raises PluginError for a package that cannot be brought.
    """
    key = tuple(sorted(packages))
    tree, placed = source_tree(key), preview_code(cluster, packages=packages)
    spots = [spot_on(host, transports, host.code) for host in placed.hosts if host.code is not None]
    found = look_everywhere(spots, SOURCE)
    lacking = [spot for spot, there in zip(spots, found, strict=True) if there.hash != tree.hash]
    if lacking:
        console.progress(f"bringing gangline's code to {' '.join(spot.host.name for spot in lacking)}")
        with scratch_folder() as folder:
            place_archive(write_archive(Path(folder) / "code.tar", source_files(key)), lacking)
    return placed


def preview_code(cluster: Cluster, *, packages: Collection[str] = ()) -> Cluster:
    """The cluster as `place_code` gives it back; changes nothing."""
    key = tuple(sorted(packages))
    return dataclasses.replace(cluster, hosts=tuple(_with_code(host, key) for host in cluster.hosts))


def trainer_here(home: Path) -> Host:
    """This computer with the Python that trains and our code, for a worker outside of a run; brings the code."""
    host = Host(name="this computer", workdir=str(home), python=training_python(home))
    return place_code(Cluster(name="here", hosts=(host,)), {host.name: LocalTransport(host)}).head


def _with_code(host: Host, packages: tuple[str, ...]) -> Host:
    if runs_gangline(host) and not packages:
        return host
    digest = source_tree(packages).hash
    assert digest is not None
    return dataclasses.replace(host, code=str(PurePath(host.workdir) / "code" / digest[:16]))


@once
def source_files(packages: tuple[str, ...] = ()) -> dict[str, Plain]:
    """Name in the code folder -> content, of all that is source, ours and that of plug-ins. Read once: while gangline
    is being updated, hosts get what this process began with.
    """
    package = Path(gangline.__file__).parent
    paths = [path for path in package.rglob("*.py") if "__pycache__" not in path.parts]
    paths += [package / "py.typed", *package.glob("catalog/*.json")]
    found = {f"gangline/{path.relative_to(package).as_posix()}": read_plain(path) for path in paths if path.is_file()}
    for each in packages:
        found |= {name: Plain(data=data, is_program=False) for name, data in package_files(each).items()}
    return found


@once
def source_tree(packages: tuple[str, ...] = ()) -> Tree:
    """What a code folder holds."""
    return tree_of({name: plain.mark for name, plain in source_files(packages).items()})
