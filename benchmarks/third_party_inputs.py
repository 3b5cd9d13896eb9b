"""Stand-ins for the models and data that scripts of other projects load: tiny, made here, with random weights.

    python -m benchmarks.third_party_inputs FOLDER

Folders that bear the name of something on a hub (`bert-base-cased`, `nyu-mll/glue`) are laid beside a script, where
its libraries find them before they would ask the hub. The metric `glue` counts accuracy.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

ROWS, PAIRS = 4_000, 60_000
"""The second: of sentences, for a script whose three epochs are to last."""
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
METRIC = '''"""Accuracy, under the name of a metric of a hub."""

import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        right = sum(int(one == other) for one, other in zip(predictions, references))
        return {"accuracy": right / len(references), "f1": 0.0}
'''
AXOLOTL = """\
base_model: {inputs}/llama
datasets: [{{path: {inputs}/lf/rows.json, ds_type: json, type: alpaca}}]
dataset_prepared_path: prepared
output_dir: /shared/out
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_modules: [q_proj, v_proj]
sequence_len: 128
micro_batch_size: 2
gradient_accumulation_steps: 1
max_steps: 100000
optimizer: adamw_torch
learning_rate: 0.0001
lr_scheduler: constant
logging_steps: 1
save_steps: 10
save_total_limit: 3
bf16: false
fp16: false
tf32: false
flash_attention: false
special_tokens: {{pad_token: "<pad>"}}
"""


def sentences(count: int, *, seed: int) -> Iterator[str]:
    """Generated text."""
    chance = random.Random(seed)
    animals, verbs, places = (
        ["fox", "dog", "owl", "hare", "wolf"],
        ["sees", "hears", "meets"],
        ["snow", "wood", "field"],
    )
    for number in range(count):
        one, other = chance.sample(animals, 2)
        yield f"the {one} {chance.choice(verbs)} the {other} in the {chance.choice(places)} {number % 97} times"


def tokenizer(*, special: list[str], **names: str) -> PreTrainedTokenizerFast:
    """One of a few hundred pieces, trained on the text."""
    made = Tokenizer(models.BPE(unk_token=names["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(sentences(500, seed=1), trainer)
    if "sep_token" in names:
        ends = [(names[name], made.token_to_id(names[name])) for name in ("sep_token", "cls_token")]
        made.post_processor = processors.BertProcessing(*ends)
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=128, **names)


def _json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _llama(folder: Path) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    words = tokenizer(special=["<s>", "</s>", "<unk>", "<pad>"], **names)
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3, "vocab_size": len(words)}
    LlamaForCausalLM(LlamaConfig(**shape, **ids, max_position_embeddings=256)).save_pretrained(folder)


def _bert(folder: Path) -> None:
    names = {"unk_token": "[UNK]", "sep_token": "[SEP]", "cls_token": "[CLS]", "pad_token": "[PAD]"}
    words = tokenizer(special=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], **names)
    words.save_pretrained(folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertForSequenceClassification(BertConfig(**shape, vocab_size=len(words))).save_pretrained(folder)


def _dataset(folder: Path, name: str, splits: dict[str, list[dict[str, Any]]]) -> None:
    """As a hub has it, with one configuration."""
    for split, rows in splits.items():
        _json_lines(folder / name / f"{split}.jsonl", rows)
    files = "".join(f"      - {{split: {split}, path: {name}/{split}.jsonl}}\n" for split in splits)
    folder.joinpath("README.md").write_text(f"---\nconfigs:\n  - config_name: {name}\n    data_files:\n{files}---\n")


def make(folder: Path) -> None:
    """Write all of it."""
    torch.manual_seed(1)
    folder.mkdir(parents=True)
    texts = list(sentences(ROWS, seed=2))
    _llama(folder / "llama")
    _bert(folder / "bert-base-cased")
    names = {
        "unk_token": "<unk>",
        "sep_token": "</s>",
        "cls_token": "<s>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    }
    tokenizer(special=["<s>", "<pad>", "</s>", "<unk>", "<mask>"], **names).save_pretrained(folder / "roberta-base")
    asked = [{"role": "user", "content": "tell me of an animal"}]
    chats = [[*asked, {"role": "assistant", "content": text}] for text in texts]
    _json_lines(folder / "chat/train.jsonl", [{"messages": chat} for chat in chats])
    pairs = [{"chosen": chat, "rejected": other} for chat, other in itertools.pairwise(chats)]
    _json_lines(folder / "pairs/train.jsonl", pairs)
    rows = [{"instruction": "tell me of an animal", "input": "", "output": text} for text in texts]
    (folder / "lf").mkdir()
    (folder / "lf/rows.json").write_text(json.dumps(rows))
    (folder / "lf/dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    (folder / "text.txt").write_text("\n".join(texts))
    (folder / "few.txt").write_text("\n".join(texts[:200]))
    beside = list(sentences(PAIRS, seed=3))
    same = [
        {"sentence1": text, "sentence2": other, "label": number % 2, "idx": number}
        for number, (text, other) in enumerate(itertools.pairwise(beside))
    ]
    _dataset(folder / "nyu-mll/glue", "mrpc", {"train": same, "validation": same[:64], "test": same[:64]})
    _dataset(folder / "wikitext", "wikitext-2-v1", {"train": [{"text": text} for text in texts]})
    (folder / "glue").mkdir()
    (folder / "glue/glue.py").write_text(METRIC)
    (folder / "data").mkdir()
    (folder / "data/wikitext-2.txt").write_text("\n".join(texts * 30))
    (folder / "axolotl.yaml").write_text(AXOLOTL.format(inputs=folder))


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
