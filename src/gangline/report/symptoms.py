"""Symptoms without a line in a log, and the questions that tell their causes apart: `gangline explain --ask`. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gangline.errors import UsageError
from gangline.report import symptom_questions as questions
from gangline.report.symptom_questions import Ask, Evidence, Reply
from gangline.report.text_table import clean
from gangline.units import fold_names

LABEL = 9
TAKEN_BY_A_RUN = ("E-GPU-02", "E-GPU-12", "E-MEM-01", "E-LIM-06", "E-PORT-01", "E-DISK-10")
"""Findings that a run brings about itself while it runs."""
_ORDER = {"high": 0, "medium": 1, "low": 2}
_MARKS = {"cause": "yes", "seen": "seen", "absent": "not seen", "no": "no", "unknown": "?"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredQuestion:
    """A question, and how it is answered."""

    text: str
    ask: Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What somebody sees who has no line to look for."""

    title: str
    questions: tuple[MeasuredQuestion, ...]
    findings: tuple[str, ...]
    """Beginnings of the ids of findings that bring it about; empty: none does, and no host is looked at."""
    more: tuple[str, ...]
    """What tells more."""
    tier: Literal["quick", "full"] = "quick"
    """How closely the hosts are looked at, where no run is on them."""


def _of(text: str, ask: Ask) -> MeasuredQuestion:
    return MeasuredQuestion(text=text, ask=ask)


_SLOWED = _of("Did a rank or a link become slower than in its first steps?", questions.slowed)
_THROTTLED = _of(
    "Was a card slowed down by heat or power, or by another program?", questions.cards("throttled", "foreign")
)
_UNLIKE = _of("Does a rank take longer for a micro-batch than the others?", questions.unlike)
_READS = _of("Do ranks wait for their rows?", questions.reads)
_WAITS = _of("Do ranks wait for slower ones?", questions.waits)
_PRESSES = _of("Do processes of a host wait for its processor, memory or disk?", questions.presses)
_EXCHANGES = _of("How much of a step is exchange that no computing hides?", questions.exchanges)
_LINKS = _of("Is a way between two hosts slower than the others?", questions.measured_links)
_NOT_FINITE = _of("Were steps skipped because the loss or a gradient was not finite?", questions.not_finite)
_CHECKS = _of("Does gangline check find something on the hosts that does this?", questions.checks)
_LINK_IDS = ("E-NET-06", "E-NET-07", "E-NET-11", "E-NET-12", "E-NET-13", "E-NET-14", "E-NET-15", "E-NET-16", "E-NET-17")

SYMPTOMS: Mapping[str, Symptom] = {
    "one-gpu-slower": Symptom(
        title="one GPU or machine is slower than the others",
        questions=(_SLOWED, _THROTTLED, _UNLIKE, _READS, _PRESSES, _CHECKS),
        findings=("E-GPU-", "E-TOPO-", "E-MEM-", "E-LIM-06", "E-ENV-07", "E-DISK-10"),
        more=(
            "gangline bench compute JOB measures every rank alone",
            "gangline top RUN shows the cards as they are now",
        ),
    ),
    "slow-network": Symptom(
        title="the network is slow, or exchanges take long",
        questions=(_EXCHANGES, _SLOWED, _LINKS, _CHECKS),
        findings=(*_LINK_IDS, "E-IB-", "E-TOPO-02", "E-TOPO-03", "E-ENV-05"),
        more=("gangline bench network measures every way and all-reduce, while the hosts are idle",),
        tier="full",
    ),
    "gpu-not-used": Symptom(
        title="GPUs are not used, or hardly",
        questions=(
            _of("How much are the cards in use?", questions.used),
            _of("Did ranks compute on the processor although there are cards?", questions.devices),
            _READS,
            _WAITS,
            _EXCHANGES,
            _PRESSES,
            _CHECKS,
        ),
        findings=("E-GPU-", "E-SW-06", "E-SW-07", "E-SW-10", "E-ENV-07"),
        more=(
            "gangline plan JOB --why says which micro_batch fits",
            "gangline top RUN shows the cards as they are now",
        ),
    ),
    "hangs-at-start": Symptom(
        title="it hangs at the start: no step is done",
        questions=(
            _of("How far did its start come, and what stopped it?", questions.began),
            _of("Which stage had each host reached?", questions.board),
            _CHECKS,
        ),
        findings=(
            *("E-ACC-", "E-NAME-", "E-NET-01", "E-NET-02", "E-NET-03", "E-NET-04", "E-NET-05", "E-NET-06", "E-NET-08"),
            *("E-NET-09", "E-NET-10", "E-NET-12", "E-NET-14", "E-NET-16", "E-NET-17", "E-PORT-", "E-SW-04", "E-SW-08"),
            *(
                "E-SW-10",
                "E-SW-13",
                "E-GPU-05",
                "E-GPU-06",
                "E-ENV-02",
                "E-ENV-03",
                "E-ENV-04",
                "E-ENV-06",
                "E-DISK-09",
            ),
        ),
        more=(
            "gangline explain RUN shows where its ranks stand",
            "gangline logs RUN --console shows what torchrun said",
        ),
    ),
    "starts-slowly": Symptom(
        title="it starts, but takes long until the first step",
        questions=(_of("Which part of the start takes longest?", questions.stages), _PRESSES, _CHECKS),
        findings=("E-DISK-", "E-MEM-", "E-NET-07", "E-NET-12", "E-SW-14", "E-LIM-06"),
        more=("gangline summary RUN says how long everything took",),
    ),
    "loss-diverges": Symptom(
        title="the loss rises, or becomes NaN",
        questions=(
            _of("Does the loss rise?", questions.diverges),
            _of("Did the weights of a rank differ from those of the others?", questions.replicas),
            _NOT_FINITE,
            _of("Does the norm of the gradient grow?", questions.gradients),
            _of("Does it begin with single steps of a far larger loss?", questions.spikes),
            _of("Does the loss jump where the run was resumed?", questions.jumps),
            _of("Does only the evaluation become worse?", questions.evaluations),
            _of("Did a card have memory errors, or leave the bus?", questions.cards("ecc", "lost")),
            _CHECKS,
        ),
        findings=("E-GPU-04", "E-SW-04"),
        more=(
            "gangline diff RUN OTHER says what a run that went well had different",
            "gangline data JOB shows the rows",
        ),
    ),
    "loss-stuck": Symptom(
        title="the loss stays where it is",
        questions=(
            _of("Does the loss stay where it was?", questions.stays),
            _of("Is there a gradient?", questions.no_gradient),
            _of("Have enough tokens a loss?", questions.labels),
            _of("Is the learning rate too small to change anything?", questions.learning_rate),
            _NOT_FINITE,
            _of("Does the norm of the gradient grow?", questions.gradients),
        ),
        findings=(),
        more=("gangline data JOB --rows shows which tokens have a loss", "gangline diff RUN OTHER compares two runs"),
    ),
}


def symptom_of(word: str) -> str:
    """The id of a symptom, also written with blanks; raises UsageError for what is none."""
    name = "-".join(word.lower().replace("_", " ").replace("-", " ").split())
    if name in SYMPTOMS:
        return name
    near = difflib.get_close_matches(name, SYMPTOMS, n=1)
    raise UsageError(
        f"no such symptom: {word!r}",
        seen=f"expected one of: {', '.join(SYMPTOMS)}",
        fix=f"gangline explain --ask {near[0] if near else 'one-gpu-slower'} [RUN]",
    )


def symptom_menu() -> list[str]:
    """All symptoms with their numbers, from 1."""
    width = max(map(len, SYMPTOMS))
    return [f"{index}  {name:<{width}}  {each.title}" for index, (name, each) in enumerate(SYMPTOMS.items(), 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """What the questions to a symptom came to."""

    symptom: str
    evidence: Evidence
    asked: tuple[tuple[str, tuple[Reply, ...]], ...]
    """Question -> its replies, in the order of the symptom."""

    @property
    def causes(self) -> list[Reply]:
        """The surest first."""
        found = [reply for _, replies in self.asked for reply in replies if reply.verdict == "cause"]
        return sorted(found, key=lambda each: _ORDER[each.confidence])

    @property
    def absent(self) -> list[Reply]:
        """Replies that the symptom is not there."""
        return [reply for _, replies in self.asked for reply in replies if reply.verdict == "absent"]

    @property
    def left(self) -> list[tuple[str, str]]:
        """Questions that could not be answered, and why."""
        return [(text, reply.what) for text, replies in self.asked for reply in replies if reply.verdict == "unknown"]

    @property
    def verdict(self) -> Literal["cause", "absent", "open"]:
        """A cause was found; the symptom is not there; neither."""
        return "cause" if self.causes else "absent" if self.absent else "open"


def inquire(name: str, evidence: Evidence) -> Inquiry:
    """Put all questions of a symptom."""
    asked = [(each.text, tuple(each.ask(evidence))) for each in SYMPTOMS[name].questions]
    return Inquiry(symptom=name, evidence=evidence, asked=tuple(asked))


def inquiry_lines(inquiry: Inquiry) -> list[str]:
    """The cause, then every question with its answer, then what tells more."""
    symptom, evidence = SYMPTOMS[inquiry.symptom], inquiry.evidence
    rows = [f"{inquiry.symptom}: {symptom.title}", *_labelled("asked", [_asked_of(evidence)])]
    rows += [*_labelled("skipped", evidence.unchecked), "", *_conclusion(inquiry)]
    rows += ["", "questions"]
    for text, replies in inquiry.asked:
        rows.append(f"  {text}")
        for reply in replies:
            seen = reply.seen if reply.verdict == "seen" else ()
            rows.append(f"    {_MARKS[reply.verdict]:<10}{clean(reply.what)}")
            rows += [f"    {'':<10}{clean(line)}" for line in seen]
    return [*rows, "", *_labelled("more", _more(inquiry))]


def _conclusion(inquiry: Inquiry) -> list[str]:
    causes = inquiry.causes
    if not causes:
        said = [f"none found: {reply.what}" for reply in inquiry.absent] or ["none found"]
        left = [f"{text} {why}" for text, why in inquiry.left]
        return [*_labelled("cause", said), *_labelled("open", left)]
    first, *others = causes
    return [
        *_labelled("cause", [first.what]),
        *_labelled("seen", first.seen),
        *_labelled("fix", [first.fix]),
        *_labelled("sure", [first.confidence]),
        *_labelled("also", [f"{each.what} ({each.confidence})" for each in others]),
        *_labelled("but", [each.what for each in inquiry.absent]),
    ]


def _asked_of(evidence: Evidence) -> str:
    parts = [
        f"run {evidence.run.history.id}" if evidence.run else "no run",
        f"{fold_names(evidence.hosts)}, as checked now" if evidence.hosts else "",
        f"network as measured {evidence.network.measured[:10]}" if evidence.network else "",
    ]
    return "; ".join(part for part in parts if part)


def _more(inquiry: Inquiry) -> list[str]:
    run = inquiry.evidence.run
    if run is None:
        return [
            f"gangline explain --ask {inquiry.symptom} RUN asks a run that shows it",
            *SYMPTOMS[inquiry.symptom].more,
        ]
    return [line.replace("RUN", run.history.id) for line in SYMPTOMS[inquiry.symptom].more]


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    return [f"{label if index == 0 else '':<{LABEL}}{clean(line)}".rstrip() for index, line in enumerate(lines)]


def inquiry_json(inquiry: Inquiry) -> dict[str, Any]:
    """The same for programs."""
    evidence, causes = inquiry.evidence, [_reply_json(each) for each in inquiry.causes]
    return {
        "symptom": inquiry.symptom,
        "title": SYMPTOMS[inquiry.symptom].title,
        "run": evidence.run.history.id if evidence.run else None,
        "hosts": list(evidence.hosts),
        "unchecked": list(evidence.unchecked),
        "verdict": inquiry.verdict,
        "cause": causes[0] if causes else None,
        "also": causes[1:],
        "questions": [
            {"question": text, "answers": [_reply_json(each) for each in replies]} for text, replies in inquiry.asked
        ],
        "left": [{"question": text, "why": why} for text, why in inquiry.left],
        "more": _more(inquiry),
    }


def _reply_json(reply: Reply) -> dict[str, Any]:
    data: dict[str, Any] = {"verdict": reply.verdict, "what": reply.what, "seen": list(reply.seen)}
    return data | ({"fix": reply.fix, "confidence": reply.confidence} if reply.verdict == "cause" else {})
