"""A command that the controller asked for: its streams, its time limit and its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Callable, NoReturn, Union

from gangline.agent.rpc.wire import MAX_DATA_BYTES, ServedRequest
from gangline.agent.supervise import processes

# A verb of the agent as a child of the channel: what that has loaded already need not be loaded again.


PAUSE_S = 0.005


class Forked:
    """A child that leads a session of its own and runs `work`; serves its caller as a `subprocess.Popen` does.

    env: added to ours. keep: descriptors that the child needs; it has no others of ours.
    """

    def __init__(self, work: Callable[[], int], *, env: dict[bytes, bytes], keep: tuple[int, ...]) -> None:
        theirs_in, stdin = os.pipe()
        stdout, theirs_out = os.pipe()
        stderr, theirs_err = os.pipe()
        self.args = "gangline-agent"
        self.returncode: int | None = None
        try:
            self.pid = os.fork()
        except OSError:  # too many processes
            for descriptor in (theirs_in, stdin, stdout, theirs_out, stderr, theirs_err):
                os.close(descriptor)
            raise
        if self.pid == 0:
            _become(work, (theirs_in, theirs_out, theirs_err), env=env, keep=keep)
        for descriptor in (theirs_in, theirs_out, theirs_err):
            os.close(descriptor)
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.stdout = os.fdopen(stdout, "rb", buffering=0)
        self.stderr = os.fdopen(stderr, "rb", buffering=0)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code; raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(PAUSE_S)
        return code


def _become(
    work: Callable[[], int],
    streams: tuple[int, int, int],
    *,
    env: dict[bytes, bytes],
    keep: tuple[int, ...],
) -> NoReturn:
    """The child: only this thread is left of the channel, and nothing of its state is used."""
    code = 1
    try:
        os.setsid()
        for target, source in enumerate(streams):
            os.dup2(source, target)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in keep:
                with contextlib.suppress(OSError):  # the one that the folder was listed with
                    os.close(int(name))
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environb.update(env)
        _fresh_streams()
        code = _run(work)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(work: Callable[[], int]) -> int:
    try:
        return work()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        sys.stderr.write(f"{leaving.code}\n")
    except BaseException:  # noqa: BLE001  (what Python does with it at the end of a program)
        traceback.print_exc()
    return 1


def _fresh_streams() -> None:
    """Another thread may have been in the middle of using the old ones."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        mode = "w" if number else "r"
        setattr(sys, name, os.fdopen(number, mode, encoding=old.encoding, errors=old.errors, closefd=False))


DRAIN_S = 0.2
"""How long output may still come after the command ended: what it left running may hold its pipes for ever."""
STDERR_BYTES = 1 << 18
"""Of stderr the end is kept, and sent with the exit code."""
LEAVE_S = 1.0
PIECE_BYTES = 1 << 16
PIPE_BYTES = 1 << 20
"""The most that a pipe holds: what a command wrote before it ended is not longer."""
LOADING = threading.Lock()
"""Held by who loads a module, or bears a child."""
ALONE = (["host-agent"], ["listen"], ["python"])
"""Verbs that get a Python of their own: one goes on when the channel has gone, one opens ports, and who looks up whose
they are (`ss -p`) shall see it in its command line, one becomes another program.
"""

if TYPE_CHECKING:
    Process = Union["subprocess.Popen[bytes]", "Forked"]


def to_bytes(word: str) -> bytes:
    """The bytes of a word, whatever the locale of this host: utf-8, and lone surrogates for bytes that are not."""
    return word.encode("utf-8", "surrogateescape")


def run(request: ServedRequest, asked: dict[str, Any], *, program: list[str], keep: tuple[int, ...]) -> None:
    """Run `asked["argv"]` and answer. program: what stands for the agent's own name; keep: descriptors it needs."""
    own = asked.get("agent", False)
    try:
        process = _start(asked, program=program, keep=keep)
    except OSError as error:  # as a shell would answer
        request.end({"returncode": 127}, f"{asked['argv'][0]}: {error.strerror}".encode("utf-8", "surrogateescape"))
        return
    command = _Command(process, request, time.monotonic() + asked["timeout_s"])
    try:
        answer = command.hold()
    finally:
        if process.poll() is None and own:
            command.let_leave()
        if process.poll() is None:
            processes.end_family(process)
        command.close()
    request.end(answer, command.stderr_tail())


def _start(asked: dict[str, Any], *, program: list[str], keep: tuple[int, ...]) -> Process:
    argv = [to_bytes(word) for word in asked["argv"]]
    own = asked.get("agent", False)
    env = {to_bytes(name): to_bytes(value) for name, value in asked["env"].items()}
    cwd = to_bytes(asked["cwd"]) if asked.get("cwd") else None
    if own and cwd is None and asked["argv"][1:2] not in ALONE:
        return _forked(asked["argv"][1:], env=env, keep=keep)
    return subprocess.Popen(
        [*map(os.fsencode, program), *argv[1:]] if own else argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environb, **env},
        cwd=cwd,
        start_new_session=True,
        pass_fds=keep if own else (),
    )


def _forked(words: list[str], *, env: dict[bytes, bytes], keep: tuple[int, ...]) -> Forked:
    """A verb in a child. Its module is loaded before, in the channel: the next child that wants it has it already.

    One at a time: a child that is born while another thread is loading a module would wait for that thread for ever.
    """
    from gangline.agent.__main__ import load, main

    def work() -> int:
        LOADING.release()  # the child's own copy of it
        return main(words)

    with LOADING:
        with contextlib.suppress(Exception):  # the child meets it again, and says what it is
            load(words)
        return Forked(work, env=env, keep=keep)


class _Command:
    """One running command."""

    def __init__(self, process: Process, request: ServedRequest, deadline: float) -> None:
        self._process = process
        self._request = request
        self._deadline = deadline
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._stdin: int | None = process.stdin.fileno()
        self._open = {process.stdout.fileno(), process.stderr.fileno()}
        self._stdout = process.stdout.fileno()
        self._stderr = bytearray()
        self._unsent = b""
        os.set_blocking(self._stdin, False)

    def hold(self) -> dict[str, Any]:
        """Serve its streams until it has ended; what there is to say about the end."""
        ended_at: float | None = None
        after_end_bytes = 0
        while self._open:
            now = time.monotonic()
            if self._request.cancelled:
                return {"cancelled": True}
            if now > self._deadline:
                return {"timeout": True}
            if ended_at is None and self._process.poll() is not None:
                ended_at = now
            num_bytes = self._serve(min(DRAIN_S, self._deadline - now))
            if ended_at is not None:
                after_end_bytes += num_bytes or 0
                endless = num_bytes == 0 or after_end_bytes > PIPE_BYTES
                if endless and time.monotonic() > ended_at + DRAIN_S:
                    break
        return self._await_exit()

    def _await_exit(self) -> dict[str, Any]:
        """Its streams are closed, but it may go on."""
        while True:
            if self._request.cancelled:
                return {"cancelled": True}
            left_s = self._deadline - time.monotonic()
            if left_s < 0 and self._process.poll() is None:
                return {"timeout": True}
            with contextlib.suppress(subprocess.TimeoutExpired):
                return {"returncode": self._process.wait(min(DRAIN_S, max(left_s, 0.0)))}

    def _serve(self, wait_s: float) -> int | None:
        """Move what can be moved; how much output came, None where it waits for room in the window."""
        held = self._request.credit <= 0
        poll = select.poll()
        poll.register(self._request.wake_descriptor(), select.POLLIN)
        for descriptor in self._open:
            if not (held and descriptor == self._stdout):
                poll.register(descriptor, select.POLLIN)
        if self._stdin is not None and self._has_input():
            poll.register(self._stdin, select.POLLOUT)
        num_bytes = 0
        for descriptor, _ in poll.poll(max(wait_s, 0.0) * 1000):
            if descriptor in self._open:
                num_bytes += self._take(descriptor)
            elif descriptor == self._stdin:
                self._give()
            else:
                self._request.forget_wake()
        return None if held and self._stdout in self._open else num_bytes

    def _take(self, descriptor: int) -> int:
        room = self._request.credit if descriptor == self._stdout else PIECE_BYTES
        piece = os.read(descriptor, max(1, min(PIECE_BYTES, MAX_DATA_BYTES, room)))
        if not piece:
            self._open.discard(descriptor)
        elif descriptor == self._stdout:
            self._request.send(piece)
        else:
            self._stderr += piece
            if len(self._stderr) > 2 * STDERR_BYTES:
                del self._stderr[:-STDERR_BYTES]
        return len(piece)

    def _has_input(self) -> bool:
        if not self._unsent:
            self._unsent = b"".join(self._request.inbox())
        return bool(self._unsent) or self._request.input_ended

    def _give(self) -> None:
        assert self._stdin is not None
        sent = 0
        if self._unsent:
            try:
                sent = os.write(self._stdin, self._unsent)
            except BlockingIOError:
                return
            except OSError:  # it does not read what we say: the rest goes nowhere
                sent = len(self._unsent)
        self._unsent = self._unsent[sent:]
        self._request.acknowledge(sent)
        if not self._unsent and self._request.input_ended and not self._request.has_inbox:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._stdin = None

    def let_leave(self) -> None:
        """Close its input, and its output, so that it notices: a program of ours clears up and leaves."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_S)

    def stderr_tail(self) -> bytes:
        """The end of stderr."""
        return bytes(self._stderr[-STDERR_BYTES:])

    def close(self) -> None:
        """Let go of its pipes."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
