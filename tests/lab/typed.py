"""Somebody at a terminal of a lab machine: a command that asks, and the answers that are typed."""

import os
import re
import selectors
import shlex
import subprocess
import time


def typed(host, argv, answers, *, timeout_s=120.0):
    """Run a command on a terminal of its own; each of `answers` (pattern, text) is typed when its pattern is shown.

    Returns the exit code and everything that was shown. An answer that nobody asked for is a failure.
    """
    command = ["script", "-qfec", shlex.join(argv), "/dev/null"]
    process = host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    shown, seen, left = "", 0, list(answers)
    deadline = time.monotonic() + timeout_s
    with process, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(0.2):
                continue
            piece = os.read(process.stdout.fileno(), 1 << 14)
            if not piece:
                break
            shown += piece.decode(errors="replace")
            if left and (found := re.search(left[0][0], shown[seen:])):
                seen += found.end()
                process.stdin.write(f"{left.pop(0)[1]}\n".encode())
                process.stdin.flush()
        else:
            process.kill()
        process.stdin.close()
    assert not left, f"nobody asked for {left[0][0]!r}\n{shown}"
    return process.returncode, shown.replace("\r\n", "\n")
