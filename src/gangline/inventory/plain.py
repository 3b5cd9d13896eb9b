"""Words of a host, before anybody shows them."""

from __future__ import annotations


def plain(text: str) -> str:
    """A text of a host without what could steer a terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
