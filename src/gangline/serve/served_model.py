"""A model as an endpoint in OpenAI's form: it runs where the model lies, on loopback only, for as long as a command.

On this computer the worker ends when its stdin does; on another host it ends with the connection, and ssh forwards its
port. The token goes over stdin: words of a command can be read by everybody on a host.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gangline.errors import GanglineError, RunFailed
from gangline.provision.code import trainer_here
from gangline.runs.cluster import Host
from gangline.runs.files import json_object
from gangline.serve.run_model import ModelPlace, SavedPart
from gangline.transport.terminal import LOOPBACK, forward
from gangline.transport.transport import CommandResult, Transport
from gangline.units import format_bytes

SERVED_S = 30 * 86400.0
LAST_WORDS_S = 1.0
"""For how a stage has ended, after it was missed."""
END_S = 90.0
"""A pass through the model that has begun is not interrupted."""
NOTICED_S = 60.0
"""For the first stage to notice, and say, that another one has ended."""


_Said = queue.Queue[str | CommandResult | GanglineError]
_Ready = tuple[int, tuple[str, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint that answers."""

    url: str
    token: str
    models: tuple[str, ...]
    plan: Mapping[str, Any]
    """Its memory as the worker has planned it: `worker/serving/cache_plan.py`, and `alone_for`."""

    def told(self) -> list[str]:
        """The plan as lines."""
        device, context, num = self.plan["device"], self.plan["context"], self.plan["num_parallel"]
        free, cache = self.plan["free_bytes"], self.plan["cache_bytes"]
        room = "" if free is None else f", {format_bytes(free)} free beside them"
        size = "not planned: its layers keep states of their own" if cache is None else format_bytes(cache)
        lines = [
            f"weights  {format_bytes(self.plan['weight_bytes'])} on {device}{room}",
            f"cache    {size} for {num} answers at a time of {context} tokens (prompt and answer)",
        ]
        for stage in self.plan.get("stages", ()):
            free = "" if stage["free_bytes"] is None else f", {format_bytes(stage['free_bytes'])} free beside them"
            layers = f"layers {stage['first_layer']} to {stage['last_layer']}"
            sizes = f"{format_bytes(stage['weight_bytes'])} of weights, {format_bytes(stage['cache_bytes'])} of cache"
            lines.append(f"stage    {stage['host']}: {layers}, {sizes} on {stage['device']}{free}")
        if num > 1 and (reason := self.plan["alone_for"]):
            lines.append(f"no batches, so {num} answers take {num} times one answer's passes: {reason}")
        return lines


def serve_folder(folder: Path, options: Sequence[str], *, home: Path, on_ready: Callable[[Endpoint], None]) -> NoReturn:
    """Serve a folder of this computer until the command is interrupted. on_ready: gets the endpoint once it answers.

    Raises the worker's own error, RunFailed where it ends by itself.
    """
    _serve(trainer_here(home), None, ("serve", str(folder.absolute()), *options), on_ready)


def serve_saved(saved: SavedPart, options: Sequence[str], *, on_ready: Callable[[Endpoint], None]) -> NoReturn:
    """Serve the model of a checkpoint, on its host, until the command is interrupted; see `serve_folder`."""
    words = ("serve", "--run", str(saved.run_folder), "--checkpoint", str(saved.part), *options)
    _serve(saved.place.host, saved.place.transport, words, on_ready)


def serve_stages(
    places: Sequence[ModelPlace],
    options: Sequence[str],
    *,
    ports: tuple[int, int] | None,
    on_ready: Callable[[Endpoint], None],
) -> NoReturn:
    """Serve a model that lies on all of these hosts in stages, one on each, until the command is interrupted.

    The first one has the endpoint. ports: those at which hosts may listen for each other. Raises as `serve_folder`.
    """
    stage_key, first = secrets.token_urlsafe(24), places[0]
    told: _Said = queue.Queue()
    at = ("--ports", *map(str, ports)) if ports else ()
    with ExitStack() as stack:
        behind = []
        for place in places[1:]:
            words = ("stage", str(place.folder), f"--address={place.host.address}", *at)
            stage = _Worker(
                place.host,
                place.transport,
                words,
                _first_line(stage_key=stage_key),
                on_end=partial(_miss, place.host, first.host, told),
            )
            stack.callback(stage.end)
            behind.append(stage)
        addresses = [f"--stage={stage.host.name}={stage.host.address}:{_await_port(stage)}" for stage in behind]
        words = ("serve", str(first.folder), "--engine=stages", f"--host={first.host.name}", *addresses, *options)
        try:
            _serve(first.host, first.transport, words, on_ready, said=told, stage_key=stage_key)
        except GanglineError as error:
            error.seen = "\n".join(filter(None, (error.seen, *(stage.last_words() for stage in behind))))
            raise


def _miss(host: Host, first: Host, told: _Said) -> None:
    """A stage has ended. The first one notices it; where it does not, it is said in its place."""
    time.sleep(NOTICED_S)
    told.put(
        RunFailed(
            f"{first.name} hangs, which has the first layers and the endpoint",
            seen=f"the stage on {host.name} has ended, and {first.name} does not notice it for {NOTICED_S:.0f} s",
            fix="look at that host (stopped, stuck, swapping?), then start it again: gangline serve",
        )
    )


class _Worker:
    """A worker that serves, or a stage behind it. `said` gets its lines, and then how it ended.

    On this computer it ends when `end` closes its stdin; another host's ends with the connection to it.
    """

    def __init__(
        self,
        host: Host,
        transport: Transport | None,
        words: Sequence[str],
        first_line: bytes,
        *,
        said: _Said | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.host, self.said, self._on_end = host, queue.Queue() if said is None else said, on_end
        self._process: subprocess.Popen[bytes] | None = None
        if host.transport == "local" or transport is None:
            self._process = _start(host, words, first_line)
            work = partial(self._listen, self._process)
        else:
            work = partial(self._run_there, transport, [*words, "--stay"], first_line)
        threading.Thread(target=self._follow, args=(work,), daemon=True).start()

    def _follow(self, work: Callable[[], CommandResult]) -> None:
        try:
            self.said.put(work())
        except GanglineError as error:
            self.said.put(error)
        self._on_end()

    def _listen(self, process: subprocess.Popen[bytes]) -> CommandResult:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.said.put(line.decode("utf-8", "replace"))
        return CommandResult(host=self.host.name, argv=(), returncode=process.wait(), stdout="", stderr="")

    def _run_there(self, transport: Transport, words: Sequence[str], first_line: bytes) -> CommandResult:
        argv = self.host.argv("-m", "gangline.worker", *words)
        return transport.run(argv, stdin=first_line, env=self.host.code_env, timeout_s=SERVED_S, on_line=self.said.put)

    def last_words(self) -> str:
        """How it ended, where it did not end as it should; "" for one that goes on."""
        with suppress(queue.Empty):
            while isinstance(said := self.said.get(timeout=LAST_WORDS_S), str):
                pass
            if isinstance(said, GanglineError):
                return f"{self.host.name}: {said.what}; {said.seen}"
            return f"{self.host.name}: {_end_words(said)}" if said.returncode else ""
        return ""

    def end(self) -> None:
        """End it, where it is on this computer."""
        if self._process is not None:
            _end(self._process)


def _await_port(stage: _Worker) -> int:
    """The port at which a stage listens for the others. Raises the error with which it ended."""
    while isinstance(line := stage.said.get(), str):
        record = _told(line)
        if record.get("kind") == "listening":
            return int(record["port"])
    raise _end_of(stage.host, line)


def _serve(
    host: Host,
    transport: Transport | None,
    words: Sequence[str],
    on_ready: Callable[[Endpoint], None],
    *,
    said: _Said | None = None,
    **more_secrets: str,
) -> NoReturn:
    token = secrets.token_urlsafe(24)
    worker = _Worker(host, transport, words, _first_line(token=token, **more_secrets), said=said)
    try:
        port, models, plan = _await_ready(host, worker.said)
        with forward(host, port) as near:
            on_ready(_endpoint((near, models, plan), token))
            _await_end(host, worker.said)
    finally:
        worker.end()


def _start(host: Host, words: Sequence[str], first_line: bytes) -> subprocess.Popen[bytes]:
    # a session of its own: Ctrl-C is for this command, which then closes the worker's stdin
    process = subprocess.Popen(
        host.argv("-m", "gangline.worker", *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **host.code_env},
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, and its stdout says why
        process.stdin.write(first_line)
        process.stdin.flush()
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_ready(host: Host, said: _Said) -> _Ready:
    while True:
        line = said.get()
        if not isinstance(line, str):
            raise _end_of(host, line)
        if (ready := _read(line)) is not None:
            return ready


def _await_end(host: Host, said: _Said) -> NoReturn:
    while isinstance(line := said.get(), str):
        _told(line)
    raise _end_of(host, line)


def _end_of(host: Host, result: CommandResult | GanglineError) -> GanglineError:
    if isinstance(result, GanglineError):
        return result
    return _ended(host, _end_words(result))


def _end_words(result: CommandResult) -> str:
    return "\n".join(result.stderr.splitlines()[-8:]) or _exit_words(result.returncode)


def _exit_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    words = f"{signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
    return f"{words}: mostly the memory of its computer was used up" if code == -signal.SIGKILL else words


def _ended(host: Host, seen: str) -> GanglineError:
    return RunFailed(
        f"{host.name}: the endpoint has ended", seen=seen, fix="the lines above say why; out of memory leaves none"
    )


def _first_line(**given: str) -> bytes:
    return json.dumps(given).encode() + b"\n"


def _read(line: str) -> _Ready | None:
    """The port, the models and the plan that a line of the worker announces. Raises the error that it tells instead."""
    record = _told(line)
    if record.get("kind") != "serving":
        return None
    return int(record["port"]), tuple(map(str, record["models"])), record["plan"]


def _told(line: str) -> dict[str, Any]:
    """What a worker says in a line; {} where it is no word of ours. Raises the error that it tells instead."""
    record = json_object(line) or {}
    if record.get("kind") == "error":
        raise GanglineError.from_json({**record, "kind": record.get("error_kind")})
    return record


def _endpoint(ready: _Ready, token: str) -> Endpoint:
    port, models, plan = ready
    return Endpoint(url=f"http://{LOOPBACK}:{port}/v1", token=token, models=models, plan=plan)
