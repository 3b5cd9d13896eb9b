"""What a model itself rules out: to be cut between its layers, or to have its matrices in few bits. Pure."""

from __future__ import annotations

from gangline.planning.architecture import Architecture
from gangline.planning.families import FAMILIES, STAGED


def unstageable(architecture: Architecture) -> str:
    """Why no rank can begin in the middle of the model, in words; empty where one can, or has to try.

    Families that transformers has no class for bring code of their own, whose layers give more than hidden states.
    """
    family = architecture.model_type
    if family in FAMILIES and family not in STAGED:
        return f"a model of the family {family}, whose decoder cannot be entered between layers"
    if key := architecture.entry_dropout:
        return f"a model that drops a part of its embeddings ({key} in config.json)"
    return ""


def unpackable(architecture: Architecture) -> str:
    """Which weights of its layers are in no `nn.Linear`, and so in nothing that has few bits; empty where few are."""
    if architecture.expert_weights:
        return "experts"
    family = FAMILIES.get(architecture.model_type)
    return "matrices that are no nn.Linear" if family is not None and family.transposed else ""
