"""A small world for the main path: real files below a temporary folder, scripted commands, nothing started."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gangline.context import Dependencies, StartOptions
from gangline.errors import DataError, GanglineError, HostUnreachable, RunFailed
from gangline.runs.checkpoints import set_aside, step_folder, survey
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import digests, file_digest, write_json
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import PART_FILE, commit_record, describe_part
from gangline.runs.state import RunState
from gangline.transport.local import LocalTransport
from gangline.transport.transport import AGENT, CommandResult, Transport
from tests.fakes.backend import FakeBackend
from tests.saved import place_commit

JOB = """
model: {path: ./model, start: random}
data: {train: ./a.txt, sequence_length: 64}
batch: 12
micro_batch: 2
steps: 60
"""

TWO = """
hosts:
  - {name: a, transport: local, workdir: ./places/a, share: 2}
  - {name: b, transport: local, workdir: ./places/b, share: 1}
"""

THREE = """
hosts:
  - {name: a, transport: local, workdir: ./places/a, share: 1}
  - {name: c, transport: local, workdir: ./places/c, share: 1}
  - {name: d, transport: local, workdir: ./places/d, share: 1}
"""

PACKAGES = {
    "gangline": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "safetensors": "0.8.0",
    "tokenizers": "0.23.3",
    "numpy": "2.3.4",
}


@dataclass
class World:
    """What the hosts would say, and what was done to them."""

    root: Path
    packages: dict[str, str | None] = field(default_factory=lambda: dict(PACKAGES))
    train_hash: str = "feed" * 16
    model: str = "cafe" * 16
    unreachable: set[str] = field(default_factory=set)
    inputs_end: BaseException | None = None
    """What preparing the inputs ends with, if not with a result."""
    spawn_error: GanglineError | None = None
    alive: bool = False
    leases: bool = False
    """Whether hosts claim slots."""
    lengths: list[tuple[int, int, bool]] | None = None
    """What a look at tokens sees (see `worker.data.look`); None: no Python has the packages."""
    while_spawning: Callable[[], None] = lambda: None
    """What happens elsewhere while the supervisor comes up."""
    said: list[str] = field(default_factory=list)
    spawned: list[tuple[Path, int]] = field(default_factory=list)
    commands: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def deps(self) -> Dependencies:
        return Dependencies(
            connect=self.connect,
            backend=lambda _name: FakeBackend(leases=self.leases),
            spawn=self.spawn,
            is_alive=lambda _layout, _keeper: self.alive,
            unfinished=lambda _layout, _keeper: (),
            stop_run=lambda _layout, order, _keeper=None: self.said.append(f"order {order}"),
            leave_run=lambda _layout, hosts, _keeper=None: self.said.append(f"leave {' '.join(hosts)}"),
            free_port=lambda _cluster, _head, *, claim: 4711,
            ask_look=self.look,
        )

    def look(self, _host: Host, verb: str, _asked: Mapping[str, Any]) -> dict[str, Any]:
        if self.lengths is None or verb != "look-lengths":
            raise RunFailed("nobody looks", seen="no package")
        longest = [[f"a.jsonl:{number}", length] for number, (length, *_) in enumerate(self.lengths, start=1)]
        none = {"refused": [], "num_refused": 0}
        return {"lengths": self.lengths, "longest": sorted(longest, key=lambda row: -row[1])[:10], **none}

    def start(self, *overrides: str, cluster: str | None = TWO) -> StartOptions:
        return StartOptions(
            home=self.home,
            job=self.file("job.yaml", JOB),
            overrides=overrides,
            cluster=self.file("cluster.yaml", cluster) if cluster else None,
        )

    def file(self, name: str, text: str) -> Path:
        path = self.root / name
        path.write_text(text, encoding="utf-8")
        return path

    def report(self, line: str) -> None:
        self.said.append(line)

    def progress(self, line: str) -> None:
        """Ticks are for eyes only."""

    def connect(self, cluster: Cluster) -> dict[str, Transport]:
        return {host.name: ScriptedTransport(host, self) for host in cluster.hosts}

    def spawn(self, folder: Path, attempt: int, secrets: Mapping[str, str] | None = None) -> None:
        del secrets
        self.spawned.append((folder, attempt))
        self.while_spawning()
        layout = RunLayout.of(folder)
        if self.spawn_error is not None:
            RunState(name="job", phase="failed", attempt=attempt, error=self.spawn_error.to_json()).save(layout)
            raise self.spawn_error

    def host(self, name: str, run_id: str) -> RunLayout:
        return RunLayout(self.root / "places" / name, run_id)

    def ended(self, run_id: str, phase: str = "stopped", attempt: int = 1) -> None:
        """Let the run have ended."""
        layout = RunLayout(self.home, run_id)
        RunState(name="job", phase=phase, attempt=attempt).save(layout)  # type: ignore[arg-type]

    def save(
        self, run_id: str, step: int, hosts: Sequence[str] = ("a", "b"), *, commit: bool = True, in_parts: bool = False
    ) -> None:
        """Let all hosts have saved a step, or, in_parts, each what its rank holds under fsdp."""
        held = {name: f"the rows of rank {number} of {len(hosts)}" for number, name in enumerate(hosts)}
        parts = {}
        for name in hosts:
            folder = step_folder(self.host(name, run_id).checkpoints, step) / f"part-{name}"
            folder.mkdir(parents=True)
            (folder / "weights").write_text(f"weights of step {step}", encoding="utf-8")
            description = {"attempt": 1, "hosts": tuple(hosts), "num_ranks": 2, "fingerprints": {}}
            description["held"] = held if in_parts else {}
            describe_part(folder, step=step, host=name, description=description)
            parts[name] = (folder / PART_FILE).read_bytes()
        for name in hosts if commit else ():
            place_commit(self.host(name, run_id).checkpoints, commit_record(parts))


class ScriptedTransport(LocalTransport):
    """Real files; commands answered by the world."""

    def __init__(self, host: Host, world: World) -> None:
        super().__init__(host)
        self._host = host
        self._world = world

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        on_line: Callable[[str], None] | None = None,
    ) -> CommandResult:
        world, words = self._world, tuple(argv)
        if self.host in world.unreachable:
            raise HostUnreachable(f"{self.host} does not answer")
        world.commands.append((self.host, words))
        if words[0] == AGENT and words[1] != "facts":
            return super().run(argv, stdin=stdin, env=env, timeout_s=timeout_s, on_line=on_line)
        code, lines = 0, []
        if words[:2] == (AGENT, "facts"):
            lines = [facts(self._host, world)]
        elif words[1:3] == ("-m", "gangline.runs.checkpoints"):
            lines = [survey(Path(words[4]))]
        elif words[1:4] == ("-m", "gangline.runs.checkpoints", "aside"):
            lines = [set_aside(Path(words[4]), int(words[5]))]
        elif words[1:3] == ("-m", "gangline.runs.files"):
            lines = [digests(Path(words[3]))]
        elif words[1:4] == ("-m", "gangline.worker", "inputs"):
            code, lines = self._inputs(Path(words[5]))
        else:
            raise AssertionError(f"nobody expected {words}")
        texts = [json.dumps(line) for line in lines]
        for text in texts:
            if on_line:
                on_line(text)
        return CommandResult(host=self.host, argv=words, returncode=code, stdout="\n".join(texts), stderr="")

    def _inputs(self, root: Path) -> tuple[int, list[dict[str, Any]]]:
        world = self._world
        if isinstance(world.inputs_end, DataError):
            record = world.inputs_end.to_json()
            return 2, [{**record, "error_kind": record["kind"], "kind": "error"}]
        if world.inputs_end is not None:
            raise world.inputs_end
        folder = root / "data" / world.train_hash
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokens").write_bytes(b"tokens")
        write_json(folder / "set.json", {"files": {"tokens": {"blake2b": file_digest(folder / "tokens")}}})
        counts = {"train": {"samples": 100, "tokens": 6400, "skipped_rows": 0, "bad_rows": []}, "evaluation": None}
        result = {"train": world.train_hash, "evaluation": None, "model": world.model, "counts": counts}
        return 0, [{"kind": "progress", "done_bytes": 1, "total_bytes": 2, "rows": 3}, {"kind": "result", **result}]


def facts(host: Host, world: World) -> dict[str, Any]:
    """What the agent would say of a healthy computer with these packages."""
    return {
        "schema_version": 2,
        "system": {
            "hostname": "here",
            "agent_python": "3.12.1",
            "num_cpus": 2,
            "memory_total_bytes": 16 << 30,
            "memory_available_bytes": 8 << 30,
        },
        "names": {"own": "here", "addresses": {}},
        "storage": [
            {
                "path": host.workdir,
                "real_path": host.workdir,
                "exists": False,
                "filesystem": "ext4",
                "mount": "/",
                "total_bytes": 100 << 30,
                "free_bytes": 50 << 30,
                "read_only": False,
                "writable": True,
            }
        ],
        "packages": {"python": "3.12.1", "packages": world.packages},
    }
