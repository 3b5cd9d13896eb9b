"""`connect`: can this host open a TCP connection to an address and port? Says nothing there, and closes at once.

    connect < {"targets": [[address, port], ...], "timeout_s": n}
        -> {"outcomes": ["open", "refused", "timed out", "no route" or what the system said, ...]}

Unlike `reach` it may be used on a port where torch listens.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import List, Sequence

TARGETS_LIMIT = 64
SECONDS_LIMIT = 10.0
NAMES = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timed out",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
}


def outcome(address: str, port: int, timeout_s: float) -> str:
    """How a connection goes."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except socket.timeout:
        return "timed out"
    except OSError as error:
        return NAMES.get(error.errno or 0, error.strerror or str(error))
    return "open"


def outcomes(targets: Sequence[Sequence[object]], timeout_s: float) -> List[str]:
    """How connections to all targets go, tried at the same time."""
    wanted = [(str(address), int(str(port))) for address, port in targets[:TARGETS_LIMIT]]
    with ThreadPoolExecutor(max_workers=max(1, len(wanted))) as pool:
        return list(pool.map(lambda target: outcome(target[0], target[1], timeout_s), wanted))


def main(argv: List[str]) -> int:
    """Entry point."""
    del argv
    asked = json.loads(sys.stdin.buffer.read())
    timeout_s = min(float(asked.get("timeout_s", 3.0)), SECONDS_LIMIT)
    sys.stdout.write(json.dumps({"outcomes": outcomes(asked["targets"], timeout_s)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
