"""GPU names taken apart: what people type, and what NVML says, as sets of words that can be compared."""

from __future__ import annotations

import functools
import re

_MAKERS = frozenset({"nvidia", "geforce", "rtx", "gtx", "tesla", "quadro"})
_NOISE = _MAKERS | {"gpu", "graphics", "card", "design", "with", "generation", "edition", "blackwell"}
"""Words that tell no two cards of the table apart."""
_SAME = {"mobile": "laptop", "notebook": "laptop", "s": "super", "m": "laptop", "ws": "workstation", "spark": "gb10"}
_WEAK = frozenset({"laptop", "maxq", "ti", "super", "sxm", "pcie", "nvl", "pro", "ada", "sff", "workstation", "server"})
"""Words that say something of a card, but not which one it is."""


@functools.lru_cache(maxsize=1024)
def words(text: str) -> frozenset[str]:
    """The words that identify a card: "GeForce RTX 4070 Ti SUPER", "rtx4070tisuper" -> 4070, ti, super."""
    plain = re.sub(r"max[-_ ]?q", " maxq ", text.lower())
    plain = re.sub(r"[^a-z0-9]+", " ", plain)
    plain = re.sub(rf"\b({'|'.join(_MAKERS)})(?=[a-z]*\d)", r"\1 ", plain)
    plain = re.sub(r"\b(\d{4})(?=[a-z])", r"\1 ", plain)
    plain = re.sub(r"\b(ti|super)(?=(super|laptop|mobile)\b)", r"\1 ", plain)
    plain = re.sub(r"\b(\d+) ?(?:gb?|gib)\b", r"\1gb", plain)
    plain = re.sub(r"\bsxm\d?\b", "sxm", plain)
    plain = plain.replace("dgx spark", "spark")
    return frozenset(_SAME.get(word, word) for word in plain.split()) - _NOISE


def is_memory(word: str) -> bool:
    """Whether a word is a size, such as "80gb"."""
    return re.fullmatch(r"\d+gb", word) is not None


def naming(wanted: frozenset[str]) -> frozenset[str]:
    """The words among them that say which card it is: "4070", not "laptop" or "80gb"."""
    return frozenset(word for word in wanted if word not in _WEAK and not is_memory(word))
