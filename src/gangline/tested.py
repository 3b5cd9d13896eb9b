"""Which versions of other packages is gangline tested with?

The table is the only place with these numbers: a test compares pyproject.toml and constraints.txt with it, `gangline
check` warns of versions outside of it, `make versions` runs tests at both ends of it, and `worker/compat.py` names it
when a library has changed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """The versions of one package."""

    package: str
    accepted: str
    """The lowest version that pip accepts."""
    lowest: str
    """The lowest version with which tests were run."""
    newest: str
    """The newest version with which tests were run; constraints.txt pins it."""
    below: str
    """The first version that pip refuses."""
    reason: str
    """The reason for `below`."""

    @property
    def requirement(self) -> str:
        """The row of pyproject.toml, such as "peft>=0.18,<0.22"."""
        return f"{self.package}>={self.accepted},<{self.below}"

    def judge(self, version: str) -> str | None:
        """The word "older" or "newer" for a version outside of the range, otherwise None.

        A patch release of the newest tested version is inside: 2.13.1 beside 2.13.0.
        """
        found = _numbers(version)
        if not found:
            return None
        if found < _numbers(self.lowest):
            return "older"
        return "newer" if found[:2] > _numbers(self.newest)[:2] else None


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release, without zeros at the end: "5.3.0" is "5.3"."""
    found = re.match(r"\d+(\.\d+)*", version.strip())
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


_ZERO = "below 1.0 each minor release may change any name"
_MAJOR = "a major release may change any public name"

TESTED = (
    Tested(package="pydantic", accepted="2.10", lowest="2.10.0", newest="2.14.3", below="3", reason=_MAJOR),
    Tested(package="ruamel.yaml", accepted="0.18", lowest="0.18.0", newest="0.19.1", below="0.20", reason=_ZERO),
    Tested(package="typer", accepted="0.15", lowest="0.15.0", newest="0.29.2", below="0.30", reason=_ZERO),
    Tested(package="platformdirs", accepted="4.3", lowest="4.3.0", newest="4.14.5", below="5", reason=_MAJOR),
    Tested(package="packaging", accepted="24.2", lowest="24.2", newest="26.3", below="27", reason=_MAJOR),
    Tested(package="tomli", accepted="2.2", lowest="2.2.1", newest="2.5.0", below="3", reason=_MAJOR),
    Tested(package="pip", accepted="23.2", lowest="23.2.1", newest="26.3", below="27", reason=_MAJOR),
    Tested(package="uv", accepted="0.9", lowest="0.9.0", newest="0.13.9", below="0.14", reason=_ZERO),
    Tested(
        package="torch",
        accepted="2.10",
        lowest="2.13.0",
        newest="2.13.0",
        below="2.14",
        reason="worker/compat.py takes private names of torch.distributed, which minor releases change; "
        "2.10 to 2.12 have the same names, but tests were never run with them",
    ),
    Tested(
        package="transformers",
        accepted="5.3",
        lowest="5.3.0",
        newest="5.23.0",
        below="6",
        reason="5.0 replaced how weights are loaded and named; another major release may do so again",
    ),
    Tested(package="peft", accepted="0.18", lowest="0.18.0", newest="0.21.2", below="0.22", reason=_ZERO),
    Tested(package="accelerate", accepted="1.2", lowest="1.2.0", newest="1.15.0", below="2", reason=_MAJOR),
    Tested(
        package="bitsandbytes",
        accepted="0.50",  # 0.48 and 0.49 have no 8-bit optimizer on a CPU
        lowest="0.50.0",
        newest="0.50.2",
        below="0.51",
        reason="checkpoints hold its packed numbers and 8-bit states, whose layout belongs to no public promise",
    ),
    Tested(package="datasets", accepted="4.0", lowest="4.0.0", newest="5.2.0", below="6", reason=_MAJOR),
    Tested(package="safetensors", accepted="0.5", lowest="0.5.0", newest="0.8.0", below="0.9", reason=_ZERO),
    Tested(package="tokenizers", accepted="0.22.1", lowest="0.22.1", newest="0.23.3", below="0.24", reason=_ZERO),
    Tested(package="tensorboard", accepted="2.18", lowest="2.18.0", newest="2.21.0", below="3", reason=_MAJOR),
    Tested(
        package="deepspeed",
        accepted="0.19.8",  # with 0.19.0, 0.19.4, 0.19.6 and 0.19.7 the first loss is not a number on CPU ranks
        lowest="0.19.8",
        newest="0.19.8",
        below="0.20",
        reason="worker/compat.py takes a dozen of its private names, which minor releases change",
    ),
    Tested(package="optuna", accepted="4.0", lowest="4.0.0", newest="5.0.0", below="6", reason=_MAJOR),
    Tested(package="textual", accepted="8.0", lowest="8.0.0", newest="8.2.8", below="9", reason=_MAJOR),
    Tested(package="starlette", accepted="1.0", lowest="1.0.0", newest="1.10.0", below="2", reason=_MAJOR),
    Tested(package="uvicorn", accepted="0.35", lowest="0.35.0", newest="0.54.0", below="1", reason=_MAJOR),
    Tested(package="lm_eval", accepted="0.4.13", lowest="0.4.13", newest="0.4.13", below="0.5", reason=_ZERO),
)
"""Every package that gangline imports at run time, but for trackers, whose versions the Makefile has."""
BY_NAME = {each.package: each for each in TESTED}
