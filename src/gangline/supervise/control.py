"""`python -m gangline.supervise.control VERB`: what is asked and ordered of a run on the computer that keeps it.

    alive RUN_FOLDER            -> {"alive": bool, "unfinished": [host]}
    stop|kill RUN_FOLDER        orders it to end
    leave RUN_FOLDER HOST...    asks it to go on without these hosts -> {"asked": [host]}
    reach < Cluster             -> {"reasons": [why a host cannot be reached from here]}

One line of JSON on stdout; {"error": ...} for what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
"""In what ssh's errors are called (gangline.transport.ssh_options)."""


def reasons(cluster: Cluster) -> list[str]:
    """Why hosts of the cluster cannot be reached from this one; tried all at once."""
    others = [host for host in cluster.hosts if host.transport != "local"]
    with ThreadPoolExecutor(max_workers=32) as pool:
        return [reason for reason in pool.map(_reason, others) if reason]


def _reason(host: Host) -> str | None:
    transport = connect(host)
    try:
        transport.home()
    except GanglineError as error:
        if NO_KEY in error.what:  # whoever reads it sits elsewhere
            return f"{host.name} lets no key of mine in (to be typed here: {error.fix.partition(';')[0]})"
        seen = error.seen.splitlines()[:1]
        return " ".join([error.what, *(f"({line.rstrip('.')})" for line in seen)])
    finally:
        transport.close()
    return None


def _is_known(words: Sequence[str]) -> bool:
    match list(words):
        case ["reach"] | ["alive" | "stop" | "kill", _] | ["leave", _, _, *_]:
            return True
        case _:
            return False


def _do(words: Sequence[str]) -> Mapping[str, object]:
    if list(words) == ["reach"]:
        return {"reasons": reasons(Cluster.from_json(json.loads(sys.stdin.buffer.read())))}
    verb, folder, *hosts = words
    layout = RunLayout.of(Path(folder))
    if verb == "leave":
        leave_run(layout, hosts=hosts)
        return {"asked": hosts}
    if verb in {"stop", "kill"}:
        stop_run(layout, now=verb == "kill")
    return {"alive": is_alive(layout), "unfinished": unfinished(layout)}


def main(words: Sequence[str]) -> int:
    """Entry point."""
    os.umask(0o077)
    if not _is_known(words):
        sys.stderr.write(USAGE)
        return 2
    try:
        said = _do(words)
    except GanglineError as error:
        sys.stdout.write(json.dumps({"error": error.to_json()}) + "\n")
        return error.exit_code
    sys.stdout.write(json.dumps(said) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
