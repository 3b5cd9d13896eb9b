"""`gangline ui`: a page in the browser about all runs."""

from __future__ import annotations

import getpass
import importlib.util
import os
import socket
import sys
from typing import Annotated

from gangline.cli.options import option
from gangline.cli.output import Terminal, print_data
from gangline.context import default_home
from gangline.errors import UsageError


def command(
    port: Annotated[int, option("port on 127.0.0.1; by default one that is free")] = 0,
) -> None:
    """Show all runs in the browser, until Ctrl-C: curves, ranks, hosts, events, logs, comparisons; stop and resume.

    It answers on 127.0.0.1 only, to browsers that opened the printed address, and loads nothing from elsewhere. From
    another computer, ssh brings the port there. It needs gangline[ui].
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}", seen="expected 0 to 65535", fix="leave it out for a port that is free")
    _require_packages()
    from gangline.page.web import PageKeys, listen, serve

    listener, keys, console = listen(port), PageKeys(), Terminal()
    number = listener.getsockname()[1]
    print_data([f"http://127.0.0.1:{number}/?token={keys.token}"])
    console.report("open this address in a browser of this computer; who has it can stop your runs. Ctrl-C ends it")
    place = f"{getpass.getuser()}@{socket.gethostname()}"
    console.commands(
        "from another computer, bring the port there first, then open the same address:",
        f"ssh -N -L {number}:127.0.0.1:{number} {place}",
    )
    if any(os.environ.get(name) for name in ("SSH_CONNECTION", "SSH_CLIENT")):
        console.report("you are here over ssh: type that command on the computer in front of you")
    serve(default_home(), listener, keys)


def _require_packages() -> None:
    if lacking := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"{' and '.join(lacking)} cannot be imported, which gangline ui needs",
            seen=f"not among the packages of {sys.executable}",
            fix="into that Python: pip install 'gangline[ui]'",
        )
