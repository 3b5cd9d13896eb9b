"""`python -m gangline.supervise.control VERB`: questions and orders about a run, on the host of its supervisor.

    alive RUN_FOLDER            -> {"alive": bool, "unfinished": [host]}
    stop|kill RUN_FOLDER        orders it to end
    leave RUN_FOLDER HOST...    asks it to continue without these hosts -> {"asked": [host]}
    reach < Cluster             -> {"reasons": [why a host cannot be reached from here]}

One line of JSON on stdout; {"error": ...} for what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from gangline.errors import GanglineError
from gangline.runs.cluster import Cluster, Host
from gangline.runs.layout import RunLayout
from gangline.supervise.detached import is_alive, leave_run, stop_run, unfinished
from gangline.transport.connect import connect

USAGE = """\
usage: python -m gangline.supervise.control alive|stop|kill RUN_FOLDER, leave RUN_FOLDER HOST..., or reach
"""
NO_KEY = "refuses your key"
"""Words of an ssh error (gangline.transport.ssh_options)."""


def reasons(cluster: Cluster) -> list[str]:
    """Why hosts of the cluster cannot be reached from this one; tried all at once."""
    others = [host for host in cluster.hosts if host.transport != "local"]
    with ThreadPoolExecutor(max_workers=32) as pool:
        return [reason for reason in pool.map(partial(_reason, own=cluster.head.name), others) if reason]


def _reason(host: Host, *, own: str) -> str | None:
    """own: the name of this host."""
    transport = connect(host)
    try:
        transport.home()
    except GanglineError as error:
        if NO_KEY in error.what:  # the reader is at another computer
            return f"{host.name} lets no key of {own} in (gangline prepare --between-hosts gives {own} one)"
        seen = error.seen.splitlines()[:1]
        return " ".join([error.what, *(f"({line.rstrip('.')})" for line in seen)])
    finally:
        transport.close()
    return None


def _do(words: Sequence[str]) -> Mapping[str, object] | None:
    """The answer; None where the words are no command."""
    match list(words):
        case ["reach"]:
            return {"reasons": reasons(Cluster.from_json(json.loads(sys.stdin.buffer.read())))}
        case ["leave", folder, _, *_]:
            leave_run(RunLayout.of(Path(folder)), words[2:])
            return {"asked": list(words[2:])}
        case [("alive" | "stop" | "kill") as verb, folder]:
            layout = RunLayout.of(Path(folder))
            if verb != "alive":
                stop_run(layout, verb)
            return {"alive": is_alive(layout), "unfinished": unfinished(layout)}
    return None


def main(words: Sequence[str]) -> int:
    """Entry point."""
    os.umask(0o077)
    try:
        answer = _do(words)
    except GanglineError as error:
        sys.stdout.write(json.dumps({"error": error.to_json()}) + "\n")
        return error.exit_code
    if answer is None:
        sys.stderr.write(USAGE)
        return 2
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
