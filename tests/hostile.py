"""Words that a shell, ssh or a file system could take for something else; the same ones from the same seed."""

import random

PIECES = (
    "; touch {canary}",
    "$(touch {canary})",
    "`touch {canary}`",
    "| touch {canary}",
    "&& touch {canary} &",
    "\ntouch {canary}\n",
    "' ; touch {canary} ; '",
    '" ; touch {canary} ; "',
    "-oProxyCommand=touch {canary}",
    "-o",
    "--",
    "-rf",
    "~",
    "~root",
    "*",
    "?[a-z]",
    "{{a,b}}",
    "$HOME",
    "${{IFS}}",
    "%h%p%%",
    "!!",
    "!x",
    "\\",
    "\\\\'",
    "'",
    '"',
    "`",
    "\t",
    "\r",
    "\x1b]0;title\x07",
    "\x1b[2J",
    "\x7f",
    "\x01",
    " ",
    "",
    "é",
    "日本",
    "\u202e",
    "\U0001f600",
    "\udcff",
    "\udc80\udcc1",
    "=",
    "==",
    "a=b",
    "#",
    "()",
    "<x>{canary}",
    "..",
    "../..",
    ".",
    "plain",
    "%s%n",
    "%00",
)


def words(count, canary, *, seed=3):
    """Hostile words; each that would come true makes the file `canary`."""
    generator = random.Random(seed)
    return ["".join(generator.choices(PIECES, k=generator.randint(1, 4))).format(canary=canary) for _ in range(count)]


def names(count, *, seed=4):
    """Hostile names of files, each another."""
    generator = random.Random(seed)
    pieces = [piece.format(canary="canary") for piece in PIECES if "/" not in piece]
    made = {f"{''.join(generator.choices(pieces, k=3))}{number}" for number in range(count)}
    return sorted(made, key=lambda name: name.encode("utf-8", "surrogateescape"))
