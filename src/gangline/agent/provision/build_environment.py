"""`environment`: what Pythons there are, what one holds, and a virtual environment that uv builds from wheels, offline.

One JSON request on stdin, JSON lines on stdout, the last {"kind": "result", ...}:

    {"do": "look", "root": FOLDER} -> {"pythons": [{"path", "version", ...}], "built": [NAME, ...], "free_bytes"}
    {"do": "contents", "argv": [...], "env": {...}} -> what `gangline.agent.provision.contents` prints, asked of that
    Python
    {"do": "verify", "folder": FOLDER} -> {"whole": bool, "built": bool, "why", "packages"}
    {"do": "build", "folder", "python", "wheels", "requirements", "lock"} -> {"packages"}

A folder is whole once it has its manifest, the last file that is written, and its Python still finds the very packages
that stand there. It is built where it will be used: the programs in it begin with its path. What an interrupted build
left has no manifest, and is built anew; whoever builds holds a lock.

`wheels` holds uv, too. What uv unpacks stays in `.uv` beside the environments, and environments are hard links to it:
packages that two locks have in common are unpacked once, and take room once. What lies there is deleted where nothing
was built for 30 days; the environments keep their links.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

from gangline.agent.bounded import ask_python, run
from gangline.agent.host_facts.packages import pythons
from gangline.agent.host_files import read_record, write_whole
from gangline.agent.provision.digests import free_bytes
from gangline.agent.verbs import VerbFailed, write_line

MANIFEST = "gangline.json"
MARK = "gangline-contents"
CONTENTS_S = 60.0
PYTHON_S = 10.0
BUILD_S = 3600.0
KEPT_S = 30 * 86400.0
BEAT_S = 2.0
TAIL_BYTES = 4000

QUESTION = """
import json, platform, sys, sysconfig
print(json.dumps({
    "path": sys.executable,
    "version": list(sys.version_info[:3]),
    "implementation": platform.python_implementation(),
    "machine": platform.machine(),
    "libc": list(platform.libc_ver()),
    "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
}))
"""


def environment(request: Dict[str, Any]) -> Dict[str, Any]:
    """The verb."""
    act: Callable[[Dict[str, Any]], Dict[str, Any]] = {
        "look": _look,
        "contents": lambda asked: contents([str(word) for word in asked["argv"]], asked.get("env") or {}),
        "verify": lambda asked: _verify(Path(asked["folder"])),
        "build": _build,
    }[request["do"]]
    try:
        return {"kind": "result", **act(request)}
    except OSError as error:  # TimeoutError is one
        raise VerbFailed(str(error)) from error


def _look(request: Dict[str, Any]) -> Dict[str, Any]:
    """Every Python that answers, the one that runs this first; each once, whatever its names. And what is built."""
    paths = list(dict.fromkeys([sys.executable, *pythons()]))
    with ThreadPoolExecutor(max_workers=8) as pool:
        answers = [answer for answer in pool.map(_ask_python, paths) if answer]
    found = {os.path.realpath(answer["path"]): answer for answer in reversed(answers)}
    root = Path(request["root"])
    return {
        "pythons": list(reversed(list(found.values()))),
        "built": sorted(path.parent.name for path in root.glob("*/" + MANIFEST)),
        "free_bytes": free_bytes(root),
    }


def _ask_python(path: str) -> Optional[Dict[str, Any]]:
    try:
        output = run([path, "-I", "-c", QUESTION], timeout_s=PYTHON_S)
        answer: Dict[str, Any] = json.loads(output.stdout)
    except (OSError, TimeoutError, ValueError):
        return None
    return answer


def contents(argv: List[str], env: Dict[str, str]) -> Dict[str, Any]:
    """What the Python behind a command holds; raises OSError with its last words."""
    source = pkgutil.get_data("gangline.agent.provision", "contents.py")
    assert source is not None
    return ask_python(argv, source.decode(), mark=MARK, timeout_s=CONTENTS_S, env=env, limit_bytes=1 << 22)


def _verify(folder: Path) -> Dict[str, Any]:
    manifest = read_record(folder / MANIFEST)
    if not manifest:
        return {"whole": False, "built": False, "why": "it was never finished", "packages": {}}
    try:
        found = contents([str(folder / "bin" / "python")], {"PYTHONNOUSERSITE": "1"})["packages"]
    except (OSError, TimeoutError, ValueError) as error:
        return {"whole": False, "built": True, "why": str(error), "packages": manifest["packages"]}
    expected = manifest["packages"]
    changed = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    why = "changed since it was built: {}".format(", ".join(changed[:10])) if changed else None
    return {"whole": not changed, "built": True, "why": why, "packages": found}


def _build(request: Dict[str, Any]) -> Dict[str, Any]:
    folder, wheels = Path(request["folder"]), Path(request["wheels"])
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock(folder.with_name(".uv.lock")):
        if (folder / MANIFEST).exists():  # somebody else has built it meanwhile
            return {"packages": _verify(folder)["packages"]}
        if folder.exists():
            shutil.rmtree(str(folder))
        _run_uv(request, folder, wheels)
        found = contents([str(folder / "bin" / "python")], {"PYTHONNOUSERSITE": "1"})
        manifest = {"lock": request["lock"], "python": found["python"], "packages": found["packages"]}
        write_whole(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    return {"packages": found["packages"]}


def _run_uv(request: Dict[str, Any], folder: Path, wheels: Path) -> None:
    uv, cache, constant = wheels / "uv", folder.with_name(".uv"), folder.with_name(".wheels")
    uv.chmod(0o700)
    cache.mkdir(mode=0o700, exist_ok=True)
    if time.time() - cache.stat().st_mtime > KEPT_S:
        shutil.rmtree(str(cache))
        cache.mkdir(mode=0o700)
    os.utime(str(cache))
    with contextlib.suppress(FileNotFoundError):
        constant.unlink()
    constant.symlink_to(wheels)  # uv knows again what it has unpacked by the path that it came from
    deadline = time.monotonic() + BUILD_S
    variables = {"UV_CACHE_DIR": str(cache), "UV_LINK_MODE": "hardlink"}
    try:
        _step("environment", [str(uv), "venv", "--python", request["python"], str(folder)], deadline, variables)
        requirements = folder / "requirements.txt"
        requirements.write_text(request["requirements"], encoding="utf-8")
        argv = [
            str(uv), "pip", "sync", "--python", str(folder / "bin" / "python"), "--no-index", "--find-links",
            str(constant), "--no-build", "--require-hashes", str(requirements),
        ]  # fmt: skip
        _step("packages", argv, deadline, variables)
    finally:
        constant.unlink()
        for path in [folder / ".lock", cache / ".lock", *cache.glob("wheels-*/**/*.lock")]:
            with contextlib.suppress(FileNotFoundError):
                path.chmod(0o600)  # uv lets everybody write to them, whatever the umask


def _step(what: str, argv: List[str], deadline: float, variables: Dict[str, str]) -> None:
    """Run uv, with a sign of life; raises VerbFailed with its last words. Nothing that the user set for uv counts."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PYTHON", "VIRTUAL_ENV"))}
    alone = {"UV_OFFLINE": "1", "UV_NO_CONFIG": "1", "UV_NO_PROGRESS": "1", "UV_PYTHON_DOWNLOADS": "never"}
    env = {**kept, **alone, **variables, "LC_ALL": "C.UTF-8", "NO_COLOR": "1"}
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, cwd="/"
            )
        except OSError as error:
            fix = "give the host a `workdir` on a file system from which programs may run (no `noexec`)"
            raise VerbFailed("uv, which builds the environment, cannot be started", str(error), fix) from error
        with _beating(what):
            try:
                code = process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                process.kill()
                process.wait()
        if code != 0:
            raise VerbFailed(*_why(what, code, output))


def _why(what: str, code: Optional[int], output: Any) -> Sequence[str]:
    output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
    tail = output.read().decode("utf-8", "replace").strip()
    ended = "did not end in time" if code is None else "exit code {}".format(code)
    seen = "{}\n{}".format(ended, "\n".join("    " + line for line in tail.splitlines()[-15:]))
    if "No space left" in tail:
        return "no room for the {}".format(what), seen, "make room there, or give the host a `workdir` on a larger disk"
    return "uv cannot make the {}".format(what), seen, "put right what uv names, and start again"


@contextlib.contextmanager
def _beating(what: str) -> Iterator[None]:
    """A line every two seconds: it goes on."""
    ended, begun_s = threading.Event(), time.monotonic()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            write_line({"kind": "progress", "what": what, "seconds": round(time.monotonic() - begun_s)})

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Nobody else builds the same."""
    with path.open("w") as stream:
        with _beating("wait for another start that builds the same"):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
