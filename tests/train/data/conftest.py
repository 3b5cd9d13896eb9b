"""Tiny tokenizers made on the spot, and a short way from rows to a token set."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from gangline.runs.job import DataJob, Job, ModelJob, SourceJob
from gangline.worker.data import TokenSet
from gangline.worker.data.prepare import prepare_inputs

CORPUS = [
    "The rope joins every dog of a sled team. Two dogs pull; three dogs pull harder!",
    "Question: how many dogs pull the sled? Answer: six dogs, and a seventh rests.",
    "user says hello there\nassistant says hello back\n\nsystem says be kind 0123456789",
] * 30
SPECIAL = ["</s>", "<s>", "<|user|>", "<|assistant|>", "<|end|>"]
VOCAB_SIZE = 400


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.train)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """make_model(bos=..., eos=..., spaces=..., template=..., config=...) -> a folder with tokenizer and config."""

    def make(*, bos=False, eos=True, spaces=False, template=None, config=None):
        folder = tmp_path_factory.mktemp("model")
        tokenizer = _sentencepiece_like() if spaces else _byte_level()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
        if bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>" if bos else None, eos_token="</s>" if eos else None
        )
        fast.chat_template = template
        fast.save_pretrained(folder)
        text = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096} if config is None else config
        (folder / "config.json").write_text(json.dumps(text))
        return folder

    return make


def _byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _sentencepiece_like():
    """As Llama 2: a space in front of every text, spaces as U+2581, bytes for what is unknown."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS], trainer)
    return tokenizer


@pytest.fixture(scope="session")
def model(make_model):
    """Byte-level BPE, no BOS, </s> at the end, no chat template."""
    return make_model()


@pytest.fixture
def write_rows(tmp_path):
    """write_rows(rows, name) -> the path of a JSON lines file."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def make_job(model):
    """make_job(*files, model=..., seed=..., start=..., <fields of DataJob>) -> a job."""

    def make(*files, folder=model, seed=0, start="random", **data):
        source = SourceJob(files=tuple(str(file) for file in files))
        defaults = {"train": source, "sequence_length": 64}
        return Job(
            name="test",
            model=ModelJob(path=str(folder), start=start),
            data=DataJob(**{**defaults, **data}),
            batch=1,
            micro_batch=1,
            seed=seed,
        )

    return make


@pytest.fixture
def tokens_of(tmp_path, make_job):
    """tokens_of(*files, ...) -> the training set of such a job."""

    def make(*files, hub=None, **options):
        root = tmp_path / "root"
        inputs = prepare_inputs(make_job(*files, **options), root, hub=hub)
        return TokenSet.open(root / "data" / inputs.train)

    return make


@pytest.fixture
def as_filed():
    """All samples of a set as their first rows follow each other in the files."""

    def order(tokens):
        first = np.fromfile(tokens.folder / "sample_offsets.bin", dtype=np.int64)[:-1]
        rows = np.fromfile(tokens.folder / "sample_rows.bin", dtype=np.int64)[first]
        return [tokens.sample(int(index)) for index in np.argsort(rows)]

    return order


@pytest.fixture
def real_data():
    """The folder with gsm8k and wikitext-2; a visible skip without it."""
    default = Path(__file__).resolve().parents[4] / "shared" / "data"
    folder = Path(os.environ.get("GANGLINE_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder} (set GANGLINE_DATA)")
    return folder
