"""How this supervisor can be started again, told to the guard beside it."""

from __future__ import annotations

import dataclasses
import os
import sys

from gangline.launch.backend import HostRequest, Request, SupervisorWords
from gangline.runs.cluster import Cluster
from gangline.runs.layout import RunLayout

KEPT = ("PATH", "HOME", "PYTHONPATH", "PYTHONSAFEPATH", "GANGLINE_OWN_PATH", "GANGLINE_HOME", "SSH_AUTH_SOCK")
"""Variables that it needs to find its code, and the ways to other hosts."""


def reviving(request: Request, cluster: Cluster, layout: RunLayout) -> Request:
    """The same request; guards on this computer know how to start the supervisor of the run again.

    Only one of them: two would start two.
    """
    here = next((host.name for host in cluster.hosts if host.transport == "local" and host.name in request.names), None)
    words = SupervisorWords(
        argv=(sys.executable, "-m", "gangline.supervise", str(layout.folder), str(request.attempt), "--detach"),
        env={name: os.environ[name] for name in KEPT if name in os.environ},
        folder=str(layout.folder),
    )
    return dataclasses.replace(
        request, hosts=tuple(_told(part, words, is_here=part.host == here) for part in request.hosts)
    )


def _told(part: HostRequest, words: SupervisorWords, *, is_here: bool) -> HostRequest:
    return dataclasses.replace(part, supervisor=words) if is_here else part
