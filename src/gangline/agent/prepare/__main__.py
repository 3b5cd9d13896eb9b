"""The host half of `gangline prepare` as a program of its own: `python FILE VERB ...`, VERB being one of PROGRAMS.

It travels only where `prepare` asks for it (`gangline.transport.bootstrap`), with what it needs of the agent.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, List

from gangline.agent.verbs import answer

PROGRAMS = {
    "answer": "preparation:prepare",
    "revert-at-boot": "revert_timer:boot_main",
    "revert-timer": "revert_timer:timer_main",
}
"""`answer` takes a JSON request on stdin (`gangline.agent.verbs`); the others are called as `function(argv) -> int`."""


def main(argv: List[str]) -> int:
    """Run one of PROGRAMS; its exit code."""
    module, _, name = PROGRAMS[argv[0]].partition(":")
    os.umask(0o077)
    function: Any = getattr(importlib.import_module("gangline.agent.prepare." + module), name)
    return answer(function) if argv[0] == "answer" else int(function(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
