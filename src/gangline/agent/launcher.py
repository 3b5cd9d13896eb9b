"""Starting what a guard owns: one command, in a session of its own, with what a run needs in its environment."""

from __future__ import annotations

import os
import pkgutil
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Mapping

from gangline.agent import names
from gangline.agent.leases import TAG

SHIM = "rank_start.py"
"""What stands in front of the ranks of a program that is not ours; the request's command names it in our folder."""
OWN_PATH = "GANGLINE_OWN_PATH"
"""Set where Python's path was set for gangline's own sake: the command shall not see it."""


class StartFailed(Exception):
    """The guard does not stand; the text is what went wrong."""

    def __init__(self, what: str, *, seen: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.words = {"what": what, "seen": seen, "fix": fix}


def start(request: Mapping[str, Any], *, secrets: Mapping[str, str], descriptors: List[int]) -> int:
    """Start the command of a host's request; its pid. Raises StartFailed. secrets: more environment.

    Its words go to console.log in the request's folder. descriptors: those that it inherits.
    """
    folder = Path(request["folder"])
    env = {**_own_env(), **secrets, **request["env"], TAG: request["folder"]}
    if request.get("program") == "command":
        (folder / SHIM).write_bytes(pkgutil.get_data("gangline.agent", SHIM) or b"")
    try:
        with (folder / names.CONSOLE_LOG).open("ab") as console:
            child = subprocess.Popen(
                list(request["argv"]),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=request.get("cwd") or folder,
                start_new_session=True,
                pass_fds=descriptors,
            )
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else request["argv"][0]
        raise StartFailed("the guard did not start", seen=f"cannot start {name}: {error.strerror}") from error
    child.returncode = 0  # waitpid(-1) takes its exit code; Popen shall not wait for it
    return child.pid


def _own_env() -> Dict[str, str]:
    """Our environment without what is there for our own sake."""
    env = dict(os.environ)
    own = env.pop(OWN_PATH, None)
    if own is not None and env.get("PYTHONPATH") == own:
        del env["PYTHONPATH"]
    return env
