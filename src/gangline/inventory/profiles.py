"""How fast devices were at which work, as it was measured: `<home>/profiles/<key>-<host>.json`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gangline.planning.calibrate import SCHEMA_VERSION, Profile, ProfileKey
from gangline.runs.files import read_json, write_json


def profile_path(home: Path, profile: Profile) -> Path:
    """Where it is kept."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", profile.host)
    return home / "profiles" / f"{profile.key.name}-{host}.json"


def save_profile(home: Path, profile: Profile) -> Path:
    """Keep it, in the place of an earlier one of the same host and work."""
    path = profile_path(home, profile)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(path, profile.to_json())
    return path


def load_profiles(home: Path) -> list[Profile]:
    """All that are kept, newest first; what is not ours, or of another version, counts as none."""
    found = [_read(path) for path in sorted((home / "profiles").glob("*.json"))]
    return sorted((each for each in found if each is not None), key=lambda each: each.measured, reverse=True)


def find_profile(profiles: Sequence[Profile], wanted: ProfileKey, *, host: str | None = None) -> Profile | None:
    """The newest one that holds for what is asked; that of the host itself comes first.

    Words of `wanted` that are empty ask for nothing. A processor's speed holds for its own host only: "cpu" may be any.
    """
    known = [each for each in profiles if each.key.meets(wanted)]
    own = [each for each in known if each.host == host]
    others = [] if wanted.gpu in {"", "cpu"} else known
    return next(iter(own or others), None)


def _read(path: Path) -> Profile | None:
    try:
        data = read_json(path)
        return Profile.from_json(data) if data.get("schema_version") == SCHEMA_VERSION else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
