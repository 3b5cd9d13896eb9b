"""`python -m gangline.worker scratch TEXT... --to FOLDER`: an untrained small Llama with a tokenizer of its own.

The folder has config.json and a byte-level BPE tokenizer trained on the given files, and no weights: a job with
`model.start: random` begins with them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from gangline.errors import DataError, UsageError
from gangline.worker.json_lines import write_line

END_OF_TEXT = "<|endoftext|>"
_CHARS = 1 << 16


def scratch_main(argv: list[str]) -> int:
    """Make the folder; one JSON line says what it holds."""
    parser = argparse.ArgumentParser(prog="gangline.worker scratch")
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT", help=".txt, or .jsonl whose strings are used")
    parser.add_argument("--to", type=Path, required=True, help="the model folder; must not exist")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024, help="positions that the model knows")
    arguments = parser.parse_args(argv)
    if arguments.to.exists():
        raise UsageError(
            f"{arguments.to} exists", seen="expected a folder to be made", fix="remove it, or name another with --to"
        )
    temporary = arguments.to.with_name(f"{arguments.to.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    vocabulary = _write_tokenizer(temporary, arguments.texts, size=arguments.vocabulary, context=arguments.context)
    _write_config(temporary, arguments, vocabulary=vocabulary)
    temporary.rename(arguments.to)
    write_line("result", folder=str(arguments.to), vocabulary=vocabulary)
    return 0


def _write_tokenizer(folder: Path, texts: Sequence[Path], *, size: int, context: int) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(texts), trainer=trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(str(folder))
    return len(wrapped)


def _write_config(folder: Path, arguments: argparse.Namespace, *, vocabulary: int) -> None:
    from transformers import LlamaConfig

    end = 0  # the trainer numbers special tokens first
    LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=32 * round(arguments.hidden / 12),  # 8/3 of hidden, as Llama has it
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.heads,
        max_position_embeddings=arguments.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(str(folder))


def _pieces(texts: Sequence[Path]) -> Iterator[str]:
    """Pieces of the texts, never a whole file. Raises DataError."""
    for path in texts:
        try:
            with path.open(encoding="utf-8") as stream:
                if path.suffix == ".jsonl":
                    for line in stream:
                        yield from (value for value in json.loads(line).values() if isinstance(value, str))
                else:
                    while piece := stream.read(_CHARS):
                        yield piece
        except (OSError, UnicodeDecodeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{path} cannot be read as {path.suffix or 'text'}",
                seen=f"expected UTF-8 text, or a JSON object on each line of a .jsonl; {error}",
                fix="name text files in UTF-8",
            ) from error
