"""What a model itself rules out: to have its matrices in few bits. Pure."""

from __future__ import annotations

from gangline.planning.architecture import Architecture
from gangline.planning.families import FAMILIES


def unpackable(architecture: Architecture) -> str:
    """Which weights of its layers are in no `nn.Linear`, and so in nothing that has few bits; empty where few are."""
    if architecture.expert_weights:
        return "experts"
    family = FAMILIES.get(architecture.model_type)
    return "matrices that are no nn.Linear" if family is not None and family.transposed else ""
