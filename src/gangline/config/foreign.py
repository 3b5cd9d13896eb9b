"""Which tool a file of jobs or hosts belongs to, told from its keys: a foreign file is recognised as one first.

Only then may a key be taken for a slip of the pen: `gradient_accumulation_steps` is no misspelt `batch`. Room `convert`
knows what becomes of each key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Holds = Literal["a job", "a part of a job", "hosts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKind:
    """A kind of file that another tool reads."""

    tool: str
    holds: Holds
    needs: tuple[str, ...] = ()
    """Keys that every such file has."""
    one_of: tuple[str, ...] = ()
    """Keys of which it has one at least."""


KINDS: tuple[ForeignKind, ...] = (
    ForeignKind(tool="Axolotl", holds="a job", needs=("base_model",)),
    ForeignKind(
        tool="LLaMA-Factory",
        holds="a job",
        needs=("model_name_or_path",),
        one_of=("stage", "finetuning_type", "cutoff_len", "template", "infer_backend", "export_dir"),
    ),
    ForeignKind(
        tool="LLaMA-Factory v1", holds="a job", needs=("model_class",), one_of=("train_dataset", "peft_config")
    ),
    ForeignKind(tool="accelerate", holds="a part of a job", one_of=("compute_environment", "distributed_type")),
    ForeignKind(
        tool="DeepSpeed",
        holds="a part of a job",
        one_of=("zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"),
    ),
    ForeignKind(
        tool="TRL",
        holds="a job",
        needs=("model_name_or_path",),
        one_of=(
            "dataset_name",
            "datasets",
            "dataset_text_field",
            "use_peft",
            "assistant_only_loss",
            "completion_only_loss",
            "chat_template_path",
            "packing",
        ),
    ),
    ForeignKind(
        tool="transformers' Trainer",
        holds="a job",
        one_of=(
            "per_device_train_batch_size",
            "num_train_epochs",
            "lr_scheduler_type",
            "gradient_accumulation_steps",
            "adam_beta1",
        ),
    ),
    ForeignKind(tool="Ray", holds="hosts", needs=("cluster_name", "provider")),
    ForeignKind(tool="SkyPilot", holds="hosts", needs=("resources",), one_of=("run", "setup", "num_nodes")),
    ForeignKind(tool="Ansible", holds="hosts", one_of=("all", "ungrouped")),
)
"""In the order in which they are tried. torchtune, pools of SkyPilot, and texts that are no YAML have own forms."""


def kind_of(values: Mapping[str, Any]) -> ForeignKind | None:
    """The kind of a file with these keys; None for one of ours, and for one that nobody knows."""
    if {"model", "data"} <= values.keys() or isinstance(values.get("hosts"), list):
        return None
    if _has_components(values):
        return ForeignKind(tool="torchtune", holds="a job")
    if values and all(_is_pool(value) for value in values.values()):
        return ForeignKind(tool="SkyPilot", holds="hosts")
    for kind in KINDS:
        if all(key in values for key in kind.needs) and (not kind.one_of or any(key in values for key in kind.one_of)):
            return None if kind.tool == "Ansible" and not _is_group(values) else kind
    return None


def kind_of_text(text: str) -> ForeignKind | None:
    """The kind of a text that is no YAML: an ssh_config, or an inventory of Ansible in its ini form."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and line.lstrip()[0] not in "#;"]
    if any(re.match(r"(?i)host\s+[^=:]+$", line) for line in lines) and any(
        re.match(r"(?i)(hostname|user|port|identityfile|proxyjump)[\s=]", line) for line in lines
    ):
        return ForeignKind(tool="ssh_config", holds="hosts")
    if any(re.match(r"\[[\w.-]+(:(children|vars))?\]$", line) for line in lines) or any(
        re.search(r"\sansible_(host|user|port)=", line) for line in lines
    ):
        return ForeignKind(tool="Ansible", holds="hosts")
    return None


def _has_components(values: Mapping[str, Any]) -> bool:
    """Torchtune names the class of every part."""
    return any(isinstance(value, dict) and "_component_" in value for value in values.values())


def _is_pool(value: Any) -> bool:
    """~/.sky/ssh_node_pools.yaml: a name, and its hosts."""
    return isinstance(value, dict) and isinstance(value.get("hosts"), list)


def _is_group(values: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) and {"hosts", "children"} & value.keys() for value in values.values())
