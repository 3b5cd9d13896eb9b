"""Text from hosts, models and data sets, made harmless for a terminal."""

from __future__ import annotations

import re

_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, erase
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC, DCS, SOS, PM, APC up to their end: titles, clipboard, hyperlinks
    r"|\x1b[ -/]*[0-~]",  # all other escapes
    re.DOTALL,
)

# C0 and C1 controls but tab and newline; marks that reverse or hide text (bidirectional overrides, zero width)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def clean(text: str, *, keep_newlines: bool = False) -> str:
    """Without escape sequences and control characters; tabs become spaces, newlines too unless they are kept."""
    text = _CONTROLS.sub("", _SEQUENCES.sub("", text)).replace("\t", "    ")
    return text if keep_newlines else text.replace("\n", " ")
