"""The table of known failures as a whole: that of `signatures.py`, and the families of `failures/*.toml`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

import tomli

from gangline.diagnose.signatures import SIGNATURES, Signature

RANKS = "ranks"
"""The family of the table in `signatures.py`."""
ERRORS = "errors"
"""The family of classes of errors: tried in their order, and only on an exception that no other row knows."""


@functools.cache
def families() -> Mapping[str, Mapping[str, Signature]]:
    """All known failures by family and id; the files are read once."""
    found = {RANKS: SIGNATURES}
    for file in sorted(resources.files(__package__).joinpath("failures").iterdir(), key=lambda each: each.name):
        if file.name.endswith(".toml"):
            rows = tomli.loads(file.read_text(encoding="utf-8"))
            found[file.name.removesuffix(".toml")] = {name: _signature(row) for name, row in rows.items()}
    return MappingProxyType(found)


@functools.cache
def known_failures() -> Mapping[str, Signature]:
    """All known failures by id."""
    return MappingProxyType({name: row for family in families().values() for name, row in family.items()})


def _signature(row: Mapping[str, object]) -> Signature:
    """A row of a file; TypeError for a key that `Signature` does not have."""
    return Signature(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})  # type: ignore[arg-type]
