"""`python -m gangline.agent VERB ...`, or `python <zipapp> VERB ...`: the programs that run on a host.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Callable

from gangline.agent.verbs import answer

PROGRAMS = {
    "attached": "rpc.attached:attached_main",
    "channel": "rpc.server:main",
    "foreground": "supervise.foreground:main",
    "host-agent": "supervise.host_agent:main",
    "python": "rpc.attached:python_main",
    "ray": "supervise.ray_node:main",
    "trees": "provision.tree_stream:main",
}
"""Verbs with a protocol of their own: `module:function`, called as `function(argv) -> int`."""
ANSWERS = {
    "claim": "provision.claim:claim_folders",
    "connect": "netprobe.free_ports:connect",
    "digests": "provision.digests:digests",
    "discard": "provision.claim:discard",
    "disk": "host_facts.paths:disk",
    "environment": "provision.build_environment:environment",
    "facts": "host_facts.collect:short_facts",
    "free-port": "netprobe.free_ports:free",
    "lay": "provision.put:lay_project",
    "left": "supervise.left:left",
    "listen": "netprobe.listen:listen",
    "place": "provision.put:place",
    "reach": "netprobe.reach:ask_all",
    "room": "supervise.room:room",
    "reserve": "supervise.leases:reserve",
    "sample": "host_facts.samples:sample",
    "send": "provision.send:send",
    "shared": "host_facts.paths:shared",
    "stacks": "supervise.stacks:stacks_by_rank",
    "vote": "supervise.voting:vote",
}
"""Verbs that answer a JSON request on stdin (`gangline.agent.verbs`): `module:function`."""


def main(argv: list[str]) -> int:
    """Run a verb; its exit code, 2 for one that is not in the tables."""
    verbs = {**PROGRAMS, **ANSWERS}
    if not argv or argv[0] not in verbs:
        sys.stderr.write(f"usage: gangline.agent VERB ...; verbs: {', '.join(sorted(verbs))}\n")
        return 2
    os.umask(0o077)
    return load(argv)(argv[1:])


def load(argv: list[str]) -> Callable[[list[str]], int]:
    """The program of a verb, with its module loaded; raises LookupError for one that is not in the tables."""
    if argv[0] in PROGRAMS:
        program: Callable[[list[str]], int] = _named(PROGRAMS[argv[0]])
        return program
    function = _named(ANSWERS[argv[0]])
    return lambda _words: answer(function)


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module("gangline.agent." + module), name)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that hangs on a dead file server or a dead driver shall not keep us
