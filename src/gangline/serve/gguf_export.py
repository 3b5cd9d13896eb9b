"""A model folder for llama.cpp and Ollama: converted on this computer, and what that lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gangline.errors import UsageError
from gangline.provision.ask import ask_worker
from gangline.provision.code import trainer_here
from gangline.provision.console import SILENT, Console
from gangline.provision.llama_cpp import bring_llama_cpp
from gangline.transport.local import LocalTransport

FORMS = ("f32", "f16", "bf16", "q8_0", "q4_k_m")
"""How weights can be stored: what llama.cpp's converter writes by itself, and q4_k_m by way of f32."""


def refuse_forms(forms: Sequence[str], *, check: bool) -> None:
    """Raise UsageError for forms that cannot be written, and for a check of nothing."""
    if unknown := [form for form in forms if form not in FORMS]:
        raise UsageError(
            f"--gguf {unknown[0]}: this form is not written here",
            seen=f"expected one of {', '.join(FORMS)}",
            fix=f"export with --gguf f16, then use llama.cpp's own program: "
            f"llama-quantize model-f16.gguf model-{unknown[0]}.gguf {unknown[0]}",
        )
    if check and not forms:
        raise UsageError(
            "--check is for GGUF files", seen="no --gguf", fix="add --gguf f16; other exports are always compared"
        )


def gguf_folder(
    folder: Path, to: Path, forms: Sequence[str], *, check: bool, home: Path, console: Console = SILENT
) -> dict[str, Any]:
    """Write the whole model of `folder` as GGUF files with a Modelfile into the new folder `to`: the worker's record.

    Raises UsageError, ModelError; RunFailed where a file is not the same model, and then `to` does not exist.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} holds no whole model",
            seen="expected config.json; an adapter lies over a base model",
            fix="name the run: gangline export RUN --gguf f16 merges the adapter first",
        )
    if to.exists():
        raise UsageError(f"{to} exists", seen="expected a new folder", fix="remove it, or name another one: --to DIR")
    here = trainer_here(home)
    tools = bring_llama_cpp(here, home, console=console)
    words = ["gguf", str(folder.absolute()), "--to", str(to.absolute()), "--llama-cpp", str(tools)]
    for form in forms:
        words += ["--form", form]
    words += ["--check"] if check else []
    return ask_worker(
        here, LocalTransport(here), words, on_progress=lambda record: console.progress(str(record.get("text", "")))
    )


def lost_lines(record: dict[str, Any]) -> list[str]:
    """What each file lost, and what was not written."""
    lines = [
        f"{form}: logits differ by {each['max_logit_difference']:.2g} at the most, the same likeliest word at "
        f"{each['top_agreement']:.1%} of {each['positions']} positions, perplexity {each['perplexity']:.4g} "
        f"(the model's: {each['model_perplexity']:.4g})"
        for form, each in record["lost"].items()
    ]
    return [*lines, *([record["note"]] if record["note"] else [])]
