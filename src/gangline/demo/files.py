"""The files of the demo: what a user would write."""

from __future__ import annotations

from pathlib import Path

CLUSTER = """\
# Three hosts on this one computer. Each has a work folder and ranks of its own, as three machines would.
name: three-on-one
hosts:
  - {name: pc1, transport: local, share: 3}
  - {name: pc2, transport: local, share: 2}
  - {name: pc3, transport: local, share: 1}
"""

PRETRAIN = """\
# A small Llama from nothing, on the documentation strings of Python's standard library.
name: demo-pretrain
model: {path: ./model, start: random}
data:
  train: corpus/pages.jsonl
  eval: corpus/held_out.jsonl
  format: text
  sequence_length: 128
batch: 24          # samples in one optimizer step, over all hosts
micro_batch: 4
steps: 140
optimizer: {learning_rate: 4.0e-3, weight_decay: 0.1}
schedule: {kind: cosine, warmup_steps: 10}
evaluation: {every_steps: 70, max_samples: 72}
checkpoint: {every_steps: 35}
"""

TUNE = """\
# LoRA on the model above: a question in, one sentence out; trained on the answers only.
name: demo-tune
model: ./pretrained
method: {kind: lora, rank: 16, alpha: 32, dropout: 0.05}
data:
  train: corpus/questions.jsonl
  eval: 0.05
  format: completion
  sequence_length: 128
batch: 24
micro_batch: 4
steps: 45
optimizer: {learning_rate: 3.0e-3}
schedule: {kind: linear, warmup_steps: 5}
evaluation: {max_samples: 72}
"""


def write_files(folder: Path) -> None:
    """Write cluster.yaml, pretrain.yaml and tune.yaml."""
    for name, text in {"cluster.yaml": CLUSTER, "pretrain.yaml": PRETRAIN, "tune.yaml": TUNE}.items():
        (folder / name).write_text(text, encoding="utf-8")
