"""A request as commands to read and to paste."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable

from gangline.launch.backend import LaunchRequest

SECRET = re.compile(
    r"(^|_)(TOKENS?|KEYS?|SECRETS?|PASS|CREDENTIALS?)(_|$)|_PWD$|(API|ACCESS|PRIVATE|AUTH)(KEY|TOKEN)|PASSWORD|PASSWD|SSHPASS",
    re.IGNORECASE,
)
"""Names of variables whose values are not shown."""
_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def printed(request: LaunchRequest) -> list[str]:
    """The command of every host, with its variables; values of variables that look secret are left out."""
    lines = []
    for part in request.hosts:
        env = [f"{name}={'***' if SECRET.search(name) else quoted(value)}" for name, value in part.env.items()]
        lines += [f"# {part.host}", " ".join([*env, joined(part.argv)])]
    return lines


def joined(words: Iterable[str]) -> str:
    """Words as a shell takes them, on one line."""
    return " ".join(map(quoted, words))


def quoted(word: str) -> str:
    """One word as a shell takes it; what would steer a terminal in the dollar quotes of bash, zsh and ksh."""
    if word.isprintable():
        return shlex.quote(word)
    return f"$'{''.join(map(_escaped, word))}'"


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    is_byte = "\udc80" <= character <= "\udcff"  # of a word that is no text
    data = character.encode("utf-8", "surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in data)


def orders(request: LaunchRequest, *, now: bool) -> list[str]:
    """What an order to end would do on every host."""
    patience = f"save, leave, and be ended once nothing has moved for {request.hosts[0].grace_s:.0f} s"
    deed = "end the ranks without saving" if now else patience
    return [f"{part.host}: {deed} (through {part.folder})" for part in request.hosts]


def leave_orders(request: LaunchRequest, hosts: Collection[str]) -> list[str]:
    """What becomes of every host where some are asked to leave a run."""
    stays = f"save, and go on in attempt {request.attempt + 1}"
    deeds = {part: "save, leave, and take no part any more" if part in hosts else stays for part in request.names}
    return [f"{part.host}: {deeds[part.host]} (through {part.folder})" for part in request.hosts]
