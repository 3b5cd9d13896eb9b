"""Work with a limit on its time and output: programs, dead file servers, name servers that do not answer."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

PROGRAM_S = 10.0
OUTPUT_BYTES = 1 << 18


MOST_LOAD = 6.0
"""Limits are never multiplied by more."""


def stretched(duration_s: float) -> float:
    """A limit for work on this host, longer where more processes want to run than it has cores."""
    try:
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return duration_s
    return duration_s * min(max(1.0, load), MOST_LOAD)


class Output(NamedTuple):
    """What a program left behind."""

    returncode: int
    """Negative: ended by that signal."""
    stdout: str
    stderr: str


def within(duration_s: float, work: Callable[[], Any]) -> Any:
    """What `work` returns or raises; TimeoutError if it takes longer. It is then left to itself, in its thread."""
    answer: Dict[str, Any] = {}

    def do() -> None:
        try:
            answer["value"] = work()
        except Exception as error:  # noqa: BLE001 - handed to the caller
            answer["error"] = error

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(duration_s)
    if "error" in answer:
        raise answer["error"]
    if "value" not in answer:
        raise TimeoutError(f"no answer within {duration_s:g} s")
    return answer["value"]


def run(
    argv: List[str],
    *,
    timeout_s: float = PROGRAM_S,
    limit_bytes: int = OUTPUT_BYTES,
    env: Optional[Mapping[str, str]] = None,
) -> Output:
    """Run a program, in the plainest locale, to its end; of longer output the beginning is kept.

    Raises OSError where it cannot be started, TimeoutError after `timeout_s`; it and what it started are ended then.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C", **(env or {})},
        cwd="/",
        start_new_session=True,
    )
    try:
        texts = _read(process, deadline=time.monotonic() + timeout_s, limit_bytes=limit_bytes)
    except TimeoutError:
        raise TimeoutError(f"{argv[0]} did not end within {timeout_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return Output(process.returncode, *texts)


def ask_python(argv: List[str], program: str, *words: str, mark: str, timeout_s: float, **how: Any) -> Dict[str, Any]:
    """Run a program by a Python; the JSON object that it prints behind `mark`, as a module system may greet first.

    how: see `run`. Raises OSError with the last line of its stderr.
    """
    output = run([*argv, "-c", program, *words], timeout_s=timeout_s, **how)
    for line in output.stdout.splitlines():
        if line.startswith(mark):
            answer: Dict[str, Any] = json.loads(line[len(mark) :])
            return answer
    last = (output.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    raise OSError(f"{' '.join(argv)}: exit code {output.returncode}: {last[:300]}")


def _read(process: subprocess.Popen[bytes], *, deadline: float, limit_bytes: int) -> List[str]:
    """The beginning of stdout and of stderr, once the program has closed both and ended; raises TimeoutError."""
    kept = [bytearray(), bytearray()]
    with selectors.DefaultSelector() as selector:
        for index, stream in enumerate((process.stdout, process.stderr)):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, index)
        while selector.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            for key, _ in selector.select(left_s):
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fileobj)
                kept[key.data] += piece[: max(0, limit_bytes - len(kept[key.data]))]
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return [part.decode("utf-8", "replace") for part in kept]
