"""Names of models on the Hugging Face hub."""

from __future__ import annotations

import re

_PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
MOST_CHARS = 96
"""Of a whole name, as huggingface_hub allows (`validate_repo_id`)."""


def is_hub_name(text: str) -> bool:
    """Whether a text has the form of a model's name on the hub, `owner/name` or `name`; else it is a folder."""
    is_refused = len(text) > MOST_CHARS or ".." in text or "--" in text or text.endswith(".git")
    return bool(_NAME.fullmatch(text)) and not is_refused
