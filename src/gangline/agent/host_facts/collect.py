"""`facts`: what this host is, has and allows. One JSON request on stdin, one JSON object on stdout; changes nothing.

Request: {"workdir": PATH, "python_argv": [WORD, ...] or null, "python_env": {NAME: VALUE}, "names": [NAME, ...],
          "shared": [FOLDER, ...], "files": [FILE, ...]}
Every section of the answer stands for itself: one that fails or hangs is {"error": TEXT} and spoils no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from gangline.agent import machine_leases
from gangline.agent.bounded import stretched
from gangline.agent.host_facts.interfaces import nics, rdma, routes
from gangline.agent.host_facts.nvidia import gpus, topology
from gangline.agent.host_facts.other_gpus import other_gpus
from gangline.agent.host_facts.packages import packages, programs
from gangline.agent.host_facts.paths import storage
from gangline.agent.host_facts.system import limits, names, system, variables

SCHEMA_VERSION = 2
TOTAL_S = 11.0
"""All sections together; they are read at the same time. More on a busy host."""
ANSWER_BYTES = 1 << 20
FILE_BYTES = 1 << 16
NUM_FILES = 32


def files(request: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Small files that the controller wants to read, such as a topology for NCCL."""
    asked = [str(path) for path in request.get("files") or []]
    if named := os.environ.get("NCCL_TOPO_FILE"):
        asked.append(named)
    return [_file(path) for path in list(dict.fromkeys(asked))[:NUM_FILES]]


def _file(path: str) -> Dict[str, Any]:
    try:
        with Path(path).expanduser().open("rb") as stream:
            data = stream.read(FILE_BYTES + 1)
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows the home folder
        return {"path": path, "error": getattr(error, "strerror", None) or str(error)}
    if len(data) > FILE_BYTES:
        return {"path": path, "error": f"larger than {FILE_BYTES} bytes"}
    digest = hashlib.blake2b(data, digest_size=32).hexdigest()
    return {"path": path, "digest": digest, "text": data.decode("utf-8", "replace")}


SECTIONS: Dict[str, Callable[[Dict[str, Any]], Any]] = {
    "system": system,
    "names": names,
    "nics": nics,
    "routes": routes,
    "rdma": rdma,
    "gpus": gpus,
    "other_gpus": other_gpus,
    "leases": machine_leases.rows_of_others,
    "topology": topology,
    "storage": storage,
    "limits": limits,
    "variables": variables,
    "programs": programs,
    "packages": packages,
    "files": files,
}


def facts(request: Dict[str, Any], *, total_s: Optional[float] = None) -> Dict[str, Any]:
    """Every section, read at the same time."""
    total_s = stretched(TOTAL_S) if total_s is None else total_s
    found: Dict[str, Any] = {}

    def read(name: str) -> None:
        try:
            found[name] = SECTIONS[name](request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other sections are worth having
            found[name] = {"error": f"{type(error).__name__}: {error}"[:1000]}

    threads = [threading.Thread(target=read, args=(name,), daemon=True) for name in SECTIONS]
    deadline = time.monotonic() + total_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = {"error": f"no answer within {total_s:g} s"}
    return {"schema_version": SCHEMA_VERSION, **{name: found.get(name, late) for name in SECTIONS}}


def short_facts(request: Dict[str, Any]) -> Dict[str, Any]:
    """The verb."""
    return shortened(facts(request))


def shortened(answer: Dict[str, Any]) -> Dict[str, Any]:
    """The answer without the sections that make it too long, the longest first."""
    while len(json.dumps(answer)) > ANSWER_BYTES:
        longest = max(SECTIONS, key=lambda name: len(json.dumps(answer[name])))
        answer = {**answer, longest: {"error": "too long to send"}}
    return answer
