"""Texts without secrets, and with stand-ins for the names and addresses of people and machines. Pure.

The same name always gets the same stand-in, so that a text still tells which lines are of one host.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gangline.units import is_address

SECRET = "<secret>"  # noqa: S105  (the stand-in)
LEAST_CHARS = 8
"""A shorter value of a variable is no secret that could be recognised in a text."""

_NAMED = r"[\w-]{0,40}(?:token|secret|password|passwd|credentials?|api[_-]?key|access[_-]?key|private[_-]?key)"
SECRET_NAME = re.compile(_NAMED, re.IGNORECASE)
"""The name of a variable or key whose value is a secret."""
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}|xox[abp]-[\w-]{10,}"
    r"|AKIA[A-Z0-9]{16}|wandb_v1_\w{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
_ASSIGNED = re.compile(
    rf"(?P<name>\b{_NAMED})(?P<between>[\"']?\s{{0,4}}[=:]\s{{0,4}}[\"']?)(?P<value>(?=[^\s\"',}}]*[A-Za-z])[^\s\"',}}{{\[]{{8,}})",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?P<name>\b(?:Bearer|Basic) )(?P<value>[\w.+/=-]{8,})")
_IN_URL = re.compile(r"(?P<name>\b[a-z][a-z0-9+.-]{1,20}://)(?P<value>[^\s/@:]{1,100}:[^\s/@]{1,200})(?=@)")
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.{0,10000}?-----END [A-Z ]{0,40}PRIVATE KEY-----", re.DOTALL
)
_PUBLIC_KEY = re.compile(r"\b(?:ssh-[a-z0-9]{2,12}|ecdsa-[\w-]{2,30}|sk-ssh-[\w@.-]{2,40}) AAAA[\w+/]{16,1000}={0,3}")
_MAIL = re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,5}\.[A-Za-z]{2,24}\b")
_MAC = re.compile(r"\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}\b")
_V4 = re.compile(r"(?<![\w.-])(?<!==)(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)")
_V6 = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,8}(?![\w:])")
_HOME = re.compile(r"(?P<before>/(?:home|Users)/)(?P<user>[\w.-]{1,64})")
_LOGIN = re.compile(r"(?P<user>\b[A-Za-z_][\w.-]{0,63})(?=@(?:host|10\.\d|fd00:)[-\d.:])")
_FORMS: Mapping[str, Callable[[int], str]] = {
    "secret": lambda _number: SECRET,
    "host": lambda number: f"host-{number}",
    "user": lambda number: f"user-{number}",
    "mail": lambda number: f"person-{number}@example.org",
    "MAC": lambda number: f"02:00:00:00:{number // 256 % 256:02x}:{number % 256:02x}",
    "IPv4": lambda number: f"10.0.{number // 250 % 250}.{number % 250 + 1}",
    "IPv6": lambda number: f"fd00::{number:x}",
}
_OWN = frozenset({"localhost", "local", "here", "root", "pip", "git"})
"""Names that tell nothing."""


def secrets_of(variables: Mapping[str, str]) -> list[str]:
    """The values of variables whose names say that they are secrets."""
    return [value for name, value in variables.items() if SECRET_NAME.search(name)]


class Redaction:
    """Redacts the texts of one report."""

    def __init__(self, *, hosts: Iterable[str] = (), users: Iterable[str] = (), secrets: Iterable[str] = ()) -> None:
        """hosts: names of machines; users: of accounts; secrets: values that must not stand anywhere."""
        self.counts: dict[str, int] = {}
        """How many different values of each kind had to go."""
        self._stand_ins: dict[tuple[str, str], str] = {}
        self._secrets = sorted({each for each in secrets if len(each) >= LEAST_CHARS}, key=len, reverse=True)
        self._names = {
            name: self._stand_in("host", name)
            for name in dict.fromkeys(hosts)
            if name not in _OWN and not is_address(name)
        }
        self._users = {name: self._stand_in("user", name) for name in dict.fromkeys(users) if name not in _OWN}
        self._name_words = _words(self._names)
        self._user_words = re.compile(rf"(?<=[\s\"'/=:]){_words(self._users).pattern}(?=[@/\"'])")

    def secrets(self, text: str) -> str:
        """A text without the secrets of this report, and without what looks like one."""
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, self._secret(secret))
        text = _KEY_BLOCK.sub(lambda each: self._secret(each.group()), text)
        text = _TOKENS.sub(lambda each: self._secret(each.group()), text)
        for pattern in (_ASSIGNED, _BEARER, _IN_URL):
            text = pattern.sub(self._value, text)
        return text

    def text(self, text: str) -> str:
        """A text without what is private."""
        text = self.secrets(text)
        text = _PUBLIC_KEY.sub("<public key>", text)
        text = _MAIL.sub(lambda each: self._stand_in("mail", each.group()), text)
        text = _MAC.sub(lambda each: self._stand_in("MAC", each.group().lower()), text)
        text = _V6.sub(self._address, _V4.sub(self._address, text))
        text = self._name_words.sub(lambda each: self._names[each.group()], text)
        text = _HOME.sub(lambda each: each["before"] + self._user(each["user"]), text)
        text = self._user_words.sub(lambda each: self._users[each.group()], text)
        return _LOGIN.sub(lambda each: self._user(each["user"]), text)

    def document(self, value: Any) -> Any:
        """A JSON value with all its texts redacted; keys only where they are the name or address of a host."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._key(key): self._member(key, each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.document(each) for each in value]
        return value

    def lines(self, text: str) -> str:
        """A file of JSON lines; a line that is none is redacted as text."""
        return "\n".join(self._line(line) for line in text.split("\n"))

    def _line(self, line: str) -> str:
        try:
            return json.dumps(self.document(json.loads(line)))
        except (ValueError, RecursionError):
            return self.text(line)

    def _member(self, key: str, value: Any) -> Any:
        if isinstance(value, str) and SECRET_NAME.fullmatch(key) and len(value) >= LEAST_CHARS:
            return self._secret(value)
        if isinstance(value, str) and key in {"user", "username", "login"} and value not in _OWN:
            return self._user(value)
        return self.document(value)

    def _key(self, key: str) -> str:
        return self.text(key) if key in self._names or is_address(key) else key

    def _value(self, match: re.Match[str]) -> str:
        between = match.groupdict().get("between") or ""
        return f"{match['name']}{between}{self._secret(match['value'])}"

    def _secret(self, value: str) -> str:
        return value if value == SECRET else self._stand_in("secret", value)

    def _user(self, name: str) -> str:
        return name if name in _OWN or name.startswith("user-") else self._stand_in("user", name)

    def _address(self, match: re.Match[str]) -> str:
        """An address that leads to a machine becomes another one; so may a version of four numbers without `==`."""
        try:
            address = ipaddress.ip_address(match.group())
        except ValueError:
            return match.group()
        if address.is_loopback or address.is_unspecified or address.is_multicast:
            return match.group()
        return self._stand_in(f"IPv{address.version}", str(address))

    def _stand_in(self, kind: str, value: str) -> str:
        known = self._stand_ins.get((kind, value))
        if known is None:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            known = self._stand_ins[kind, value] = _FORMS[kind](self.counts[kind])
        return known


def _words(names: Iterable[str]) -> re.Pattern[str]:
    """One of the names as a whole word, the longest first."""
    parts = [re.escape(name) for name in sorted(names, key=len, reverse=True)]
    return re.compile(rf"(?<![\w.-])(?:{'|'.join(parts)})(?![\w-])" if parts else r"(?!)")
