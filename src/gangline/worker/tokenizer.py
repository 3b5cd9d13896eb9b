"""The tokenizer of a model, without torch: a look at rows before a start takes one second instead of five."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gangline.errors import ModelError, error_summary
from gangline.runs.job import NO_TOKENS, ModelJob, TokensJob


def load_tokenizer(model: ModelJob, tokens: TokensJob = NO_TOKENS) -> Any:
    """The model's own tokenizer, with a job's tokens in it. Raises ModelError."""
    from transformers import AutoTokenizer

    refuse_remote_code(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, **source_words(model))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.path: no tokenizer can be loaded from {model.path}",
            seen=f"expected tokenizer.json or the tokenizer's own files; {error_summary(error)}",
            fix="copy the tokenizer files into the model folder, or name a model that has them",
        ) from error
    extend_tokenizer(tokenizer, tokens)
    return tokenizer


def extend_tokenizer(tokenizer: Any, tokens: TokensJob) -> None:
    """Put a job's tokens into its tokenizer."""
    from transformers import AddedToken

    if tokens.special:
        tokenizer.add_special_tokens(dict(tokens.special))
    if tokens.add:
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in tokens.add])


def source_words(model: ModelJob) -> dict[str, Any]:
    """The words with which transformers finds a model of the hub."""
    return {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}


def refuse_remote_code(model: ModelJob) -> None:
    """Raise ModelError for a folder that brings Python code which the job does not allow."""
    config = Path(model.path) / "config.json"
    if model.trust_remote_code or not config.is_file():
        return
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(
            f"model.path: {config} is not JSON", seen=f"{error}", fix="copy the model folder again"
        ) from error
    from transformers import CONFIG_MAPPING

    # a family that transformers knows uses the library's own code and passes an old auto_map over
    if data.get("auto_map") and data.get("model_type") not in CONFIG_MAPPING:
        raise ModelError(
            f"model.path: {model.path} wants to run its own code",
            seen=f"config.json says model_type {data.get('model_type')!r}, which transformers does not know, and has "
            "auto_map, which loads Python files from the model; nothing of it was executed",
            fix="read those files, then set model.trust_remote_code: true with the revision that you read, "
            "or use a model that transformers knows",
        )
