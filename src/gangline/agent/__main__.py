"""`python -m gangline.agent VERB ...`, or `python <zipapp> VERB ...`: the programs that run on a host.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import importlib
import sys
from typing import Callable

PROGRAMS = {
    "attached": "rpc.attached:attached_main",
    "channel": "rpc.server:main",
    "claim": "provision.claim:main",
    "connect": "netprobe.free_ports:connect_main",
    "digests": "provision.digests:main",
    "disk": "host_facts.paths:disk_main",
    "environment": "provision.build_environment:main",
    "facts": "host_facts.collect:main",
    "foreground": "supervise.foreground:main",
    "host-agent": "supervise.host_agent:main",
    "lay": "provision.put:lay_main",
    "left": "supervise.left:main",
    "listen": "netprobe.listen:main",
    "place": "provision.put:place_main",
    "ports": "netprobe.free_ports:ports_main",
    "python": "rpc.attached:python_main",
    "reach": "netprobe.reach:main",
    "send": "provision.send:main",
    "shared": "host_facts.paths:shared_main",
    "stacks": "supervise.stacks:main",
    "trees": "provision.tree_stream:main",
}
"""What each verb runs: `module:function`, called as `function(argv) -> int`. A module is loaded when its verb is
asked for.
"""


def main(argv: list[str]) -> int:
    """Run a verb; its exit code, 2 for one that is not in the table."""
    if not argv or argv[0] not in PROGRAMS:
        sys.stderr.write(f"usage: gangline.agent VERB ...; verbs: {', '.join(sorted(PROGRAMS))}\n")
        return 2
    code: int = load(argv)(argv[1:])
    return code


def load(argv: list[str]) -> Callable[[list[str]], int]:
    """The function of a verb; raises LookupError for one that is not in the table."""
    module, _, name = PROGRAMS[argv[0]].partition(":")
    function: Callable[[list[str]], int] = getattr(importlib.import_module("gangline.agent." + module), name)
    return function


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
