"""Ansible and its linter for tests, in an environment of their own: both are large, and need other versions than ours."""

import fcntl
import subprocess
import sys

import pytest

PACKAGES = ("ansible-core>=2.17,<2.20", "ansible-lint>=25,<27")
INSTALL_S = 400


def ansible_folder(cache):
    """The folder of their programs, made once per checkout; a skip where no package index is reached."""
    folder = cache.mkdir("ansible")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder / "venv"], check=True)
            install = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", *PACKAGES]
            done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if done.returncode:
                pytest.skip(f"Ansible cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            (folder / "ready").touch()
    return folder / "venv/bin"


def ansible_env(folder):
    """Variables for its programs: no colours, and programs of the system behind them."""
    path = f"{folder}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return {"PATH": path, "NO_COLOR": "1", "ANSIBLE_NOCOLOR": "1", "LC_ALL": "C.UTF-8"}
