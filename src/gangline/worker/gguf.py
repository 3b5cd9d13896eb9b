"""`python -m gangline.worker gguf FOLDER --to DIR --form f16 --llama-cpp DIR`: a model for llama.cpp and Ollama.

llama.cpp's own converter does the work, in this process, with its own `gguf` on the path. Where it does not know a
tokenizer's way of cutting text, the pattern of tokenizer.json is compared with those that it has names for.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gangline.errors import GanglineError, ModelError
from gangline.worker.data.tokenise import stop_ids, template_of
from gangline.worker.export import refuse_existing
from gangline.worker.gguf_check import TOLERANCE, check_file, check_text
from gangline.worker.json_lines import write_line
from gangline.worker.trained import hush_libraries

MIXED = "q4_k_m"
"""The form that is made from one of the others."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    (_WORDS + r"\p{N}{1,3}" + _REST, True): "llama-bpe",
    (_WORDS + r"\p{N}" + _REST, False): "qwen2",
    ("ByteLevel", False): "gpt-2",
}
"""Pattern of tokenizer.json, and whether whole words skip the merges -> the name that llama.cpp has for it."""


def gguf_main(argv: list[str]) -> int:
    """Read the command line, convert, check, and report in JSON lines on stdout."""
    parser = argparse.ArgumentParser(prog="gangline.worker gguf")
    parser.add_argument("folder", type=Path, help="a folder with a whole model")
    parser.add_argument("--to", type=Path, required=True, help="the folder to make")
    parser.add_argument(
        "--form", choices=list(TOLERANCE), action="append", required=True, help="how weights are stored"
    )
    parser.add_argument("--llama-cpp", type=Path, required=True, help="the folder with llama.cpp's converter")
    parser.add_argument("--check", action="store_true", help="compare the logits of each file, too")
    options = parser.parse_args(argv)
    hush_libraries()
    sys.path[:0] = [str(options.llama_cpp), str(options.llama_cpp / "gguf-py")]
    lost, note = {}, ""
    with new_folder(options.to) as fresh:
        for form in dict.fromkeys(options.form):
            path = fresh / f"model-{form}.gguf"
            write_line("progress", text=f"converting to {form}")
            _write(options, path, form)
            write_line("progress", text=f"loading {path.name} with llama.cpp")
            if options.check:
                lost[form] = asdict(check_file(path, options.folder, form))
            else:
                check_text(path, options.folder)
        try:
            write_modelfile(options.folder, fresh, f"model-{next(iter(options.form))}.gguf")
        except ModelError as error:
            note = f"{error.what}: {error.seen}; {error.fix}"
    files = sorted(path.name for path in options.to.iterdir())
    write_line("result", folder=str(options.to), files=files, lost=lost, note=note)
    return 0


def _write(options: argparse.Namespace, path: Path, form: str) -> None:
    """One file; q4_k_m by way of a file in f32, which is checked where the logits of files are, and does not stay."""
    if form != MIXED:
        convert(options.folder, path, form, llama_cpp=options.llama_cpp)
        return
    from gangline.worker.gguf_mix import quantise_file

    whole = path.with_name("model-whole.gguf")
    convert(options.folder, whole, "f32", llama_cpp=options.llama_cpp)
    if options.check:
        check_file(whole, options.folder, "f32")
    quantise_file(whole, path)
    whole.unlink()


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """A hidden folder beside `to`, which has its name as soon as all went well."""
    refuse_existing(to)
    fresh = to.with_name(f".{to.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
        refuse_existing(to)
        fresh.rename(to)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def convert(folder: Path, path: Path, form: str, *, llama_cpp: Path) -> None:
    """Write the model of a folder as one GGUF file. Raises ModelError where the converter refuses it."""
    from conversion import base  # type: ignore[import-not-found]

    known: Callable[[Any, Any], str] = base.TextModel.get_vocab_base_pre

    def name_of(model: Any, tokenizer: Any) -> str:
        try:
            return known(model, tokenizer)
        except NotImplementedError:
            return pre_tokenizer(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))

    words, said = sys.argv, io.StringIO()
    base.TextModel.get_vocab_base_pre = name_of
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(path), "--outtype", form]
    try:
        with redirect_stdout(said), redirect_stderr(said):
            runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")
    except GanglineError:
        raise
    except SystemExit as end:
        if end.code:
            raise _refused(folder, said.getvalue()) from end
    except Exception as error:  # whatever a model that it does not know raises in there
        raise _refused(folder, f"{type(error).__name__}: {error}") from error
    finally:
        base.TextModel.get_vocab_base_pre, sys.argv = known, words
        logging.getLogger().handlers.clear()
    if not path.is_file():
        raise _refused(folder, said.getvalue())


def _refused(folder: Path, said: str) -> ModelError:
    return ModelError(
        f"llama.cpp's converter refuses {folder}",
        seen=(said.strip().splitlines() or ["it wrote no file"])[-1][:300],
        fix="use the folder with transformers or vLLM, or convert it with a newer llama.cpp",
    )


def pre_tokenizer(description: Mapping[str, Any]) -> str:
    """llama.cpp's name for how a tokenizer.json cuts text. Raises ModelError where it has none."""
    whole_words = bool((description.get("model") or {}).get("ignore_merges", False))
    pattern = _pattern(description.get("pre_tokenizer") or {})
    name = PATTERNS.get((pattern, whole_words))
    if name is None:
        raise ModelError(
            "llama.cpp has no name for how this tokenizer cuts text",
            seen=f"expected one of {', '.join(PATTERNS.values())}; tokenizer.json has {pattern[:160] or 'no pattern'}"
            f"{', with ignore_merges' if whole_words else ''}",
            fix="train over a base model whose tokenizer llama.cpp knows; with transformers the model works as it is",
        )
    return name


def _pattern(step: Mapping[str, Any]) -> str:
    """The pattern of a pre-tokenizer: "ByteLevel" for the built-in one of GPT-2, empty where it is of another kind."""
    steps = step["pretokenizers"] if step.get("type") == "Sequence" else [step]
    splits = [each for each in steps if each.get("type") == "Split"]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(steps) != len(splits) + 1:
        return ""
    if not splits:
        return "ByteLevel" if last.get("use_regex", True) else ""
    (first, *others) = splits
    fits = not others and first.get("behavior") == "Isolated" and not first.get("invert") and not last.get("use_regex")
    return str(first.get("pattern", {}).get("Regex", "")) if fits else ""


def write_modelfile(folder: Path, to: Path, name: str) -> None:
    """Write what Ollama makes a model from. Raises ModelError where the chat template has no such form."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [f"FROM ./{name}"]
    if template_of(tokenizer) is not None:
        lines.append(f'TEMPLATE """{ollama_template(tokenizer)}"""')
    stops = [str(tokenizer.added_tokens_decoder[number]) for number in stop_ids(tokenizer)]
    ends = dict.fromkeys([*stops, *filter(None, [tokenizer.eos_token])])
    lines += [stop_line(stop) for stop in ends]
    (to / "Modelfile").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def stop_line(stop: str) -> str:
    """A line of a Modelfile that ends answers at this text. Raises ModelError for one that has no form there: Ollama
    takes the text between the quotes as it is (`unquote` in its parser/parser.go).
    """
    if '"' in stop or "\n" in stop or not is_kept(stop):
        raise ModelError(
            "no Modelfile is written, for it could not hold where answers end",
            seen=f"the stop word {stop!r} cannot be written between quotes",
            fix="llama.cpp's own server reads where answers end out of the GGUF file: llama-server -m FILE",
        )
    return f'PARAMETER stop "{stop}"'


def is_kept(text: str) -> bool:
    """Whether Ollama keeps every character: its parser leaves out what is not printable."""
    return all(each.isprintable() or each in "\t\r\n" for each in text)


def ollama_template(tokenizer: Any) -> str:
    """A chat template in Ollama's language, for templates that put fixed text around each message.

    Raises ModelError for others: one that is nearly right makes a model that is nearly as good.
    """
    around: dict[str, tuple[str, str]] = {}
    system, user, answer = ({"role": role, "content": f"\x01{role}\x01"} for role in ("system", "user", "assistant"))
    try:
        start = _render(tokenizer, [user])
        asked = _render(tokenizer, [user], add_generation_prompt=True)
        opening = asked.removeprefix(start)
        texts = _render(tokenizer, [system, user, answer, user, answer])
        around["user"] = _around(start, user)
        around["system"] = _around(_render(tokenizer, [system, user]).removesuffix(start), system)
        around["assistant"] = _around(_render(tokenizer, [user, answer]).removeprefix(start), answer)
    except Exception as error:  # templates raise what they like
        raise _no_template(f"{type(error).__name__}: {error}") from error
    again = "".join(
        f"{around[each['role']][0]}{each['content']}{around[each['role']][1]}"
        for each in (system, user, answer, user, answer)
    )
    if again != texts or not asked.startswith(start):
        raise _no_template("five messages give another text than the five one by one")
    if any(
        mark in text
        for text in (*(part for pair in around.values() for part in pair), opening)
        for mark in ("{{", '"""')
    ):
        raise _no_template("its text has {{ or quotation marks of Ollama's own language")
    if not is_kept("".join((*(part for pair in around.values() for part in pair), opening))):
        raise _no_template("its text has characters that are not printable, which Ollama leaves out")
    cases = [
        f'{{{{ {"if" if not number else "else if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        for number, (role, (before, after)) in enumerate(around.items())
    ]
    return "{{- range .Messages }}" + "".join(cases) + "{{ end }}{{ end }}" + opening


def _render(tokenizer: Any, messages: list[dict[str, str]], **how: Any) -> str:
    """The text of a chat, without the token that begins every text: llama.cpp adds it by itself."""
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **how)
    return text.removeprefix(tokenizer.bos_token or "")


def _around(text: str, message: Mapping[str, str]) -> tuple[str, str]:
    before, content, after = text.partition(message["content"])
    if not content:
        raise ValueError(f"the text of {message['role']} is changed")
    return before, after


def _no_template(seen: str) -> ModelError:
    return ModelError(
        "no Modelfile is written, for the chat template has no form in Ollama's language",
        seen=seen,
        fix="llama.cpp's own server reads the template out of the GGUF file: llama-server --jinja -m FILE",
    )
