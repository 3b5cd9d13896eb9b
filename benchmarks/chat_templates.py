"""`python -m benchmarks.chat_templates FOLDER`: which rows chat templates take, and whether what is learned is right.

FOLDER holds templates as NAME.jinja, and where there is one, NAME_training.jinja, the same with `{% generation %}`
blocks (the wheel of trl has such a folder, trl/chat_templates). Seven kinds of rows go through every template:

ok        rendered and learned as below
own rule  the template itself refuses such rows: raise_exception
REFUSED   anything else

Where there is a training template, its rows must have the mask that transformers makes of the same blocks, token by
token ("blocks"). The original's mask is compared wherever both render the same text ("original"): `=` the same,
`header` only words of the prompt differ (transformers learns them, we do not, for they are given in use), `other text`
both render something else, `DIFFERS` anything else. In any case, what is learned must hold all that the assistant says
and the template writes, and nothing that others say ("words").

The tokenizer is a byte-level one, trained on the spot on the templates; their special tokens are its special tokens.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gangline.formats import RowError
from gangline.row_files import SourceRow
from gangline.runs.job import ChatTemplateJob, DataJob, SourceJob
from gangline.worker.data.chat_template import FAULTS
from gangline.worker.data.row_formats import TokenSpan
from gangline.worker.data.tokenise import Encoder, conversations_of

_CALL = {"id": "call00001", "type": "function", "function": {"name": "sky", "arguments": {"city": "zulu", "days": 3}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "sky",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}},
    },
}


def _said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _called(content: str | None) -> list[dict[str, Any]]:
    return [
        _said("user", "uniform one"),
        _said("assistant", content, tool_calls=[_CALL]),
        _said("tool", "tango two", name="sky", tool_call_id="call00001"),
        _said("assistant", "alpha three"),
    ]


ROWS: dict[str, list[dict[str, Any]]] = {
    "one turn": [_said("user", "uniform one"), _said("assistant", "alpha two")],
    "two turns": [
        _said("user", "uniform one"),
        _said("assistant", "alpha two"),
        _said("user", "uniform three"),
        _said("assistant", "alpha four\n\n"),
    ],
    "system": [_said("system", "sierra one"), _said("user", "uniform two"), _said("assistant", " alpha three")],
    "<think>": [
        _said("user", "uniform one"),
        _said("assistant", "<think>\nhotel two\n</think>\n\nalpha two"),
        _said("user", "uniform three"),
        _said("assistant", "<think>\nhotel four\n</think>\n\nalpha four"),
    ],
    "calls, null": _called(None),
    "calls, empty": _called(""),
    "parts": [
        _said("user", [{"type": "text", "text": "uniform one"}]),
        _said("assistant", [{"type": "text", "text": "alpha two"}]),
    ],
}
_SPECIAL = re.compile("<[|\uff5c/]?[A-Za-z_\u2581|\uff5c]+[|\uff5c]?>")
THEIRS, OURS = re.compile("uniform|sierra|tango"), re.compile("alpha|hotel|zulu")


def flattened(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As the reader of rows gives them: contents are texts."""
    return [
        {**each, "content": "".join(part["text"] for part in each["content"])}
        if isinstance(each["content"], list)
        else each
        for each in messages
    ]


class Case:
    """One template with the tokenizer."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._tokenizer = tokenizer
        tokenizer.chat_template = None
        self._source = source
        data = DataJob(train=SourceJob(), format="chat", chat_template=ChatTemplateJob(name="case", text=source))
        self._conversations = conversations_of(tokenizer, data, model="case")
        self._encoder = Encoder(tokenizer)

    def ours(self, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[int], list[str]]:
        """Tokens, mask, notes; raises RowError."""
        said = self._conversations(flattened(messages), tools)
        row = SourceRow(file="rows", number=1, values={})
        span = TokenSpan(row=row, segments=said.segments, templated=True, open=said.open)
        encoded = self._encoder.encode([span])[0]
        return encoded.ids, list(encoded.learned), list(said.notes)

    def theirs(self, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[int]]:
        """What transformers makes of the `{% generation %}` blocks, of the form of the messages that we took."""
        given, _ = self._conversations.rendered(flattened(messages), tools)
        found = self._tokenizer.apply_chat_template(
            given, tools=tools, chat_template=self._source, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(found["input_ids"]), list(found["assistant_masks"])


def tokenizer_of(sources: list[str]) -> Any:
    """Byte-level BPE; what looks like a special token in a template is one."""
    special = sorted({token for source in sources for token in _SPECIAL.findall(source)})
    special = [
        token for token in special if not re.fullmatch(r"</?(tools?|function\w*|parameter\w*|\w*name\w*)>", token)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(sources, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ["<s>", "<|eos|>", *special]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|eos|>")


def _words(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    """Whether what is learned is what the assistant says: "" or what is wrong."""
    learned = tokenizer.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
    rest = tokenizer.decode([token for token, bit in zip(ids, mask, strict=True) if not bit])
    if found := THEIRS.search(learned):
        return f"learns {found.group()}"
    return f"does not learn {found.group()}" if (found := OURS.search(rest)) else ""


def _compare(case: Case, training: Case | None, messages: list[dict[str, Any]], tools: Any) -> tuple[str, str]:
    """("blocks", "original") of a row that both templates take."""
    if training is None:
        return "", ""
    ids, mask, _ = training.ours(messages, tools)
    try:
        blocks = "=" if (ids, mask) == training.theirs(messages, tools) else "DIFFERS"
    except FAULTS:
        blocks = "transformers refuses"
    own_ids, own_mask, _ = case.ours(messages, tools)
    if own_ids != ids:
        return blocks, "other text"
    if own_mask == mask:
        return blocks, "="
    # what only transformers learns: stretches right before what both learn, of which we learn nothing
    extra = [theirs and not ours for ours, theirs in zip(own_mask, mask, strict=True)]
    fewer = any(ours and not theirs for ours, theirs in zip(own_mask, mask, strict=True))
    starts = [at for at, bit in enumerate(extra) if bit and not mask[at - 1]]
    runs = all(_is_header(extra, own_mask, at) for at in starts) and sum(extra) <= 8 * len(starts)
    return blocks, "header" if runs and not fewer else "DIFFERS"


def _is_header(extra: list[bool], learned: list[int], at: int) -> bool:
    while at < len(extra) and extra[at]:
        at += 1
    return at < len(learned) and bool(learned[at])


def look(tokenizer: Any, original: str, training: str | None, messages: list[dict[str, Any]]) -> dict[str, str]:
    """One cell of the table."""
    tools = [_TOOL] if any(each.get("tool_calls") for each in messages) else None
    case = Case(tokenizer, original)
    try:
        ids, mask, notes = case.ours(messages, tools)
    except RowError as error:
        own = "refuses the messages" in str(error) and "raise_exception" in original
        return {"taken": "own rule" if own else "REFUSED", "why": str(error)}
    try:
        blocks, same = _compare(case, Case(tokenizer, training) if training else None, messages, tools)
    except RowError as error:
        blocks, same = "training template refuses", str(error)
    wrong = _words(tokenizer, ids, mask)
    return {"taken": "ok", "blocks": blocks, "original": same, "words": wrong, "notes": "; ".join(notes)}


def main(argv: list[str]) -> int:
    """Print the table, then the counts; 1 if anything was refused or differs."""
    parser = argparse.ArgumentParser(prog="benchmarks.chat_templates", description=__doc__)
    parser.add_argument("folder", type=Path, help="templates as NAME.jinja and NAME_training.jinja")
    parser.add_argument("--only", help="names that match this pattern", default="")
    options = parser.parse_args(argv)
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(options.folder.glob("*.jinja"))}
    tokenizer = tokenizer_of(list(sources.values()))
    counts: Counter[str] = Counter()
    for name in [each for each in sources if not each.endswith("_training") and re.search(options.only, each)]:
        print(name)
        for kind, messages in ROWS.items():
            found = look(tokenizer, sources[name], sources.get(f"{name}_training"), messages)
            counts.update(
                f"{key}: {value}" for key, value in found.items() if key in {"taken", "blocks", "original"} and value
            )
            counts.update(["words: WRONG"] if found.get("words") else [])
            print(f"  {kind:<13}" + "  ".join(f"{key}: {value}" for key, value in found.items() if value))
    print(*(f"{count:5}  {what}" for what, count in sorted(counts.items())), sep="\n")
    return int(any(word in what for what in counts for word in ("REFUSED", "DIFFERS", "WRONG")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
