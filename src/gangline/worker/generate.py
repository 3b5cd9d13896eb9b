"""`python -m gangline.worker generate FOLDER | --run RUN --checkpoint PART`: talk with a model.

With --prompt one answer, streamed to stdout; without, a line from stdin is a turn. Ctrl-C ends an answer, Ctrl-D the
chat. A tokenizer's chat template is used where there is one (not with --plain); a model that was tuned on instruction
rows gets its lines in that form; any other goes on with the text as it is.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from gangline.errors import ModelError, RunFailed, UsageError, error_summary
from gangline.formats import FORMATS
from gangline.runs.files import read_json
from gangline.runs.job import ModelJob
from gangline.runs.layout import ADAPTER_CONFIG, EXPORT_NOTE
from gangline.worker.data.tokenise import stop_ids, with_template
from gangline.worker.talk import (
    DEFAULT,
    Answerer,
    Interrupted,
    Message,
    Sampling,
    answer_once,
    chat,
    without_controls,
)
from gangline.worker.tokenizer import load_tokenizer
from gangline.worker.trained import hush_libraries, load_trained, open_checkpoint

BASE = "base"
LESS = "shorter answers (--max-tokens), a shorter chat, or end what else runs on the device"
SMALLER = "end what else runs there; or take a smaller form: gangline export --gguf q8_0 for llama.cpp and Ollama"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """A model ready to answer, and the form of its prompts."""

    model: Any
    tokenizer: Any
    form: str
    """`chat`: by the tokenizer's chat template. `plain`: the text as it is. Else a data format, by its prompt."""

    def answer(self, messages: Sequence[Message], sampling: Sampling, write: Callable[[str], None]) -> str:
        """Answer the last of `messages`, giving words to `write` as they come; the whole answer.

        Ctrl-C ends the answer and raises Interrupted with what was said. Raises UsageError for a prompt that leaves
        no room for an answer.
        """
        limit = self.context
        tokens = self._fit(messages, sampling.max_tokens, limit)
        room = sampling.max_tokens if limit is None else max(1, min(sampling.max_tokens, limit - tokens.shape[1]))
        pad_token = self.tokenizer.pad_token_id
        streamer = WordStreamer(self.tokenizer, write)
        # the None values take back proposals of a model's generation_config.json
        drawing: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if sampling.temperature > 0:
            drawing = {"do_sample": True, "temperature": sampling.temperature}
        try:
            with torch.inference_mode(), in_memory("the device has no memory left for this answer", LESS):
                self.model.generate(
                    input_ids=tokens,
                    attention_mask=torch.ones_like(tokens),
                    streamer=streamer,
                    max_new_tokens=room,
                    pad_token_id=self.tokenizer.eos_token_id if pad_token is None else pad_token,
                    eos_token_id=self.ends(),
                    **drawing,
                )
        except KeyboardInterrupt:
            streamer.end()
            raise Interrupted(streamer.text) from None
        return streamer.text

    def _fit(self, messages: Sequence[Message], max_tokens: int, limit: int | None) -> torch.Tensor:
        """The tokens of the conversation; the oldest turns are left out while the answer would have no room."""
        start = 0
        while True:
            tokens = self.prompt_tokens(messages[start:])
            if limit is None or tokens.shape[1] + min(max_tokens, limit // 4) <= limit:
                return tokens.to(self.model.device)
            if start + 2 >= len(messages):
                break
            start += 2
        if tokens.shape[1] < limit:
            return tokens.to(self.model.device)
        raise UsageError(
            "the prompt is too long for this model",
            seen=f"expected fewer than {limit} tokens, with room for an answer; seen {tokens.shape[1]}",
            fix="shorten it",
        )

    def prompt_tokens(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> torch.Tensor:
        """The tokens of a conversation that ask for the next answer: (1, tokens)."""
        if self.form == "chat":
            encoded = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            tokens: torch.Tensor = encoded["input_ids"]
            return tokens
        text = messages[-1]["content"]
        if self.form != "plain" and (prompt := FORMATS[self.form].prompt) is not None:
            with FORMATS.guard(self.form):
                text = prompt(text)
        return self.text_tokens(text)

    def text_tokens(self, text: str) -> torch.Tensor:
        """The tokens of a text that the model goes on with: (1, tokens)."""
        tokens: torch.Tensor = self.tokenizer(text, return_tensors="pt")["input_ids"]
        # Some tokenizers end every text; a prompt that has ended has no answer.
        ended = tokens.shape[1] > 1 and tokens[0, -1] == self.tokenizer.eos_token_id
        return tokens[:, :-1] if ended else tokens

    def ends(self) -> list[int] | None:
        """Tokens after which an answer is over: the model's own, and in a chat the end of a turn."""
        known = self.model.generation_config.eos_token_id
        ends = [*(known if isinstance(known, list) else [known]), self.tokenizer.eos_token_id]
        ends += stop_ids(self.tokenizer) if self.form == "chat" else []
        return [*dict.fromkeys(each for each in ends if each is not None)] or None

    @property
    def context(self) -> int | None:
        """The tokens of prompt and answer together that the model was made for."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)


class WordStreamer(TextStreamer):
    """Hands out whole words as soon as they are certain, without what could steer a terminal."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002 - the base class gives it
        """Called by the base class with the next words."""
        clean = without_controls(text)
        self.text += clean
        if clean:
            self._write(clean)


def generate_main(argv: list[str]) -> int:
    """Read the command line, load the model, and answer once or chat."""
    words = _parse(argv)
    hush_libraries()
    if words.run:
        speaker = open_run(words.run, words.checkpoint, plain=words.plain)
    else:
        speaker = open_folder(words.folder, adapter=words.adapter, plain=words.plain)
    if words.chat and speaker.form != "chat":
        raise UsageError(
            "--chat: this model's tokenizer has no chat template",
            seen="expected chat_template.jinja beside the tokenizer",
            fix="leave --chat out",
        )
    sampling = Sampling(max_tokens=words.max_tokens, temperature=words.temperature, seed=words.seed)
    torch.manual_seed(sampling.seed)
    models = [("tuned", speaker), (BASE, base_beside(speaker, words))] if words.against_base else [("", speaker)]
    if words.prompt is None:
        return chat(models, sampling, source=sys.stdin, answers=sys.stdout, talk=sys.stderr)
    return answer_once(models, words.prompt, sampling, answers=sys.stdout)


def open_folder(folder: Path, *, adapter: Path | None = None, plain: bool = False) -> Speaker:
    """A model folder, an adapter's folder, or a model folder with an adapter beside it. Raises ModelError."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    source = ModelJob(path=str(folder))
    if adapter is None and (folder / ADAPTER_CONFIG).is_file():
        source, adapter = _base_of_adapter(folder), folder
    own = adapter is not None and (adapter / "tokenizer_config.json").is_file()  # of its own, with tokens or a template
    tokenizer = load_tokenizer(ModelJob(path=str(adapter)) if own else source)
    with loading(source.path, adapter):
        model = AutoModelForCausalLM.from_pretrained(source.path, revision=source.revision or "main", dtype="auto")
        if own and len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)  # the adapter brings the new rows
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
    return _speaker(model, tokenizer, data_format=_format_of(adapter or folder), plain=plain)


def open_base(*, folder: Path | None = None, run: Path | None = None, part: Path | None = None) -> Speaker:
    """The model that a run, or the export of a folder, was trained from, with its own tokenizer.

    Raises UsageError where there is none, ModelError, CheckpointError.
    """
    from transformers import AutoModelForCausalLM

    if run is not None and part is not None:
        job = open_checkpoint(run, part).job
        source, data_format = job.model, job.data.format
        if source.start == "random":
            raise _no_base(str(run), "its training began with random weights")
        tokenizer = with_template(load_tokenizer(source), job.data)
    else:
        assert folder is not None
        source, data_format = _base_of_folder(folder), _format_of(folder)
        tokenizer = load_tokenizer(source)
    with loading(source.path, None):
        model = AutoModelForCausalLM.from_pretrained(source.path, revision=source.revision or "main", dtype="auto")
    return _speaker(model, tokenizer, data_format=data_format, plain=False)


class WithoutAdapter:
    """The model below an adapter: the same weights, which are in memory once."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker

    def answer(self, messages: Sequence[Message], sampling: Sampling, write: Callable[[str], None]) -> str:
        """See `Speaker.answer`."""
        with self._speaker.model.disable_adapter():
            return self._speaker.answer(messages, sampling, write)


def base_beside(speaker: Speaker, words: argparse.Namespace) -> Answerer:
    """The model that a speaker was trained from, asked in the same form. Raises as `open_base`."""
    from peft import PeftModel

    if isinstance(speaker.model, PeftModel):
        return WithoutAdapter(speaker)
    base = open_base(folder=words.folder, run=words.run, part=words.checkpoint)
    return Speaker(model=base.model, tokenizer=base.tokenizer, form=base.form if base.form == "plain" else speaker.form)


def _base_of_folder(folder: Path) -> ModelJob:
    if (folder / ADAPTER_CONFIG).is_file():
        return _base_of_adapter(folder)
    base = str(read_json(folder / EXPORT_NOTE).get("base_model", "")) if (folder / EXPORT_NOTE).is_file() else ""
    if not base:
        raise _no_base(str(folder), f"it holds a whole model and no {EXPORT_NOTE} that names one")
    return ModelJob(path=base)


def _no_base(name: str, seen: str) -> UsageError:
    return UsageError(
        f"{name} has no base model", seen=seen, fix="name the other model by its folder: --against FOLDER"
    )


def form_of_folder(folder: Path, tokenizer: Any) -> str:
    """The form of the prompts with which the model or adapter of a folder was trained; see `Speaker.form`."""
    return _form(_format_of(folder), has_template=bool(tokenizer.chat_template))


def _format_of(folder: Path) -> str:
    note = folder / EXPORT_NOTE
    return str(read_json(note).get("format", "text")) if note.is_file() else "text"


def open_run(run: Path, part: Path, *, plain: bool = False) -> Speaker:
    """The model of a checkpoint that was not exported. Raises UsageError, ModelError, CheckpointError."""
    checkpoint = open_checkpoint(run, part)
    job = checkpoint.job
    tokenizer = with_template(load_tokenizer(job.model, job.tokens), job.data)
    return _speaker(load_trained(checkpoint, packed=True), tokenizer, data_format=job.data.format, plain=plain)


def _speaker(model: Any, tokenizer: Any, *, data_format: str, plain: bool) -> Speaker:
    form = "plain" if plain else _form(data_format, has_template=bool(tokenizer.chat_template))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with in_memory(f"the model does not fit into the memory of {device}", SMALLER):
        model = model.to(device).eval()
    return Speaker(model=model, tokenizer=tokenizer, form=form)


def _form(data_format: str, *, has_template: bool) -> str:
    if data_format not in FORMATS:
        log.warning("%s: no such data format here, so lines go to the model as they are", data_format)
        return "plain"
    rules = FORMATS[data_format]
    if rules.prompt is not None:
        return data_format
    return "chat" if has_template and (rules.whole or rules.messages is not None) else "plain"


def _base_of_adapter(folder: Path) -> ModelJob:
    config = read_json(folder / ADAPTER_CONFIG)
    return ModelJob(path=config["base_model_name_or_path"], revision=config.get("revision"))


@contextmanager
def loading(model: str, adapter: Path | None) -> Iterator[None]:
    """Errors of a model that is read, raised as ModelError."""
    try:
        with in_memory(f"{model} does not fit into the memory here", SMALLER):
            yield
    except RunFailed:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        place = f"{model} with the adapter {adapter}" if adapter else model
        raise ModelError(
            f"no model can be loaded from {place}",
            seen=f"expected a folder that `gangline export` or transformers wrote; {error_summary(error)}",
            fix="check the path; an adapter needs its base model where it was trained, or name both: "
            "the base folder and --adapter",
        ) from error


@contextmanager
def in_memory(what: str, fix: str) -> Iterator[None]:
    """The lack of memory, of a GPU or of the computer, raised as RunFailed; other errors as they are."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        raise RunFailed(what, seen=error_summary(error), fix=fix) from error


def lacks_memory(error: BaseException) -> bool:
    """Whether an error of torch says that there was no memory left; of the computer's memory it has no class for it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gangline.worker generate")
    parser.add_argument("folder", type=Path, nargs="?", help="a model folder, or an adapter's")
    parser.add_argument("--adapter", type=Path, help="an adapter for the model folder")
    parser.add_argument("--run", type=Path, help="a run directory, instead of a folder")
    parser.add_argument("--checkpoint", type=Path, help="a part of a committed checkpoint of that run")
    parser.add_argument("--prompt", help="answer this prompt and exit")
    parser.add_argument("--max-tokens", type=int, default=DEFAULT.max_tokens)
    parser.add_argument("--temperature", type=float, default=DEFAULT.temperature)
    parser.add_argument("--seed", type=int, default=DEFAULT.seed)
    parser.add_argument("--against-base", action="store_true", help="the model before training answers, too")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="insist on the chat template")
    form.add_argument("--plain", action="store_true", help="go on with the text as it is")
    words = parser.parse_args(argv)
    if bool(words.run) == bool(words.folder) or bool(words.run) != bool(words.checkpoint):
        raise UsageError(
            "generate needs one model",
            seen="expected FOLDER, or --run with --checkpoint",
            fix="python -m gangline.worker generate --help",
        )
    if words.max_tokens < 1 or words.temperature < 0:
        raise UsageError(
            "--max-tokens or --temperature is out of range",
            seen=f"expected at least 1, and at least 0; seen {words.max_tokens} and {words.temperature}",
            fix="--max-tokens 256 --temperature 0.7 are the defaults",
        )
    return words
