"""Finding known failures in logs of any size, and the errors in them that nobody knows. Pure.

A log is read once, in pieces. Lines that differ in digits only are looked at once: which known words stand in such a
line. Patterns are tried only in lines that have a word of theirs, and in the lines below where they go over several.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gangline.diagnose.corpus import ERRORS, families, known_failures
from gangline.diagnose.error_words import own_call, words_told
from gangline.diagnose.log_context import last_words, ranks_apart, stood_at, too_high_rate, view_of_a_part, zero_rate
from gangline.diagnose.signatures import LEVELS, RAISED, THEN_CHARS, Level, Signature, after_head, filled, head_of

LINE_CHARS = 400
"""Of a line that is shown."""
MOST_RAISED = 5
"""Errors that nobody knows which are kept: the last ones."""

_AHEAD = 40
"""Lines that a match may reach beyond the line in which it begins."""
_BEHIND = 400
"""Lines that are kept of those before a line: one of them has its time."""
_ASSERTED_ABOVE = 3
"""So many lines above a bare AssertionError its condition stands."""
_WINDOW = 16 << 10
"""Bytes of a line, or of lines together, in which a pattern is tried at a time."""
_MOST_CLASSED = 1_000
"""Of so many kinds of exceptions that no row knows the class is looked for: it takes a millisecond."""
_MOST_SHAPES, _MOST_SHAPE_BYTES = 100_000, 2_000
"""How many kinds of lines are remembered, and of which length."""

_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_NO_DIGITS = str.maketrans("123456789", "000000000")
_WORD = re.compile(rb"[A-Za-z]{4,}")
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "error Error failed Failed with from that this have been cannot could while when file line rank warning "
        "RuntimeError ValueError TypeError OSError ImportError AssertionError Exception WARN WARNING",
    )
)
"""Words that say little: a pattern is looked up by another one, if it has one."""
_ESCAPED = re.compile(r"\\[^snWD]")
_ENDS = re.compile(r"\\[snWD]")
_CLASS = re.compile(r"\[(\^?)((?:\\.|[^\]])*)\]")
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-_])")
_RAISED = re.compile(RAISED.encode())
_CLASS_AT_START = re.compile(rb"(?:\[\w+\]:? ?|[\w.-]{1,60}: )?((?:[a-z_]\w{0,60}\.){1,8}[A-Z]\w{2,60}:[^\n]{0,2000})")
"""An exception whose class does not end in Error, as a line of a traceback has it: `pyarrow.lib.ArrowInvalid: ...`."""
_IN_A_FILE, _MORE_LINES = re.compile(rb'\s{2,8}in "[^"\n]{1,300}", line \d'), 3
"""An error goes on in the lines below it: the file and the line of which it speaks."""
_ASSERTED = re.compile(rb"(?:^|\s)(assert\s[^\n]{1,300})")
"""The line of code whose condition does not hold: it stands above a bare AssertionError."""
_TIME = re.compile(rb"(20\d\d-[01]\d-[0-3]\d)[T _]([0-2]\d:[0-5]\d:[0-6]\d)(?:[.,](\d{1,6}))?")
_BARE_CLASS = re.compile(rb"(?:\[\w+\]:? ?)?([A-Z][a-z]+[A-Z]\w{2,60}: [^\n]{1,2000})")
"""The same without its module, as a notebook has it."""
_SAID = re.compile(
    rb"(?:^|[\s\]:])((?:[Ff]atal [Ee]rror|[Ee]rror|ERROR|FATAL|[Ff]atal)(?: response from daemon)?: {1,4}"
    rb"[A-Za-z'\"`/<\[(][^\n]{12,2000}|NCCL WARN [^\n]{8,2000})"
    rb"|what\(\): {1,4}([^\n]{8,2000})|(?:\[ERROR\]|\bERROR\b)[^\n]{0,60}?[\])|:-] {1,4}([A-Z'\"`/<(!*][^\n]{12,2000})"
    rb"|\s(Check failed: [^\n]{4,2000})"
    rb"|(?:^|[\s)])[EF](?:\d{4} [\d:.]{8,20} {1,6}\d{1,9})? [\w./]{4,100}:\d{1,5}\] ([^\n]{12,2000})"
)
"""An error of a program that is not Python's."""
_DONE_WITHOUT = re.compile(rb"(?:ERROR: )?(?:Ignor|Skipp)(?:ed|ing)\b")
"""A program went on without something."""
_LOGGED = re.compile(rb"(?:^|[\s)])[EF](?:\d{4} [\d:.]{8,20} {1,6}\d{1,9})? [\w./]{4,100}:\d{1,5}\] ")
"""An error in the form of Google's logging library."""
_TROUBLE = re.compile(
    r"(?i)\b(?:could ?n[o']t|can ?n[o']t|can't|unable to|failed|failure|fatal|not found|no such|refused|denied"
    r"|abort(?:ed|ing)?|not permitted|do(?:es)?(?: not|n't) (?:exist|match|have|know|support)|not supported|unsupported"
    r"|mismatch(?:ed)?|missing|timed out|unreachable|is down|preempted|evicted|crash(?:ed)?|core dumped"
    r"|exceed(?:ed|s)|incompatible|unrecogni[sz]ed|unexpected(?:ly)?"
    r"|not (?:available|installed|allowed|recogni[sz]ed|enough|detected)"
    r"|no \S{1,30} (?:found|detected|available)|errno|error (?:at|in|while|when|during|occurred|loading|opening)"
    r"|(?:cuda|internal|unknown|runtime|output|syntax|connection|network|driver|ssl) error)\b"
)
"""What is not as it should be, in any program's words."""
_NO_TROUBLE = re.compile(
    r"\b(?:INFO|DEBUG)\b|(?i:\b(?:0|no|without|if|when|not) (?:\w{1,20} )?(?:errors?|failures?|failed|fail)\b"
    r"|\bfail(?:ed|ures?)[\"']?[=: ]{1,3}(?:0|false|none)\b|\d{1,3}%\|"
    r"|\b(?:optimi[sz]ation|optional|skip|ignor|instead\b|fall(?:ing)?[ -]?back|deprecat|will be (?:used|disabled)))"
)
"""Words of a program that goes on."""
_PROGRESS = re.compile(r"(?i)\b(?:step|epoch|iter(?:ation)?s?|loss|saved|it/s)\b")
_LOSS = re.compile(
    r"(?i)(?<![a-z_])(?:train(?:ing)?[_ /])?loss['\"]?[:=| ]{1,24}['\"]?(\d{1,9}(?:\.\d{1,18})?(?:e[+-]?\d{1,3})?)\b"
)
_GRADIENT = re.compile(
    r"(?i)\bg(?:rad(?:ient)?)?[_ ]?norm['\"]?[:=| ]{1,24}['\"]?(\d{1,12}(?:\.\d{1,18})?(?:e[+-]?\d{1,3})?)\b"
)
_NOT_A_NUMBER = re.compile(r"(?i)(?<![a-z])(?:loss|cost|perplexity|ppl|nll)['\"]?[:=| ]{1,24}['\"]?nan\b")
_LOSS_SCALE = re.compile(
    r"(?i)(?<![a-z])loss[_ -]?scale['\"]?(?:[:=| ]{1,24}| to )['\"]?"
    r"(-?\d{1,12}(?:\.\d{1,18})?(?:e[+-]?\d{1,3})?)"
)
_ACCURACY = re.compile(r"(?i)(?<![a-z])acc(?:uracy)?['\"]?[:=| ]{1,24}['\"]?(0?\.\d{1,18})\b")
_AT_CHANCE, _CLASSES, _NEAR_LOSS, _NEAR_ACCURACY = 4, range(2, 101), 0.002, 0.03
"""So many losses and accuracies in a row that are those of a guess among so many classes; how near to them: the loss
absolutely, the accuracy as a part of it."""
_WAITING = "watchdog-waiting"
_WAITED_FOR = re.compile(
    r"\[Rank (\d{1,6})\] (?:Watchdog c|C)aught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,12}),"
)
_WAITED_ROWS = frozenset({"waited", "rendezvous", "store-gone", "nccl-timeout", _WAITING})
"""So says a rank whose time of waiting is over; one that lost a connection may stand anywhere."""
_LOSS_NAN = "loss-nan"
_TORCH_RANK = re.compile(rb"\[rank(\d{1,6})\]: ")
_LOCAL_RANK = re.compile(rb"\blocal_rank: (\d{1,6})\b")
_APART_FIX = (
    "look for what only some ranks do before these places: a collective, new_group or barrier inside `if rank == 0`, "
    "another number of batches (equal shards, drop_last, DistributedSampler, model.join()), an evaluation or a save on "
    "one rank; do it on all ranks alike, or, where one rank works alone for long, raise timeout= of init_process_group"
    "; stages of a pipeline stand at different places anyway: look at what ended or stood still first"
)
_FILE_TROUBLE = re.compile(r"[\w./*-]*/[^\s'\":]{1,200}['\"]?: (?:No such file or directory|Permission denied)")
"""A program that is not Python's, about a file."""
_INVALID = re.compile(r"\b\d{1,4} validation errors? for \S{1,100}$")
"""The first line of pydantic's error: what is wrong stands in the two lines below it."""
_FAR_BEHIND = 0.9
"""Of the next smallest number: a collective whose number is below that part of it is far behind."""
_LEAST_VALUES, _LOSS_FACTOR, _LOSS_STEP, _GRADIENT_FACTOR = 3, 3.0, 2.0, 100.0
"""A loss has left its course where, after so many values or more, its last value is so many times the median of those
before and so much above it; a gradient norm, where one is so many times the median of all."""
_WAITS = re.compile(
    r"as PyTorch extensions root|Loading extension module|Building extension module|Detected CUDA files, patching"
    r"|Reducer buckets have been rebuilt|store_based_barrier_key|distributed processes registered|MEMBER: \d{1,6}/\d"
    r"|NCCL INFO [^\n]{0,200}(?:Init COMPLETE|Init START|Connected all|Channel \d|Trees|threadThresholds|Launch mode)"
)
"""After such a line ranks meet for the first time, or a compile is waited for: there programs hang."""
_STANDING_LOSSES = 6
"""So many losses, one after the other and alike to the last digit, stand still."""
_TROUBLE_LINES, _HARMLESS_LINES = 60, 4
"""At the end of a log in which nothing else is found: so many lines are looked through for it; so many lines is a
harmless message long."""
_PROSE, _INFORMS = re.compile(rb"[a-z,;]\s*$"), re.compile(rb"\bINFO\b")
"""Before the class of an exception: a sentence speaks of it, or code catches it, unless a traceback has begun."""
_IGNORED, _CAUGHT = b"Exception ignored in", b"During handling of the above exception"
_TRACEBACK = b"raceback (most recent call last)"
_FRAME = re.compile(rb'\bFile "[^"\n]{1,300}", line \d')
"""A line of a traceback whose beginning a log may lack."""
_CODE = re.compile(
    rb"(?:\[?rank ?\d{1,6}\]?: ?|\(\w{1,40} (?:rank=\d{1,6} )?pid=\d{1,9}\) |stderr: )?"
    rb" {4,80}(?:raise |warnings?\.warn\(|log(?:ger|ging)?\.\w{1,20}\(|print\()"
)
"""Code below a call that says something: its words are shown with the call, whether or not they were said."""
_TRACEBACK_LINES = 300
"""At most so long is a traceback."""
_CALL = re.compile(
    rb"(?:File |^)[\"'~]?([^\"'\n]{0,300}?([\w.-]{1,80}\.py))[\"']?(?:, line |:)(\d{1,7})(?:, in ([\w.<>]{1,80}))?"
)
"""Where a call stands, as a traceback or a notebook has it: path, name of the file, line, function."""
_IN_PACKAGE = re.compile(rb"(?:site|dist)-packages[/\\](\w[^\n]{1,200})")
_FRAME_LINES, _OWN_LINES, _CODE_CHARS = 25, 200, 100
"""So many lines above an exception its last call is looked for, and the last one in the user's own code; of a line of
code so many characters are shown."""
_RANK_TAG = re.compile(rb"\[?rank ?\d{1,6}\]?: ?|\(\w{1,40} (?:rank=\d{1,6} )?pid=\d{1,9}\) |stderr: ")
"""Before a line of one of several processes: their tracebacks are mixed."""
_CAUGHT_CLASSES = re.compile(r"(?:^|\W)(?:KeyError|AttributeError|IndexError|StopIteration|ImportError|TypeError)\b")
"""Errors that programs expect and catch: where another one follows, that one says more."""
_RAISES, _SAYS, _CATCHES, _IGNORES, _TRACES, _RAISES_BARE = 1, 2, 4, 8, 16, 32
"""What a line may do, see `_tells`."""
_WARNED = re.compile(rb"(?<!NCCL )\bWARN(?:ING)?\b|\bwarning:|Warning: |^\[?W\d{4}[ \]]|\[W(?:\d{1,20}\b| )")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A known failure whose words stand in a log."""

    id: str
    level: Level
    means: str
    fix: str
    confirm: str
    line: str
    """The line in which they stand first."""
    number: int
    """Of that line, from 1."""
    times: int
    """In how many lines they stand."""
    is_warned: bool
    """That line calls itself a warning, or the program caught that error."""
    time: str = ""
    """The date and time that the log gives on that line or last before it: `2026-11-27 08:00:00.5`; in no zone."""

    @property
    def is_echo(self) -> bool:
        """Another rank or host has gone, says the line."""
        return self.level == "echo"

    @property
    def order(self) -> tuple[int, bool, int]:
        """Sorts sightings of one log: causes first, then in the order of the log, warnings later."""
        return (_TOLD[self.level], self.is_warned, self.number)


_TOLD: Mapping[Level, int] = {**{level: LEVELS.index(level) for level in LEVELS}, "error": LEVELS.index("symptom")}
"""A symptom and an error are told in the order of the log."""


@dataclass(frozen=True, slots=True)
class RaisedLine:
    """An exception in a log, with the number of its line."""

    text: str
    number: int


@dataclass(frozen=True, slots=True)
class _Pattern:
    id: str
    signature: Signature
    expression: re.Pattern[str]
    head: str
    """The plain characters with which it begins."""
    is_vague: bool
    """It is no cause. Of a line causes count first, then the longest match."""
    spans: bool
    """A match may go over several lines."""


@dataclass(frozen=True, slots=True)
class _Index:
    """Patterns in the order in which they are tried, and the places of those that are looked up by a word."""

    patterns: tuple[_Pattern, ...]
    ranks: Mapping[bytes, tuple[int, ...]]


class LogSearch:
    """Searches one log, piece by piece: `feed` it, then `finish`; what it found is there from then on."""

    def __init__(self, *, host: str = "the host", known: Mapping[str, Signature] | None = None) -> None:
        self.lines = 0
        """How many there were."""
        self.raised: deque[RaisedLine] = deque(maxlen=MOST_RAISED)
        """The last exceptions in lines that are not known, oldest first."""
        self._host = host
        self._index = _whole_index() if known is None else _index(known)
        self._classes = _error_classes() if known is None else ()
        self._shapes: dict[bytes, tuple[tuple[_Pattern, ...], int]] = {}
        self._begun: list[bytes] = []
        self._rest = b""
        self._before: list[bytes] = []
        """The last lines before those in `_begun`."""
        self._found: dict[str, Sighting] = {}
        self._times: Counter[str] = Counter()
        self._taken = 0
        """The last line of a match over several lines."""
        self._class_by_shape: dict[str, _Pattern] = {}
        self._raised_last = ("", 0, "")
        """The last exception that is no cause: its id, the number of its line, its words."""
        self._waited_for: dict[int, str] = {}
        """By number of a collective in which a rank waited: that rank."""
        self._stood: dict[str, str] = {}
        """By rank that waited for another one, or lost it: where it stood."""
        self._silent: tuple[str, str] | None = None
        """A rank that had raised nothing when the first one waited in vain, and its last words."""
        self._ignores = 0
        """Up to this line the next exception is one that Python ignores."""
        self._traceback = -_TRACEBACK_LINES
        """The line in which the last traceback begins whose exception has not come."""

    def feed(self, piece: bytes) -> None:
        """Search the next piece of the log; it may end within a line."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        self._begun += lines
        if len(self._begun) > _AHEAD:
            self._search(len(self._begun) - _AHEAD)

    def finish(self) -> list[Sighting]:
        """The log has ended. Its known failures: causes first, then symptoms, echoes and what is harmless."""
        if self._rest:
            self._begun.append(self._rest)
            self._rest = b""
        self._search(len(self._begun))
        if all(each.level == "noise" for each in self._found.values()):
            self._look_for_trouble()
        elif all(each.level in {"echo", "noise"} for each in self._found.values()):
            self._look_for_a_file()
            self._name_where_ranks_stood()
        self._name_who_is_behind()
        self._set_consequences_aside()
        counted = [replace(each, times=self._times[each.id]) for each in self._found.values()]
        return sorted(counted, key=lambda each: each.order)

    def _name_who_is_behind(self) -> None:
        """Say of ranks that waited in vain which one is far behind the others, if one is."""
        numbers = sorted(self._waited_for)
        if len(numbers) < 2 or numbers[0] >= _FAR_BEHIND * numbers[1]:
            return
        told = self._found[_WAITING]
        others = f"{numbers[1]} to {numbers[-1]}" if len(numbers) > 2 else str(numbers[1])
        means = (
            f"rank {self._waited_for[numbers[0]]} waited in its collective number {numbers[0]}, others in {others}: "
            "if they are of one process group, that rank is the one behind, and the others waited for it"
        )
        self._found[_WAITING] = replace(told, means=means)

    def _name_where_ranks_stood(self) -> None:
        """Say where ranks stood that waited for each other, if nothing in the log is a cause."""
        echoes = [each for each in self._found.values() if each.level == "echo"]
        first = min(echoes, key=lambda each: each.number) if echoes else None
        if first and first.id in _WAITED_ROWS and (means := ranks_apart(self._stood, self._silent)):
            self._found[first.id] = replace(first, means=means, fix=_APART_FIX)

    def _look_for_a_file(self) -> None:
        """Note the first line at the end of the log in which a program misses a file: all others tell of an echo."""
        lines = self._before[-_TROUBLE_LINES:]
        for number, line in enumerate(lines, self.lines - len(lines) + 1):
            text = line[:_WINDOW].decode("utf-8", "replace").strip()
            if _FILE_TROUBLE.search(text) and not _NO_TROUBLE.search(text):
                self._class_of(text, number, is_said=True)
                return

    def _set_consequences_aside(self) -> None:
        """A failure that another one here explains is an echo of it; an echo of an echo is left out."""
        for name in [each.id for each in self._found.values() if each.level != "noise" and not each.is_warned]:
            signature = known_failures().get(name)
            for explained in signature.explains if signature and name in self._found else ():
                if explained in self._found and self._found[explained].is_echo:
                    del self._found[explained]
                elif explained in self._found:
                    self._found[explained] = replace(self._found[explained], level="echo")

    def _search(self, count: int) -> None:
        lines, shapes, before = self._begun, self._shapes, self.lines
        for at in range(count):
            line = lines[at]
            if b"\x1b" in line or b"\r" in line:
                line = lines[at] = _as_shown(line)
            shape = line.translate(_DIGITS)
            patterns = shapes.get(shape)
            if patterns is None:
                patterns = self._learn(shape)
            if patterns[0] or patterns[1]:
                self._look(at, before + at + 1, *patterns)
        self._before = (self._before + lines[:count][-_BEHIND:])[-_BEHIND:]
        del lines[:count]
        self.lines = before + count

    def _learn(self, shape: bytes) -> tuple[tuple[_Pattern, ...], int]:
        """The patterns that may match lines of this kind, and how they may tell of an exception."""
        hits = self._index.ranks.keys() & set(_WORD.findall(shape))
        ranks: set[int] = set().union(*map(self._index.ranks.__getitem__, hits))
        patterns = tuple(map(self._index.patterns.__getitem__, sorted(ranks)))
        learned = (patterns, _tells(shape))
        if len(shape) <= _MOST_SHAPE_BYTES:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = learned
        return learned

    def _look(self, at: int, number: int, patterns: Sequence[_Pattern], tells: int) -> None:
        """Try patterns in a line. Of those that match, the longest counts, then the one that begins with more plain
        characters; where none does, the class of its error. number: of the line, from 1.
        """
        if number <= self._taken:
            return
        line = self._begun[at]
        if self._is_code(at, line):
            return
        text = line.decode("utf-8", "replace")
        best = self._best_match(at, text, patterns)
        if best is not None:
            pattern, match = best
            self._taken = number + match.group().count("\n")
            if pattern.signature.level == "symptom" and tells & _RAISES and number <= self._ignores:
                self._ignores = 0
                return
            self._note(pattern, match, number, line)
            if pattern.signature.level == "echo" and tells & _RAISES and (tag := _TORCH_RANK.match(line)):
                self._note_stand(at, tag)
            if self._found[pattern.id].number == number:
                self._found[pattern.id] = replace(self._found[pattern.id], time=self._time_at(at))
            if pattern.is_vague and tells & _RAISES:
                self._raised_last = (pattern.id, number, text)
                self._note_place(pattern.id, number, text)
        elif tells:
            self._look_for_error(at, number, line, tells)

    def _is_code(self, at: int, line: bytes) -> bool:
        """Whether a line is code in a traceback that says something: what was said stands in another line."""
        above = self._begun[at - 1] if at else self._before[-1] if self._before else b""
        return _CODE.match(line) is not None and _FRAME.search(above[:_WINDOW]) is not None

    def _note_stand(self, at: int, tag: re.Match[bytes]) -> None:
        """Keep where a rank stood that waited for another one, or lost it. tag: of its lines."""
        rank, lines = tag[1].decode(), (self._before + self._begun[:at])[-_BEHIND:]
        if rank not in self._stood and len(self._stood) < _MOST_CLASSED and (place := stood_at(lines, tag.group())):
            if not self._stood:
                self._silent = last_words(lines, rank)
            self._stood[rank] = place

    def _best_match(self, at: int, text: str, patterns: Sequence[_Pattern]) -> tuple[_Pattern, re.Match[str]] | None:
        """The pattern that counts of those that match in a line, and its match. text: of the line."""
        best: tuple[_Pattern, re.Match[str]] | None = None
        below, least = "", (True, 1)
        for pattern in patterns:
            if pattern.head not in text:
                continue
            if best is not None and pattern.is_vague > least[0]:
                break  # causes are tried first
            if pattern.spans and not below:
                below = self._below(at, text)
            match = _first_match(pattern, below if pattern.spans else text, len(text))
            if match is None or (best is not None and pattern.id in best[0].signature.explains):
                continue
            rank = (pattern.is_vague, match.start() - match.end())
            if rank < least or (best is not None and best[0].id in pattern.signature.explains):
                best, least = (pattern, match), rank
        return best

    def _look_for_error(self, at: int, number: int, line: bytes, tells: int) -> None:
        """Note the error of which a line tells that no row knows."""
        if tells & _CATCHES:
            self._set_aside(number)
        if tells & _IGNORES:
            self._ignores = number + _AHEAD
        if tells & _TRACES:
            self._traceback = number
        if raised := self._raised_in(line[:_WINDOW], number, tells):
            text = self._words(raised[1], at, is_raised=True)
            self.raised.append(RaisedLine(text, number))
            is_informing = _INFORMS.search(line, 0, raised.start(1)) and number - self._traceback >= _TRACEBACK_LINES
            self._traceback = -_TRACEBACK_LINES
            is_ignored, self._ignores = number <= self._ignores, 0
            before = line[: raised.start(1)]
            if not (is_ignored or is_informing or _PROSE.search(before) or _WARNED.search(before)):
                self._class_of(text, number, is_said=False)
        elif tells & _SAYS and (said := _SAID.search(line[:_WINDOW])) and not _WARNED.search(line):
            words = next(each for each in said.groups() if each)
            if _TRACEBACK not in words and not _DONE_WITHOUT.match(words):
                text = self._words(words, at)
                above = self._reason_above(at, text)
                self._class_of(above or text, number - (above != ""), is_said=True)

    def _reason_above(self, at: int, last: str) -> str:
        """The line above the last words of a program, where it tells more exactly what is wrong; else empty."""
        if len(self._class_by_shape) >= _MOST_CLASSED or last.translate(_NO_DIGITS) in self._class_by_shape:
            return ""
        above = self._begun[at - 1] if at else self._before[-1] if self._before else b""
        text = above[:_WINDOW].decode("utf-8", "replace").strip()
        return text if words_told(last) is None and words_told(text) is not None else ""

    def _look_for_trouble(self) -> None:
        """Note the first line at the end of the log in which a program says, in words of its own, what is wrong, and
        after which it does not go on. A warning counts where a traceback was cut off.
        """
        is_cut, harmless = self._traceback > 0, -_HARMLESS_LINES
        lines = self._before[-_TROUBLE_LINES:]
        told: tuple[str, int] | None = None
        for number, line in enumerate(lines, self.lines - len(lines) + 1):
            text = line[:_WINDOW].decode("utf-8", "replace").strip()
            known = self._learn(line.translate(_DIGITS))[0]
            if any(each.signature.level == "noise" and each.head in text for each in known):
                harmless = number
            if not _TROUBLE.search(text) and words_told(text) is None:
                told = None if _PROGRESS.search(text) else told
            elif told is None and not _NO_TROUBLE.search(text) and (is_cut or not _WARNED.search(line)):
                told = (text, number) if number - harmless > _HARMLESS_LINES else None
        if told is not None:
            text, number = told
            self._class_of(text if ":" in text[:120] else f"the program says: {text}", number, is_said=True)
            return
        texts = [line[:_WINDOW].decode("utf-8", "replace") for line in lines]
        last = next((text.strip() for text in reversed(texts) if text.strip()), "")
        said = (
            _not_a_number(texts)
            or zero_rate(texts)
            or _rise(texts)
            or _standing_loss(texts)
            or _chance(texts)
            or (f"the log ends with: {last[: LINE_CHARS // 2]}" if _WAITS.search(last) else "")
        )
        if said:
            self._class_of(said, self.lines, is_said=True)

    def _raised_in(self, line: bytes, number: int, tells: int) -> re.Match[bytes] | None:
        """The exception in a line."""
        if tells & _RAISES and (found := _RAISED.search(line) or _CLASS_AT_START.match(line)):
            return found
        is_below = tells & _RAISES_BARE and number - self._traceback < _TRACEBACK_LINES
        return _BARE_CLASS.match(line) if is_below else None

    def _words(self, found: bytes, at: int, *, is_raised: bool = False) -> str:
        """The words of an error; a line that ends in a colon has them in the next one."""
        text = found.decode("utf-8", "replace").strip()
        more = self._begun[at + 1 : at + 1 + _MORE_LINES]
        if is_raised and any(_IN_A_FILE.match(line) for line in more):
            text += b"".join(b", " + line.strip() for line in more if line.strip()).decode("utf-8", "replace")
        elif text.endswith(":") and more:
            text += " " + next((line for line in more if line.strip()), b"").decode("utf-8", "replace").strip()
        elif _INVALID.search(text):
            below = b" ".join(line.strip() for line in self._begun[at + 1 : at + 3] if b"For further" not in line)
            text += ": " + below.decode("utf-8", "replace")
        elif text == "AssertionError":
            above = (self._before + self._begun[max(0, at - _ASSERTED_ABOVE) : at])[-_ASSERTED_ABOVE:]
            asserted = [match[1] for line in above if (match := _ASSERTED.search(line))]
            text += "".join(f": {each.decode('utf-8', 'replace')}" for each in asserted[-1:])
        return text

    def _class_of(self, text: str, number: int, *, is_said: bool) -> None:
        """Note an error by its class. is_said: it is not the exception of a traceback, and counts less."""
        shape = text.translate(_NO_DIGITS)
        pattern = self._class_by_shape.get(shape)
        if pattern is None and len(self._class_by_shape) < _MOST_CLASSED:
            pattern = next((each for each in self._classes if each.expression.search(text)), None)
            if pattern is not None:
                self._class_by_shape[shape] = pattern
        match = None if pattern is None else pattern.expression.search(text)
        if pattern is None or match is None:
            return
        before = self._found.get(pattern.id)
        if before is None or (before.is_warned and not is_said):
            self._note(pattern, match, number, b"")
            self._found[pattern.id] = replace(
                self._found[pattern.id], line=text, is_warned=is_said, time=self._time_at(number - 1 - self.lines)
            )
            if part := view_of_a_part(text):
                self._found[pattern.id] = replace(self._found[pattern.id], means=f"{part}: {text[:LINE_CHARS]}")
            if not is_said:
                self._note_place(pattern.id, number, text)
            else:
                means, fix = _by_words(self._found[pattern.id], text, "")
                self._found[pattern.id] = replace(self._found[pattern.id], means=means, fix=fix)
        else:
            self._times[pattern.id] += 1
        self._raised_last = (pattern.id, number, text)

    def _note_place(self, name: str, number: int, text: str) -> None:
        """Add to an exception that was just found what its words tell, and where it was raised: its last call, and the
        last one in the user's own code. text: the exception.
        """
        found, at = self._found[name], number - 1 - self.lines
        if found.number != number or found.level not in {"symptom", "error"}:
            return
        tag = _RANK_TAG.match(self._begun[at])
        lines = (self._before + self._begun[:at])[-_OWN_LINES:]
        same = [line[tag.end() :] for line in lines if line.startswith(tag.group())] if tag else lines
        place = _place(same[-_FRAME_LINES:])
        own = own_call([line[:_WINDOW].decode("utf-8", "replace") for line in same]) if place else None
        means, fix = _by_words(found, text, own.code if own else "")
        if place:
            means += f"; raised in {place}"
        if own and not own.is_last and not place.startswith(own.place):
            function = f", in {own.function}()" if own.function else ""
            means += f", called from {own.place}{function}{f': {own.code}' if own.code else ''}"
        self._found[name] = replace(found, means=means, fix=fix)

    def _time_at(self, at: int) -> str:
        """The time of a line, or the last one before it; empty where the log gives none."""
        above = self._before + self._begun[max(0, at - _BEHIND) : at + 1]
        for line in reversed(above[-_BEHIND - 1 :]):
            if found := _TIME.search(line[:_WINDOW]):
                day, clock, fraction = (each.decode() for each in found.groups(b"0"))
                return f"{day} {clock}.{fraction}"
        return ""

    def _set_aside(self, number: int) -> None:
        """The program caught the exception above this line, and another one follows."""
        name, last, text = self._raised_last
        if name and number - last <= _AHEAD and _CAUGHT_CLASSES.search(text):
            self._found[name] = replace(self._found[name], is_warned=True)

    def _below(self, at: int, text: str) -> str:
        """A line with those below it."""
        room, taken = THEN_CHARS, 0
        lines = self._begun[at + 1 : at + _AHEAD]
        for line in lines:
            room -= len(line) + 1
            taken += 1
            if room <= 0:
                break
        more = b"\n".join(lines[:taken]).decode("utf-8", "replace")
        return f"{text}\n{more[:THEN_CHARS]}"

    def _note(self, pattern: _Pattern, match: re.Match[str], number: int, line: bytes) -> None:
        self._times[pattern.id] += 1
        if pattern.id == _WAITING and len(self._waited_for) < _MOST_CLASSED:
            self._waited_for.update(
                {int(found[2]): found[1] for found in _WAITED_FOR.finditer(line[:_WINDOW].decode("utf-8", "replace"))}
            )
        before = self._found.get(pattern.id)
        if before is not None and not before.is_warned:
            return
        is_warned = _WARNED.search(line) is not None
        if before is not None and is_warned:
            return
        signature = pattern.signature
        means, fix = self._more_exact(signature, match, pattern.id, number, line)
        self._found[pattern.id] = Sighting(
            id=pattern.id,
            level=signature.level,
            means=means,
            fix=fix,
            confirm=filled(signature.confirm, match, self._host),
            line=_shown(match),
            number=number,
            times=1,
            is_warned=is_warned,
        )

    def _more_exact(
        self, signature: Signature, match: re.Match[str], name: str, number: int, line: bytes
    ) -> tuple[str, str]:
        """What a row means and what to do, with what the line or those above it add."""
        means, fix = filled(signature.means, match, self._host), filled(signature.fix, match, self._host)
        if name in {"crashed", "killed"} and (found := _LOCAL_RANK.search(line)):
            return f"{means} (local rank {found[1].decode()} of its host)", fix
        above = (self._before + self._begun[: number - self.lines])[-_BEHIND:] if name == _LOSS_NAN else []
        if rate := too_high_rate(above):
            means = f"a learning rate of {rate}, which the log tells, is far too high: the loss became NaN"
            fix = f"lower it (1e-5 to 1e-3 is usual with Adam), with warm-up and gradient clipping; if it stays: {fix}"
        return means, fix


def _standing_loss(texts: Sequence[str]) -> str:
    """What the last losses say, where they are all alike to the last digit, and not zero."""
    losses = [found[1] for text in texts for found in _LOSS.finditer(text)][-_STANDING_LOSSES:]
    stands = len(losses) == _STANDING_LOSSES and len(set(losses)) == 1 and "." in losses[0] and float(losses[0]) > 0
    return f"the loss stands at {losses[0]}" if stands else ""


def _chance(texts: Sequence[str]) -> str:
    """What the last losses and accuracies say, where both are those of a guess."""
    losses = [float(found[1]) for text in texts for found in _LOSS.finditer(text)][-_AT_CHANCE:]
    accuracies = [float(found[1]) for text in texts for found in _ACCURACY.finditer(text)][-_AT_CHANCE:]
    if min(len(losses), len(accuracies)) < _AT_CHANCE:
        return ""
    for classes in _CLASSES:
        guessed = all(abs(loss - math.log(classes)) < _NEAR_LOSS for loss in losses)
        if guessed and all(abs(each * classes - 1) < _NEAR_ACCURACY for each in accuracies):
            return f"the loss stands at {math.log(classes):.3f} = ln {classes} and the accuracy at 1/{classes}"
    return ""


def _not_a_number(lines: Sequence[str]) -> str:
    """That the loss is nan, with the loss scale or the gradient norm that goes with it; empty where it is a number."""
    if not any(_NOT_A_NUMBER.search(line) for line in lines):
        return ""
    scales = [float(found[1]) for line in lines for found in _LOSS_SCALE.finditer(line)]
    norms = [float(found[1]) for line in lines if (found := _GRADIENT.search(line))]
    if scales and scales[-1] < max(1.0, scales[0]):
        return f"the loss became nan, and the loss scale falls without an end, to {scales[-1]:g}"
    if len(norms) > 1 and max(norms) > _GRADIENT_FACTOR:
        return f"the loss became nan with a gradient norm of {norms[0]:g}, then {max(norms):g}"
    return "the loss became nan"


def _rise(lines: Sequence[str]) -> str:
    """How the loss or the gradient norm rose in these lines; empty where they did not."""
    losses = [float(found[1]) for line in lines if (found := _LOSS.search(line))]
    norms = [float(found[1]) for line in lines if (found := _GRADIENT.search(line))]
    if len(losses) > _LEAST_VALUES:
        before, after = sorted(losses[: len(losses) // 2])[len(losses) // 4], min(losses[-2:])
        if after > _LOSS_FACTOR * before and after > before + _LOSS_STEP:
            return f"the loss rose from {before:g} to {after:g}"
    if len(norms) > _LEAST_VALUES:
        usual, most = sorted(norms)[len(norms) // 2], max(norms)
        if most > _GRADIENT_FACTOR * max(usual, 1.0):
            return f"the gradient norm rose from {usual:g} to {most:g}"
    return ""


def _place(lines: Sequence[bytes]) -> str:
    """The last call in the lines above an exception, with its code; empty where they have none."""
    for above, line in enumerate(reversed(lines)):
        if _TRACEBACK in line:
            return ""
        if frame := _CALL.search(line[:_WINDOW]):
            place = f"{_shown_path(frame[1])}, line {frame[3].decode()}"
            if not above or b", line " not in frame.group():
                return place
            code = lines[-above][:_CODE_CHARS].decode("utf-8", "replace").strip()
            return f"{place}: {code}" if code.strip("^~ ") and "File " not in code else place
    return ""


def _by_words(found: Sighting, text: str, code: str) -> tuple[str, str]:
    """What an error means and what to do by its own words, where no row tells of them and only its class is known, or a
    row that names no value.
    """
    row = known_failures().get(found.id)
    is_exact = found.level != "error" and row is not None and "{0}" in row.means
    told = None if is_exact else words_told(text, code)
    if told is None:
        return found.means, found.fix
    if found.level == "error":
        return f"{told.means}: {text[:LINE_CHARS]}", told.fix
    return told.means, f"{told.fix}; {found.fix}"


def _shown_path(path: bytes) -> str:
    """The path of a module: of one that is installed, from its package on; else the file and its folder."""
    found = _IN_PACKAGE.search(path)
    words = found[1] if found else b"/".join(re.split(rb"[/\\]", path)[-2:])
    return words.decode("utf-8", "replace")


def recognise(text: str, *, host: str = "the host") -> list[Sighting]:
    """Known failures in a text, in the order in which they stand there first. A line tells one thing."""
    search = LogSearch(host=host)
    search.feed(text.encode("utf-8", "replace"))
    return sorted(search.finish(), key=lambda each: each.number)


def whole_words(words: str) -> list[str]:
    """The words of the beginning of a pattern that stand whole in every match; by one of them it is looked up."""
    head = head_of(words)
    there = [match for match in re.finditer(r"[A-Za-z]{4,}", head) if _is_whole(words, head, match.end())]
    inner = [match.group() for match in there if match.end() < len(head)]  # the last one may go on in a text
    return [word for word in inner if word not in _COMMON] or [match.group() for match in there]


def _is_whole(words: str, head: str, end: int) -> bool:
    """Whether a word of the beginning ends there in every match."""
    rest = after_head(words)
    return end < len(head) or not rest or re.match(r"(?!\(\?[=!])(?:[\w(\[.]|\\[wSDpx])", rest) is None


def _tells(shape: bytes) -> int:
    """How lines of this kind may tell of an exception: the sum of what they may do."""
    tells = 0
    if b"rror" in shape or b"xception" in shape or b"Interrupt" in shape or b"Exit" in shape:
        tells = _RAISES | _SAYS | _CATCHES * (_CAUGHT in shape) | _IGNORES * (_IGNORED in shape)
    elif (
        b"ERROR" in shape
        or b"atal: " in shape
        or b"FATAL: " in shape
        or b"what():" in shape
        or b"NCCL WARN " in shape
        or b"Check failed: " in shape
        or (b"] " in shape and _LOGGED.search(shape) is not None)
    ):
        tells = _SAYS
    if b":" in shape:
        if _CLASS_AT_START.match(shape):
            tells |= _RAISES
        elif _BARE_CLASS.match(shape):
            tells |= _RAISES_BARE
    if _TRACEBACK in shape or (b'File "' in shape and _FRAME.search(shape)):
        tells |= _TRACES
    return tells


@functools.cache
def _error_classes() -> tuple[_Pattern, ...]:
    """The rows for exceptions that no other row knows, in their order."""
    return tuple(
        _Pattern(name, signature, re.compile(words), "", True, False)
        for name, signature in families()[ERRORS].items()
        for words in signature.patterns
    )


@functools.cache
def _whole_index() -> _Index:
    return _index({name: row for name, row in known_failures().items() if name not in families()[ERRORS]})


def _index(known: Mapping[str, Signature]) -> _Index:
    """All patterns, each under the word of its own that fewest others have; causes first, and longer heads first."""
    uses = Counter(word for each in known.values() for words in each.patterns for word in set(whole_words(words)))
    found: list[tuple[str, _Pattern]] = []
    for name, signature in known.items():
        for words in signature.patterns:
            rarest = min(whole_words(words), key=lambda word: (uses[word], -len(word)), default="")
            is_vague, expression = signature.level != "cause", re.compile(words, re.DOTALL)
            found.append((rarest, _Pattern(name, signature, expression, head_of(words), is_vague, _may_span(words))))
    found.sort(key=lambda each: (each[1].is_vague, -len(each[1].head), each[0]))
    ranks: dict[bytes, tuple[int, ...]] = {}
    for rank, (word, _) in enumerate(found):
        ranks[word.encode()] = (*ranks.get(word.encode(), ()), rank)
    return _Index(tuple(pattern for _, pattern in found), ranks)


def _may_span(words: str) -> bool:
    """Whether a match may go over the end of a line: a dot matches it, too."""
    bare = _CLASS.sub(lambda each: "." if bool(each[1]) != bool(_ENDS.search(each[2])) else "", _ESCAPED.sub("", words))
    return "." in bare or _ENDS.search(bare) is not None


def _first_match(pattern: _Pattern, text: str, length: int) -> re.Match[str] | None:
    """The first match that begins in the first line of a text. length: of that line."""
    at, then, then_at = -1, pattern.signature.then, -1
    while 0 <= (at := text.find(pattern.head, at + 1)) < length:
        if then:
            if then_at < at and (then_at := text.find(then, at)) < 0:
                return None
            if then_at - at > THEN_CHARS:
                at = then_at - THEN_CHARS - 1
                continue
        if (match := pattern.expression.match(text, at, at + _WINDOW)) is not None:
            return match
    return None


def _shown(match: re.Match[str]) -> str:
    """The line in which a match begins, or the part of a long one."""
    text, at = match.string, match.start()
    begin = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    if at - begin > LINE_CHARS // 2:
        begin = at - LINE_CHARS // 4
    return text[begin : None if end < 0 else end].strip()[:LINE_CHARS]


def _as_shown(line: bytes) -> bytes:
    """A line without colours and titles; of a progress bar, what a terminal shows in the end."""
    return _SEQUENCE.sub(b"", line).rstrip(b"\r").rpartition(b"\r")[2]
