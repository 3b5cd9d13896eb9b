"""What the words of an error tell by their form, whatever program writes them: object, value, numbers. Pure.

The forms are those of languages, systems and tensors (an errno of POSIX, an exception of Python, two shapes that do not
fit), not those of one message: they stand in `error_forms.toml`. What one of them tells stands before what the class of
the error means.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import tomli

VALUE_CHARS = 160
"""Of a value of an error that is shown."""
TOLD_CHARS = 600
_TEXT_CHARS = 4_000
"""Of an error in which its form is looked for: what tells something stands at its beginning."""
_NEAR = 0.6
"""So much alike a name has to be to be shown as the one that was meant."""
_MOST_NAMES, _NAME_CHARS = 12, 60
"""Names of a list that are shown; a longer one is no name."""
_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d{1,7})(?:, in ([\w.<>]{1,80}))?')
_NOT_OWN = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|^<|[/\\]bin[/\\][\w-]{1,40}$")
_TRACEBACK = "raceback (most recent call last)"
_QUOTED = re.compile(r"['\"`]([^'\"`\n]{1,80})['\"`]")
_OPENED = re.compile(r"(?:open|load|Path)\(['\"]([^'\"\n]{1,80})")
_MEANT = re.compile(r"[Dd]id you mean:? ['\"`]?([\w.-]{1,80})")
_PATHS = (
    re.compile(r"['\"\u2018]([^'\"\u2019\n]{1,300})['\"\u2019]"),
    re.compile(r"([\w.~*+-]{0,100}/[^\s'\":,]{1,300})"),
    re.compile(r"^([^\s:]{1,200})$"),
)
"""Where a program names what it speaks of: in quotes, else as a path, else as a word alone."""
_PROGRAM = re.compile(r"^[\w./~+-]{1,200}: (?:line \d{1,7}: )?")
"""Before what a program says: its own name, and the line of a script."""
_MISSING = "No such file or directory"


@dataclass(frozen=True, slots=True)
class WordsTold:
    """What the words of an error tell: what is wrong, and what to do about just that."""

    means: str
    fix: str


@dataclass(frozen=True, slots=True)
class OwnCall:
    """The last call of a traceback that stands in the user's own code, as far as the lines show it."""

    place: str
    """The file with its folder, and the line: `llm/train.py, line 12`."""
    function: str
    """Empty for the body of a file."""
    code: str
    is_last: bool
    """The error was raised in that line itself, and in no library below it."""


@dataclass(frozen=True, slots=True)
class _Error:
    """An error whose words have a known form."""

    match: re.Match[str]
    text: str
    code: str
    """The line of the user's code that raised it; empty where it is not known."""


@dataclass(frozen=True, slots=True)
class _Form:
    pattern: re.Pattern[str]
    looks: Callable[[_Error], WordsTold | None]


@dataclass(frozen=True, slots=True)
class _Forms:
    forms: tuple[_Form, ...]
    system: Mapping[str, tuple[str, str]]
    """Words of an errno (`strerror`), and two of shells: what they say of a path, and what to do."""
    of_python: re.Pattern[str]
    of_program: re.Pattern[str]


def words_told(text: str, code: str = "") -> WordsTold | None:
    """What an error tells by the form of its words; None where they have none of the known forms.

    text: the exception with its class, or the line of a program. code: the line of the user's code that raised it.
    """
    forms, text = _forms(), text[:_TEXT_CHARS]
    if found := forms.of_python.search(text):
        # of a file that is to get another name, it is the old one that is missing: another rank has renamed it
        return _told(*forms.system[found[1]], found[2] if found[1] == _MISSING else found[3] or found[2])
    for form in forms.forms:
        if (match := form.pattern.search(text)) and (told := form.looks(_Error(match, text, code))):
            return told
    if (found := forms.of_program.match(text)) and (named := _named(found[1])):
        return _told(*forms.system[found[2]], named)
    return None


def _named(words: str) -> str:
    """What the words of a program before those of the system are about; a word alone may be a call, such as `bind`."""
    said = _PROGRAM.sub("", words)
    if said == words and not re.search(r"[./]", words):
        return ""
    return next((found[-1] for pattern in _PATHS if (found := pattern.findall(said))), "")


def own_call(lines: Sequence[str]) -> OwnCall | None:
    """The last call in the user's own code, in the lines of a traceback above its exception; None where none is."""
    is_last = True
    for at in range(len(lines) - 1, -1, -1):
        if _TRACEBACK in lines[at]:
            return None
        if frame := _FRAME.search(lines[at]):
            if _NOT_OWN.search(frame[1]):
                is_last = False
                continue
            below = lines[at + 1].strip() if at + 1 < len(lines) else ""
            code = "" if _FRAME.search(below) or not below.strip("^~ ") else below[:VALUE_CHARS]
            name = "/".join(re.split(r"[/\\]", frame[1])[-2:])
            return OwnCall(f"{name}, line {frame[2]}", (frame[3] or "").replace("<module>", ""), code, is_last)
    return None


@functools.cache
def _forms() -> _Forms:
    read: dict[str, Any] = tomli.loads(
        resources.files(__package__).joinpath("error_forms.toml").read_text(encoding="utf-8")
    )
    system = {words: (row["means"], row["fix"]) for words, row in read["system"].items()}
    words = "|".join(map(re.escape, system))
    return _Forms(
        forms=tuple(_Form(re.compile(row["pattern"]), _look(row)) for row in read["form"]),
        system=system,
        of_python=re.compile(
            rf"(?:\[Errno \d{{1,3}}\]|Error:) ({words}): "
            r"b?['\"]?([^'\"\n]{1,400})['\"]?(?: -> ['\"]([^'\"\n]{1,400}))?"
        ),
        of_program=re.compile(rf"^(.{{1,500}}?): ({words})(?: \(\d{{1,3}}\))?\.?$"),
    )


def _look(row: Mapping[str, str]) -> Callable[[_Error], WordsTold | None]:
    return _LOOKS[row["looks"]] if "looks" in row else lambda error: _told(row["means"], row["fix"], *_groups(error))


def _groups(error: _Error) -> list[str]:
    """What stands in a form's places; of a pattern with alternatives the first is the one that matched."""
    groups = error.match.groups("")
    return [next(filter(None, groups), ""), *groups[1:]]


def _told(means: str, fix: str, *values: str) -> WordsTold:
    shown = [each[:VALUE_CHARS] for each in values]
    return WordsTold(means.format(*shown)[:TOLD_CHARS], fix.format(*shown)[:TOLD_CHARS])


def _keyword(error: _Error) -> WordsTold:
    hint = f" ({meant[1]} may be meant)" if (meant := _MEANT.search(error.text)) else ""
    return _told(
        "{0}() is given {1}, which is none of its arguments{2}",
        "take {1} out, or rename it as the installed version of {0} has it (help({0})); to a function or class of "
        "your own add it; where it comes from a configuration file, it is spelt wrongly there",
        *error.match.groups(),
        hint,
    )


def _attribute(error: _Error) -> WordsTold:
    owner, name = error.match.groups()
    if owner == "NoneType":
        asked = re.search(rf"([\w.\[\]()'\"]{{1,80}})\.{re.escape(name)}\b", error.code)
        return _told(
            "{0} is None where its {1} is asked for" if asked else "the {1} of None is asked for",
            "look where it is set, in the lines before: what was not found (a file, a key, an option) often gives None",
            asked[1] if asked else "",
            name,
        )
    hint = f" ({meant[1]} may be meant)" if (meant := _MEANT.search(error.text)) else ""
    return _told(
        "{0} has no {1}{2}",
        "the installed version of {0} names it otherwise or does not have it any more (pip show, its release notes), "
        "or the object is another one than the code expects: print(type(...)) just before that line",
        owner,
        name,
        hint,
    )


def _number(error: _Error) -> WordsTold:
    source = re.search(r"environ(?:\.get)?[\[(]['\"](\w{1,80})", error.code)
    return _told(
        "'{0}'{1} is not {2}, and the code reads it as one",
        "correct it where it is set: no comma, unit, quote or blank beside the number",
        error.match[1],
        f" in the environment variable {source[1]}" if source else "",
        "a whole number" if "int()" in error.text else "a number",
    )


def _choice(error: _Error) -> WordsTold | None:
    value, names = error.match[1].strip("'\"`"), _listed(error.match[2])
    if not names or value in names:
        return None
    near = difflib.get_close_matches(value, names, 1, _NEAR)
    return _told(
        "'{0}' is none of those that are there: {1}{2}",
        "write {3} in its place",
        value,
        ", ".join(names[:_MOST_NAMES]),
        f"; {near[0]} is nearest to it" if near else "",
        near[0] if near else names[0] if len(names) == 1 else "one of them",
    )


def _listed(text: str) -> list[str]:
    """The names in a list, quoted or not."""
    names = _QUOTED.findall(text) or re.split(r"[,|]|\bor\b|\band\b", re.sub(r"^[^:,|]{0,60}: ", "", text))
    bare = (each.strip(" []{}().'\"") for each in names)
    return [each for each in dict.fromkeys(bare) if each and len(each) <= _NAME_CHARS and " " not in each]


def _label(error: _Error) -> WordsTold:
    return _told(
        "a label is {0}, and the model has no class (or token) of that number: its classes end below it",
        "give the model at least {1} classes (num_labels, the width of its last layer, resize_token_embeddings), or "
        "correct the labels: numbers from 0, and -100 for what does not count, such as padding",
        error.match[1],
        str(int(error.match[1]) + 1),
    )


def _json(error: _Error) -> WordsTold:
    words, line, column, char = error.match.groups()
    name = f" ({opened[1]})" if (opened := _OPENED.search(error.code)) else ""
    if words == "Expecting value" and char == "0":
        return _told(
            "what is read as JSON{0} is empty, or no JSON from its first character on",
            "ls -l and head -c 200 of the file: an empty one was cut off by a save or a full disk: take it away or "
            "bring it again; a page of HTML or a Git LFS pointer: download it again",
            name,
        )
    if words == "Extra data":
        return _told(
            "what is read as JSON{0} goes on in line {1} after its first object has ended",
            "one object per line is JSON lines: json.loads for each line, or load_dataset('json', ...)",
            name,
            line,
        )
    return _told(
        "the JSON{0} is not valid in line {1}, column {2}: {3}",
        "correct it there (python -m json.tool FILE shows the place); where the file ends there, bring it again",
        name,
        line,
        column,
        _JSON_WORDS.get(words, words),
    )


_JSON_WORDS = {
    "Illegal trailing comma before end of object": "a comma before the closing }",
    "Illegal trailing comma before end of array": "a comma before the closing ]",
    "Expecting property name enclosed in double quotes": 'a comma before }, a comment, or a name without "',
    "Expecting ',' delimiter": "a comma that is missing before it, or a quote inside a text",
    "Unterminated string starting at": "a text that is not closed: the file may be cut off there",
}


def _toml(error: _Error) -> WordsTold:
    opened = _OPENED.search(error.code)
    return _told(
        "{3} is not valid in line {1}, column {2}: {0}",
        "look at line {1} of {3}: texts stand in quotes that are closed in the same line, and true is written small",
        *error.match.groups(),
        opened[1] if opened else "the TOML file",
    )


def _divisor(error: _Error) -> WordsTold:
    by = re.search(r"(?://|/|%)=?\s*\(?([\w.\[\]]{1,60}(?:\([\w., ]{0,60}\))?)", error.code)
    return _told(
        "{0} is 0, and the code divides by it" if by else "the code divides by a number that is 0",
        "mostly a count that came out as 0: a dataset, or the shard of a rank, with fewer rows than one batch "
        "(drop_last), steps per epoch, or a length: print it on that rank, and give every rank at least one batch",
        by[1] if by else "",
    )


def _environment(error: _Error) -> WordsTold | None:
    if not re.search(r"environ|getenv", error.code):
        return None
    return _told(
        "the environment variable {0} is not set in this process",
        "export {0} where the ranks are started, on every host: a launcher and ssh do not hand all variables on "
        "(mpirun -x, srun --export; torchrun hands on those of its own shell)",
        error.match[1],
    )


def _source(error: _Error) -> WordsTold:
    header = re.match(r"([\w./+-]{1,120}\.(?:h|hpp|cuh|hxx)): No such file", error.match[3])
    if header:
        return _told(
            "the header {0}, which {1} includes, is not there",
            "install the development package that has it (apt-file search {0}), or give its folder with -I",
            header[1],
            error.match[1],
        )
    return _told("{0}, line {1}, does not compile: {2}", "correct it there, then build again", *error.match.groups())


_LOOKS: Mapping[str, Callable[[_Error], WordsTold | None]] = {
    "attribute": _attribute,
    "choice": _choice,
    "divisor": _divisor,
    "environment": _environment,
    "json": _json,
    "keyword": _keyword,
    "label": _label,
    "number": _number,
    "source": _source,
    "toml": _toml,
}
"""Forms that look closer than at their groups, by the name in `error_forms.toml`."""
