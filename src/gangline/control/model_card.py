"""The model card of an export: README.md and the curve of the loss, out of everything that is recorded of the run.

It is written to be shown to strangers. Hosts get stand-ins, folders of this computer and secrets are taken out.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from gangline import __version__
from gangline.report.commands import joined
from gangline.report.redaction import Redaction, secrets_of
from gangline.report.run_summary import RunRecords, summary_page
from gangline.report.summary_page import Block, PageCurve, PageTable, PageText, curve_svg, markdown_section
from gangline.runs.files import json_object, read_json, write_atomic
from gangline.runs.hub_names import is_hub_name
from gangline.runs.layout import EXPORT_NOTE, MODEL_CARD
from gangline.serve.evaluation import score_rows

CURVE = "loss.svg"
SECTIONS = ("The run", "Job", "Machines", "Speed against the plan", "Where the time went")
"""Sections of `gangline summary` that the card has as well."""
_PATH = re.compile(r"(?:file://|(?<![\w/.~]))(?:~[\w.-]*)?((?:/[^\s/'\",:;\[\]{}()|]+)+)/?")
_QUOTED = re.compile(r"([\"'])[/~][^\"'\n]{0,500}/([^\"'\n/]{1,255})/?\1")
"""A path in quotes, which may have spaces in it."""


def write_card(folder: Path, run: RunRecords) -> None:
    """Write the card of a run into the folder of its export, beside the file gangline.json there."""
    note = read_json(folder / EXPORT_NOTE)
    curve = next((each for each in _sections_of(run).get("Curves", ()) if isinstance(each, PageCurve)), None)
    drawn = curve_svg(curve) if curve is not None else ""
    if drawn:
        write_atomic(folder / CURVE, drawn.encode())
    write_atomic(folder / MODEL_CARD, card_text(run, note, has_curve=bool(drawn)).encode())


def card_text(run: RunRecords, note: Mapping[str, Any], *, has_curve: bool) -> str:
    """The card, a YAML head and Markdown. note: gangline.json of the export. has_curve: loss.svg lies beside it."""
    private, sections = _Private(run), _sections_of(run)
    title = f"{run.history.run.state.name if run.history.run.state else run.history.id}, step {note['step']}"
    lines = [*card_head(run, note), "", f"# {private.text(title)}", "", *_opening(run, note)]
    for name in SECTIONS:
        if blocks := [private.block(each) for each in sections.get(name, ())]:
            lines += ["", *markdown_section(name, blocks)]
        if name == "Machines" and (share := _shares(run, private)) is not None:
            lines += ["", *markdown_section("What each machine did", share)]
    if has_curve:
        lines += ["", "## Loss", "", f"![loss per trained token by step]({CURVE})"]
    if scores := _scores(run, int(note["step"]), private):
        lines += ["", *markdown_section("Evaluation", scores)]
    lines += ["", *markdown_section("To repeat it", _repeat(run, private))]
    return "\n".join(lines) + "\n"


def card_head(run: RunRecords, note: Mapping[str, Any]) -> list[str]:
    """The YAML head that the hub reads. Values are JSON, which is YAML, whatever stands in them."""
    adapter = note["method"] != "full" and not note["merged"]
    base = str(note["base_model"])
    sources = [] if run.job is None else run.job.data.train.parts
    data = list(dict.fromkeys(each.hub for each in sources if each.hub and is_hub_name(each.hub)))
    head: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gangline", *([] if note["method"] == "full" else [note["method"]])],
    }
    if is_hub_name(base) and not _is_random(run):
        head |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    if data:
        head["datasets"] = data
    return _yaml(head)


def _yaml(head: Mapping[str, Any]) -> list[str]:
    return ["---", *(f"{name}: {json.dumps(value)}" for name, value in head.items()), "---"]


def write_merge_card(folder: Path) -> None:
    """Write the card of an adapter that was merged from others, out of its gangline.json."""
    note = read_json(folder / EXPORT_NOTE)
    base = str(note["base_model"])
    head = {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["gangline", "lora", "merge"]}
    head |= {"base_model": base, "base_model_relation": "adapter"} if is_hub_name(base) else {}
    how = [f"{name} {value}" for name, value in note["merge"].items() if value is not None and name != "method"]
    rows = [
        (str(each["run"]), str(each["step"] or ""), f"{each['weight']:g}", each["blake2b"]) for each in note["adapters"]
    ]
    table = PageTable(header=("run", "step", "weight", "BLAKE2b-256 of its weights"), rows=rows)
    said = f"Merged by peft's add_weighted_adapter: {', '.join([note['merge']['method'], *how])}."
    lines = [*_yaml(head), "", "# Merged adapter", ""]
    lines += [f"An adapter over `{base if is_hub_name(base) else PurePath(base).name}`, made of others.", ""]
    lines += markdown_section("What was merged", [table, PageText(lines=[said])])
    lines += ["", f"Written by gangline {__version__}."]
    write_atomic(folder / MODEL_CARD, ("\n".join(lines) + "\n").encode())


def _is_random(run: RunRecords) -> bool:
    return run.job is not None and run.job.model.start == "random"


def _opening(run: RunRecords, note: Mapping[str, Any]) -> list[str]:
    base = str(note["base_model"])
    named = f"`{base if is_hub_name(base) else PurePath(base).name}`"
    if _is_random(run):
        made = f"A model of the shape of {named}, trained from random weights"
    elif note["method"] == "full":
        made = f"A model trained from {named}, every weight"
    else:
        whole = ", merged into it: a whole model" if note["merged"] else ""
        made = f"An adapter ({note['method']}) over {named}{whole}"
    return [f"{made}. Trained with gangline; this is step {note['step']} of run `{note['run']}`."]


def _sections_of(run: RunRecords) -> Mapping[str, Sequence[Block]]:
    return summary_page(run, secrets=secrets_of(os.environ)).sections


def _shares(run: RunRecords, private: _Private) -> list[Block] | None:
    """The part of each host in the batch, and of the tokens per second."""
    rate = run.figures.tokens_per_s
    if run.plan is None or not rate:
        return None
    parts: dict[str, float] = {}
    for rank in run.plan.ranks:
        parts[rank.host] = parts.get(rank.host, 0.0) + rank.percent
    if not 99 < sum(parts.values()) < 101:  # stages of a pipeline: every token goes through each of them
        return None
    rows = [(host, f"{part:.0f} %", f"{rate * part / 100:,.0f}") for host, part in parts.items()]
    table = PageTable(header=("host", "part of the batch as planned", "tokens per second"), rows=rows)
    return [private.block(table)]


def _scores(run: RunRecords, step: int, private: _Private) -> list[Block]:
    """What `gangline evaluate` said of this step; files that cannot be read are passed over."""
    blocks: list[Block] = []
    for path in sorted(run.layout.evaluations.glob(f"step-{step}-*.json")):
        record = json_object(path.read_bytes())
        if record is None or not isinstance(record.get("scores"), list):
            continue
        header, rows = score_rows(record["scores"])
        by = f"By lm_eval {record.get('lm_eval', '')}, seed {record.get('seed', '')}"
        against = f"; before: {record['against']}" if record.get("against") else ""
        blocks += [PageTable(header=header, rows=rows), private.block(PageText(lines=[f"{by}{against}."]))]
    return blocks


def _repeat(run: RunRecords, private: _Private) -> list[Block]:
    """The command and the job file, as they were typed."""
    typed = run.typed
    if typed is None:
        blocks: list[Block] = [PageText(lines=["The command that started the run is not recorded."])]
    else:
        install = f"pip install 'gangline[train]=={typed.gangline}'"
        blocks = [
            PageText(lines=[install, joined(typed.words)], verbatim=True),
            PageText(lines=[f"{PurePath(typed.job_file).name}, as it was then:"]),
            PageText(lines=typed.job_text.rstrip("\n").split("\n"), verbatim=True),
        ]
    written = PageText(lines=[f"Written by gangline {__version__}. Hosts have stand-ins here; folders are left out."])
    return [*map(private.block, blocks), written]


class _Private:
    """Texts for strangers."""

    def __init__(self, run: RunRecords) -> None:
        hosts = [facts.host for facts in run.inventory.hosts] if run.inventory else []
        hosts += [rank.host for rank in run.plan.ranks] if run.plan else []
        hosts += [each.host for each in run.figures.ranks.values()]
        hosts += [platform.node(), platform.node().partition(".")[0]]
        self._redaction = Redaction(hosts=filter(None, hosts), users=[_account()], secrets=secrets_of(os.environ))

    def text(self, text: str) -> str:
        """Without names of machines and accounts, secrets, and the folders in which files lie."""
        return self._redaction.text(without_folders(text))

    def block(self, block: Block) -> Block:
        """The same of all texts of a block."""
        if isinstance(block, PageText):
            return PageText(lines=self.text("\n".join(block.lines)).split("\n"), verbatim=block.verbatim)
        if isinstance(block, PageTable):
            return PageTable(header=block.header, rows=[[self.text(cell) for cell in row] for row in block.rows])
        if isinstance(block, PageCurve):
            return block
        return type(block)(names=block.names, rows=[(self.text(name), parts) for name, parts in block.rows])


def without_folders(text: str) -> str:
    """A text in which absolute paths are the names of their files alone."""
    text = _QUOTED.sub(lambda found: found[1] + found[2] + found[1], text)
    return _PATH.sub(lambda found: found[1].rpartition("/")[2], text)


def _account() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # an account without a name, as in a container
        return "root"
