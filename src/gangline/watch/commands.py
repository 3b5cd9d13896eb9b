"""A request as commands to read and to paste."""

from __future__ import annotations

import re
import shlex

from gangline.launch.backend import Request

_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)


def printed(request: Request) -> list[str]:
    """The command of every host, with its variables; values of variables that look secret are left out."""
    lines = []
    for part in request.hosts:
        env = [f"{name}={'***' if _SECRET.search(name) else shlex.quote(value)}" for name, value in part.env.items()]
        lines += [f"# {part.host}", " ".join([*env, shlex.join(part.argv)])]
    return lines


def orders(request: Request, *, now: bool) -> list[str]:
    """What an order to end would do on every host."""
    patience = f"save, leave, and be ended once nothing has moved for {request.hosts[0].grace_s:.0f} s"
    deed = "end the ranks without saving" if now else patience
    return [f"{part.host}: {deed} (through {part.folder})" for part in request.hosts]
