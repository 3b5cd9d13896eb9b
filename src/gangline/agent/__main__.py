"""`python -m gangline.agent VERB ...`, or `python <zipapp> VERB ...`: the programs that run on a host.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

MODULES = {
    "attached": "gangline.agent.attached",
    "channel": "gangline.agent.channel",
    "claim": "gangline.agent.claim",
    "connect": "gangline.agent.connect",
    "digests": "gangline.agent.digests",
    "disk": "gangline.agent.disk",
    "environment": "gangline.agent.environment",
    "facts": "gangline.agent.facts",
    "foreground": "gangline.agent.foreground",
    "guard": "gangline.agent.guard",
    "lay": "gangline.agent.lay",
    "left": "gangline.agent.left",
    "listen": "gangline.agent.listen",
    "place": "gangline.agent.place",
    "ports": "gangline.agent.ports",
    "python": "gangline.agent.python",
    "reach": "gangline.agent.reach",
    "send": "gangline.agent.send",
    "shared": "gangline.agent.shared",
    "stacks": "gangline.agent.stacks",
    "trees": "gangline.agent.trees",
}
"""What each verb runs: a module with `main(argv) -> int`. Loaded only when asked for: a channel starts in 20 ms."""


def main(argv: list[str]) -> int:
    """Run a verb; its exit code, 2 for one that is not in the table."""
    if not argv or argv[0] not in MODULES:
        sys.stderr.write(f"usage: gangline.agent VERB ...; verbs: {', '.join(sorted(MODULES))}\n")
        return 2
    code: int = load(argv).main(argv[1:])
    return code


def load(argv: list[str]) -> Any:
    """The module of a verb; raises LookupError for one that is not in the table."""
    return importlib.import_module(MODULES[argv[0]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
