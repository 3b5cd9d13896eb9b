"""Which files of a folder leave this computer: source, and never a secret, nor anything from outside the folder."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gangline.errors import UsageError
from gangline.provision.code import Selection, git_state, select

CANARY = "canary-7f3a"
KEY = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{CANARY}\n-----END OPENSSH PRIVATE KEY-----\n"


def git(folder: Path, *words: str) -> None:
    identity = [
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@t",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "commit.gpgsign=false",
    ]
    subprocess.run(["git", *identity, "-C", str(folder), *words], check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print('training')")
    return folder


def write(path: Path, text: str = CANARY) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def link(path: Path, leads_to: str | Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(leads_to)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listener(path: Path) -> None:
    descriptor = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{descriptor}/{path.name}")  # the whole path may be too long for a socket
    os.close(descriptor)


def outside(folder: Path) -> Path:
    secret = folder.parent / "home" / ".ssh" / "id_ed25519"
    write(secret, KEY)
    return secret


HOSTILE: dict[str, Callable[[Path], object]] = {
    "dotenv": lambda f: write(f / ".env"),
    "dotenv of production": lambda f: write(f / "deploy" / ".env.production"),
    "dotenv in capitals": lambda f: write(f / ".ENV"),
    "environment of a service": lambda f: write(f / "prod.env"),
    "ssh key": lambda f: write(f / "id_rsa", KEY),
    "ssh key of another kind": lambda f: write(f / "keys" / "id_ed25519_work"),
    "public half": lambda f: write(f / "id_rsa.pub"),
    "pem": lambda f: write(f / "server.pem"),
    "key of TLS": lambda f: write(f / "tls" / "server.key"),
    "folder of ssh": lambda f: write(f / ".ssh" / "config"),
    "netrc": lambda f: write(f / ".netrc"),
    "folder of aws": lambda f: write(f / "home" / ".aws" / "config"),
    "credentials": lambda f: write(f / "credentials.json"),
    "credentials in capitals": lambda f: write(f / "Credentials"),
    "secrets": lambda f: write(f / ".streamlit" / "secrets.toml"),
    "key under an innocent name": lambda f: write(f / "notes.txt", KEY),
    "key behind an innocent name": lambda f: os.link(outside(f), f / "data.bin"),
    "git's own files": lambda f: write(f / ".git" / "config", f"url = https://user:{CANARY}@example.org"),
    "token of pypi": lambda f: write(f / ".pypirc"),
    "token of npm": lambda f: write(f / "web" / ".npmrc"),
    "link to a key": lambda f: link(f / "weights.bin", outside(f)),
    "link out by words": lambda f: (outside(f), link(f / "a" / "data", "../../home/.ssh/id_ed25519")),
    "link to a folder outside": lambda f: link(f / "data", outside(f).parent),
    "link by way of a link": lambda f: (outside(f), link(f / "up", ".."), link(f / "x", "up/home/.ssh/id_ed25519")),
    "link to a secret inside": lambda f: (write(f / ".env"), link(f / "settings", ".env")),
    "link in a circle": lambda f: (link(f / "one", "two"), link(f / "two", "one")),
    "link to everything": lambda f: link(f / "root", "/"),
    "pipe": lambda f: pipe(f / "pipe"),
    "socket": lambda f: listener(f / "socket"),
    "environment": lambda f: (write(f / "myenv" / "pyvenv.cfg"), write(f / "myenv" / "lib" / "x.py")),
    "conda environment": lambda f: (write(f / "envs" / "conda-meta" / "history"), write(f / "envs" / "lib" / "x.py")),
    "cache": lambda f: write(f / "__pycache__" / "train.cpython-311.pyc"),
}


def contents(chosen: Selection) -> str:
    return "".join(path.read_text(errors="replace") for path in chosen.files.values()) + repr(chosen.links)


@pytest.mark.parametrize(
    ("name", "as_git"),
    [(name, as_git) for name in HOSTILE for as_git in (False, True) if not (as_git and name == "git's own files")],
)
def test_of_a_hostile_folder_nothing_but_its_source_is_taken(folder: Path, name: str, as_git: bool) -> None:
    HOSTILE[name](folder)
    if as_git:
        git(folder, "init")
        if name not in {"pipe", "socket"}:
            git(folder, "add", "--force", ".")
    chosen = select(folder)
    assert set(chosen.files) == {"train.py"}
    assert chosen.links == {}
    assert CANARY not in contents(chosen)


def test_what_stays_behind_is_told_with_the_reason(folder: Path) -> None:
    write(folder / ".env")
    write(folder / "key.txt", KEY)
    link(folder / "data", "/")
    lines = select(folder).lines("project")
    assert lines[0] == "project: 1 file, 17 B"
    assert lines[1:] == [
        "  stays on this computer: .env (may hold secrets)",
        "  stays on this computer: data (a link that leaves the folder)",
        "  stays on this computer: key.txt (a private key)",
    ]


def test_a_name_that_would_move_the_cursor_is_shown_without(folder: Path) -> None:
    write(folder / "\x1b[2J\x1b[31m.env")
    assert "\x1b" not in "".join(select(folder).lines("project"))


@pytest.mark.parametrize(
    "name", ["id_map.py", "secrets.py", "tests/test_env.py", "environment.yaml", "keys.py", "-rf", "ä ö\n"]
)
def test_source_with_a_suspicious_name_is_taken(folder: Path, name: str) -> None:
    write(folder / name, "x = 1")
    assert name in select(folder).files


def test_a_link_inside_is_taken_as_a_link(folder: Path) -> None:
    write(folder / "configs" / "a.yaml", "x")
    link(folder / "latest.yaml", "configs/a.yaml")
    chosen = select(folder)
    assert chosen.links == {"latest.yaml": "configs/a.yaml"}


def test_git_says_what_is_source(folder: Path) -> None:
    git(folder, "init")
    write(folder / ".gitignore", "results/\n")
    write(folder / "results" / "big.bin")
    write(folder / "new.py", "not added yet")
    assert set(select(folder).files) == {".gitignore", "new.py", "train.py"}


def test_a_folder_within_a_git_tree_is_taken_alone(folder: Path) -> None:
    git(folder, "init")
    write(folder / "sub" / "a.py", "x")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    write(folder / "sub" / "a.py", "y")
    write(folder / "train.py", "y")
    assert set(select(folder / "sub").files) == {"a.py"}
    assert git_state(folder / "sub")[1] == ["a.py"]


def test_a_clone_within_a_git_tree_comes_along(folder: Path) -> None:
    git(folder, "init")
    write(folder / "vendor" / "lib.py", "x")
    git(folder / "vendor", "init")
    git(folder, "add", "train.py")
    assert set(select(folder).files) == {"train.py", "vendor/lib.py"}


def test_a_deleted_file_that_git_knows_is_no_mistake(folder: Path) -> None:
    git(folder, "init")
    write(folder / "old.py", "x")
    git(folder, "add", ".")
    (folder / "old.py").unlink()
    assert set(select(folder).files) == {"train.py"}


def test_a_folder_that_is_too_large_is_refused_with_its_largest_files(folder: Path) -> None:
    write(folder / "data" / "corpus.jsonl", "x" * 5000)
    with pytest.raises(UsageError, match="too much to bring as source") as caught:
        select(folder, limit_bytes=4000)
    assert "4.88 KiB  data/corpus.jsonl" in caught.value.seen
    assert ".gitignore" in caught.value.fix


def test_what_is_no_folder_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        select(folder / "train.py")


def test_a_git_tree_for_which_git_does_not_answer_is_told(folder: Path) -> None:
    write(folder / ".git" / "HEAD", "torn")
    assert "git does not answer" in select(folder).lines("project")[1]
