"""Tokens beside those of a model: in its tokenizer, in its tables, and in the ids that its configuration names.

A new row is the mean of the rows that were there, without the noise that transformers adds to it: every rank, on any
machine, gets the same one. It is summed in fp64 and rounded once. Tokens that find a row in the table, for many tables
have more rows than the tokenizer has tokens, take that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gangline.errors import ModelError
from gangline.runs.job import NO_TOKENS, Job
from gangline.worker.tokenizer import load_tokenizer

ADDED = "added"
"""In `method.train_tokens`: all tokens that the job adds."""
ROLES = ("bos_token", "eos_token", "pad_token")
"""Roles whose ids a model's configuration names, too."""
ROWS = 4096
"""Of a table that are summed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a job's tokenizer says of its tokens."""

    num_tokens: int
    added: tuple[int, ...]
    """Numbers of the tokens that the job adds."""
    roles: dict[str, int]
    """Of `ROLES`, those that the job names."""
    numbers: dict[str, int]
    """Text -> number."""


def vocabulary_of(job: Job) -> Vocabulary:
    """Of the tokenizer with the job's tokens in it. Raises ModelError."""
    before = set(load_tokenizer(job.model).get_vocab())
    tokenizer = load_tokenizer(job.model, job.tokens)
    numbers: dict[str, int] = tokenizer.get_vocab()
    new = [text for text in job.tokens.special.values() if text not in before]
    return Vocabulary(
        num_tokens=len(tokenizer),
        added=tuple(sorted({numbers[text] for text in (*job.tokens.add, *new)})),
        roles={role: numbers[job.tokens.special[role]] for role in ROLES if role in job.tokens.special},
        numbers=numbers,
    )


def extends(job: Job) -> bool:
    """Whether a job has tokens beside those of the model."""
    return job.tokens != NO_TOKENS


def extend_config(config: Any, vocabulary: Vocabulary) -> None:
    """Ids of roles; and the number of rows, where a token would find none."""
    text = config.get_text_config()
    text.vocab_size = max(text.vocab_size, vocabulary.num_tokens)
    for role, number in vocabulary.roles.items():
        for each in {id(config): config, id(text): text}.values():
            setattr(each, id_key(role), number)


def id_key(role: str) -> str:
    """The key of a configuration that has the id of a role, such as pad_token."""
    return "_".join((role, "id"))  # noqa: FLY002  (for the test of private names, "_id" would be one)


@torch.no_grad()
def extend_model(model: Any, job: Job) -> None:
    """Give a model that is loaded a row for each token, and the ids of roles. Raises ModelError."""
    vocabulary = vocabulary_of(job)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = table.weight.shape[0]
    if vocabulary.num_tokens > rows:
        _require_trained(model, job, num_new=vocabulary.num_tokens - rows)
        means = [None if part is None else _mean(part) for part in (table, head)]
        model.resize_token_embeddings(vocabulary.num_tokens, mean_resizing=False)
        for part, mean in zip((model.get_input_embeddings(), model.get_output_embeddings()), means, strict=True):
            for name, value in (mean or {}).items():
                getattr(part, name)[rows:] = value
    extend_config(model.config, vocabulary)
    for role, number in vocabulary.roles.items() if model.can_generate() else ():
        setattr(model.generation_config, id_key(role), number)


def trained_rows(model: Any, job: Job) -> list[int] | dict[str, list[int]] | None:
    """`trainable_token_indices` as peft takes them. Raises ModelError for a text that is no token."""
    wanted = job.method.train_tokens
    if not wanted:
        return None
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if wanted == (ADDED,):
        added = list(vocabulary_of(job).added)
        if head is None or head.weight is table.weight:
            return added
        parts = [name for name, part in model.named_modules() if part is table or part is head]
        return {name.rpartition(".")[2]: added for name in parts}
    numbers = vocabulary_of(job).numbers if any(isinstance(each, str) for each in wanted) else {}
    unknown = [
        each for each in wanted if (each not in numbers if isinstance(each, str) else each >= table.weight.shape[0])
    ]
    if unknown:
        raise ModelError(
            f"method.train_tokens: {unknown[0]!r} is no token of this model",
            seen=f"its table has {table.weight.shape[0]} rows",
            fix="write its number, or its text as the tokenizer has it; tokens.add makes new ones",
        )
    return sorted({numbers[each] if isinstance(each, str) else each for each in wanted})


def _mean(part: Any) -> dict[str, torch.Tensor]:
    """Of the rows of a table or a head, by the names of its parameters."""
    found = {}
    for name, parameter in part.named_parameters(recurse=False):
        total = sum(rows.double().sum(0) for rows in parameter.detach().split(ROWS))
        found[name] = (total / len(parameter)).to(parameter.dtype)
    return found


def _require_trained(model: Any, job: Job, *, num_new: int) -> None:
    """Rows that were not there are trained, in every table: nobody else could have them."""
    method = job.method
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if method.kind == "full" or method.train_tokens == (ADDED,):
        return
    tied = head is None or head.weight is table.weight
    rows = table.weight.shape[0]
    if tied and set(range(rows, rows + num_new)) <= set(method.train_tokens):  # of an adapter that is gone on with
        return
    saved = {
        id(part)
        for name, part in model.named_modules()
        if any(f".{name}".endswith(f".{end}") for end in method.modules_to_save)
    }
    kept = [part for part in (table, head) if part is not None and id(part) not in saved]
    if not kept or (tied and len(kept) < 2):
        return
    raise ModelError(
        f"tokens: {num_new} tokens get new rows that nobody trains",
        seen=f"method: {method.kind}, and {'no table' if len(kept) == 2 else 'not both tables'} in modules_to_save",
        fix="write method.train_tokens: added, or name the embedding table and the head in method.modules_to_save",
    )
