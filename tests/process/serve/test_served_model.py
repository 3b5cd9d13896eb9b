"""An endpoint on another host: its port comes here, its own errors too, and its end is told. The worker is a script."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import pytest

from gangline.cli.serve import command
from gangline.errors import RunFailed, UsageError
from gangline.runs.cluster import Host
from gangline.serve import served_model
from gangline.serve.served_model import Endpoint, serve_saved, serve_stages
from gangline.transport.transport import CommandResult

WORKER = """
import json, os, sys
token = json.loads(sys.stdin.readline())["token"]
told = {"token": token, "words": sys.argv[1:], "in words": token in " ".join(sys.argv)}
told["in environment"] = token in os.environ.values()
open("told.json", "w").write(json.dumps(told))
print("a library says something", flush=True)
print(json.dumps(%s), flush=True)
sys.stderr.write("Killed\\n")
sys.exit(9)
"""
PLAN = {"device": "cpu", "weight_bytes": 1 << 20, "cache_bytes": 1 << 21, "free_bytes": 1 << 30, "alone_for": "odd"}
PLAN |= {"context": 512, "num_parallel": 4}
SERVING = {"kind": "serving", "port": 4711, "models": ["run", "base"], "plan": PLAN}
REFUSED = {"kind": "error", "error_kind": "UsageError", "what": "no starlette", "seen": "", "fix": "install it"}


class Away:
    """A transport whose other host is a folder of this computer; its commands run as children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, argv: tuple[str, ...], *, stdin: bytes, env: Any, timeout_s: float, on_line: Any) -> CommandResult:
        done = subprocess.run(
            [sys.executable, str(self.folder / "worker.py"), *argv[1:]],
            input=stdin,
            env=env,
            cwd=self.folder,
            capture_output=True,
            check=False,
            timeout=min(timeout_s, 60),
        )
        for line in done.stdout.decode().splitlines():
            on_line(line)
        text = done.stderr.decode()
        return CommandResult(host="gpu02", argv=argv, returncode=done.returncode, stdout="", stderr=text)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`serve.begin(said)` serves; `ready`: endpoints that became ready; `brought`: ports that were brought here."""
    brought: list[int] = []

    @contextlib.contextmanager
    def forward(_host: Host, port: int) -> Any:
        brought.append(port)
        yield 815

    monkeypatch.setattr(served_model, "forward", forward)
    ready: list[Endpoint] = []

    def begin(said: dict[str, Any]) -> None:
        (tmp_path / "worker.py").write_text(WORKER % repr(said))
        host = Host(name="gpu02", workdir="/w", transport="ssh", python="python3")
        place = SimpleNamespace(host=host, transport=Away(tmp_path))
        saved: Any = SimpleNamespace(place=place, run_folder=PurePath("/w/run"), part=PurePath("/w/part"))
        serve_saved(saved, ["--name=run"], on_ready=ready.append)

    return SimpleNamespace(begin=begin, ready=ready, brought=brought, told=tmp_path / "told.json")


def test_the_port_of_the_host_is_brought_here_and_its_end_is_told(serve: Any) -> None:
    with pytest.raises(RunFailed, match=r"gpu02: the endpoint has ended") as caught:
        serve.begin(SERVING)
    assert "Killed" in caught.value.seen
    assert serve.brought == [4711]
    [endpoint] = serve.ready
    assert (endpoint.url, endpoint.models) == ("http://127.0.0.1:815/v1", ("run", "base"))
    assert endpoint.told() == [
        "weights  1 MiB on cpu, 1 GiB free beside them",
        "cache    2 MiB for 4 answers at a time of 512 tokens (prompt and answer)",
        "no batches, so 4 answers take 4 times one answer's passes: odd",
    ]
    told = json.loads(serve.told.read_text())
    assert told["token"] == endpoint.token
    assert (told["in words"], told["in environment"]) == (False, False)
    assert "--stay" in told["words"], "ssh closes its stdin at once"


def test_an_error_of_the_worker_is_told_as_it_was_there(serve: Any) -> None:
    with pytest.raises(UsageError, match=r"no starlette"):
        serve.begin(REFUSED)
    assert serve.ready == serve.brought == []


STAGED = """
import json, sys, time
from pathlib import Path
secrets = json.loads(sys.stdin.readline())
verb, words = sys.argv[3], sys.argv[4:]
told = {"secrets": sorted(secrets), "words": words, "in words": any(each in " ".join(words) for each in secrets.values())}
Path(f"{verb}.json").write_text(json.dumps({**told, "key": secrets["stage_key"]}))
if verb == "stage":
    print(json.dumps({"kind": "listening", "port": 4812}), flush=True)
    if Path("killed").exists():
        sys.exit("Killed by the system")
    sys.exit(0)
print(json.dumps(%s), flush=True)
if Path("hanging").exists():
    time.sleep(50)
print(json.dumps(%s), flush=True)
sys.exit(5)
"""
PLACED = {"host": "gpu02", "device": "cpu", "first_layer": 0, "last_layer": 3, "free_bytes": None}
PLACED |= {"weight_bytes": 1 << 20, "cache_bytes": 1 << 21}
GONE = {"kind": "error", "error_kind": "RunFailed", "what": "gpu03 has gone", "seen": "", "fix": "look at it"}


@pytest.fixture
def places(tmp_path: Path) -> Any:
    """Two hosts with a model; the first one's worker says that it serves, and then that the other one has gone."""
    said = {**SERVING, "plan": {**PLAN, "alone_for": "", "stages": [PLACED]}}
    (tmp_path / "worker.py").write_text(STAGED % (repr(said), repr(GONE)))
    hosts = [
        Host(name=name, workdir="/w", transport="ssh", python="python3", address=f"10.0.0.{number}")
        for number, name in enumerate(("gpu02", "gpu03"), 2)
    ]
    return [SimpleNamespace(host=host, transport=Away(tmp_path), folder=PurePath(f"/w/{host.name}")) for host in hosts]


def test_a_first_stage_that_does_not_notice_the_end_of_another_one_hangs(
    serve: Any, places: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging").touch()
    monkeypatch.setattr(served_model, "NOTICED_S", 1.0)
    with pytest.raises(RunFailed, match=r"gpu02 hangs, which has the first layers and the endpoint") as caught:
        serve_stages(places, ["--name=run"], ports=None, on_ready=serve.ready.append)
    assert "the stage on gpu03 has ended" in caught.value.seen


@pytest.mark.parametrize("killed", [False, True])
def test_stages_learn_each_other_and_the_end_of_one_is_told(
    serve: Any, places: Any, tmp_path: Path, killed: bool
) -> None:
    if killed:
        (tmp_path / "killed").touch()
    with pytest.raises(RunFailed, match=r"gpu03 has gone") as caught:
        serve_stages(places, ["--name=run"], ports=(4800, 4900), on_ready=serve.ready.append)
    assert caught.value.seen == ("gpu03: Killed by the system" if killed else "")
    first, behind = (json.loads((tmp_path / f"{verb}.json").read_text()) for verb in ("serve", "stage"))
    assert "--stage=gpu03=10.0.0.3:4812" in first["words"]
    assert first["words"][0] == "/w/gpu02"
    assert behind["words"] == ["/w/gpu03", "--address=10.0.0.3", "--ports", "4800", "4900", "--stay"]
    assert (first["secrets"], behind["secrets"]) == (["stage_key", "token"], ["stage_key"])
    assert first["key"] == behind["key"]
    assert not first["in words"]
    assert not behind["in words"]
    [endpoint] = serve.ready
    assert "stage    gpu02: layers 0 to 3, 1 MiB of weights, 2 MiB of cache on cpu" in endpoint.told()


@pytest.mark.parametrize("target", ["gguf/model-f16.gguf", "gguf"])
def test_gguf_files_are_refused_with_what_serves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf/model-f16.gguf").touch()
    with pytest.raises(UsageError, match=r"GGUF files are not served here") as caught:
        command(target)
    assert "llama-server" in str(caught.value.fix)
