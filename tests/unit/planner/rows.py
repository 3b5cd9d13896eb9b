"""Measured peaks of GPU memory from public sources, and the rule that says which of them may be used for fitting.

The files hold one line per measured run; here each becomes one row per figure (allocated, reserved, process). Nothing
in this module predicts anything: it is the yardstick for the memory model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[2] / "fixtures" / "planning"
GIB = 2**30
BYTES_PER_UNIT = {"B": 1, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": GIB}
ALLOCATED, RESERVED, PROCESS = "allocated", "reserved", "process"
MEASURES = (ALLOCATED, RESERVED, PROCESS)
FITTING, HELD_OUT = "fitting", "held out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA settings of a run: rank, dropout and the names of the layers it sits on."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    modules_to_save: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Every setting of one measured run, in the words of the fixture files (see "fields" there)."""

    run: str
    source: str
    model: str
    model_id: str
    method: str
    quant: str
    adapter: Adapter | None
    seq_len: int | None
    micro_batch: int
    checkpointing: str
    optimizer: str
    weights_dtype: str
    compute_dtype: str
    autocast: bool
    adapter_dtype: str | None
    strategy: str
    num_gpus: int
    attention: str
    loss: str
    keeps_logits: bool
    kbit_upcast: str
    stack: Mapping[str, Any]
    gpu: str
    complete: bool
    missing: tuple[str, ...]
    note: str

    @property
    def num_tokens(self) -> int | None:
        """Tokens of one micro-batch on one GPU, padding included; None where lengths vary and are not known."""
        return None if self.seq_len is None else self.seq_len * self.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Run):
    """One published figure of a run, in bytes per GPU.

    `rounding_bytes` is half of the last published digit; `resident_bytes` what stays allocated outside a step.
    """

    measured: str
    value_bytes: int
    rounding_bytes: int
    resident_bytes: int | None
    instrument: str

    @property
    def id(self) -> str:
        """Stable name of the figure: the run and what was measured."""
        return f"{self.run}/{self.measured}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Run):
    """A run known to fit or to die on its card; `card_bytes` is the card's nominal size."""

    outcome: str
    card_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the run went through."""
        return self.outcome == "completed"


def anchor_rows() -> list[Row]:
    """Figures that the design was made from; not split, the model has to meet them all."""
    return _rows(read("anchor_rows"))


def public_rows() -> list[Row]:
    """Figures of other public tables, collected before fitting; split by `split_of`."""
    return _rows(read("public_rows"))


def split_of(run: str) -> str:
    """HELD_OUT or FITTING for a run: held out if sha256 of its name starts with an even hex digit."""
    first_digit = hashlib.sha256(run.encode("utf-8")).hexdigest()[0]
    return HELD_OUT if int(first_digit, 16) % 2 == 0 else FITTING


def verdicts() -> list[Choice]:
    """Public runs near the end of their card, or beyond it."""
    document = read("public_rows")
    return [
        Choice(**_settings(document, run), outcome=run["outcome"], card_bytes=run["card_bytes"])
        for run in document["verdicts"]
    ]


def fitting_rows() -> list[Row]:
    """The public rows a constant may be read off: complete, in the fitting half."""
    return [row for row in public_rows() if row.complete and split_of(row.run) == FITTING]


def held_out_rows() -> list[Row]:
    """The public rows that only ever score the model: complete, in the other half."""
    return [row for row in public_rows() if row.complete and split_of(row.run) == HELD_OUT]


def model_config(model: str) -> dict[str, Any]:
    """config.json of a model named by a row; keys with a leading underscore are ours (source, parameter count)."""
    return read(f"configs/{model}")


def read(name: str) -> dict[str, Any]:
    """A fixture file of the planner as it stands."""
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _rows(document: Mapping[str, Any]) -> list[Row]:
    return [_row(document, run, figure) for run in document["runs"] for figure in run["figures"]]


def _row(document: Mapping[str, Any], run: Mapping[str, Any], figure: Mapping[str, Any]) -> Row:
    unit = BYTES_PER_UNIT[figure["unit"]]
    return Row(
        **_settings(document, run),
        measured=figure["measured"],
        value_bytes=round(figure["value"] * unit),
        rounding_bytes=_rounding_bytes(figure["value"], unit),
        resident_bytes=figure.get("resident_bytes"),
        instrument=document["instruments"][figure["instrument"]],
    )


def _settings(document: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    settings = {field.name: run.get(field.name) for field in fields(Run)}
    adapter = None if run["lora"] is None else _adapter(document["adapters"][run["lora"]])
    told = {"missing": tuple(run.get("missing", ())), "note": run.get("note", "")}
    return settings | {"adapter": adapter, "stack": document["stacks"][run["stack"]]} | told


def _adapter(settings: Mapping[str, Any]) -> Adapter:
    return Adapter(
        rank=settings["rank"],
        alpha=settings["alpha"],
        dropout=settings["dropout"],
        targets=tuple(settings["targets"]),
        modules_to_save=tuple(settings["modules_to_save"]),
    )


def _rounding_bytes(value: float, unit: int) -> int:
    """Half of the last published digit: below this a difference says nothing."""
    digits = len(str(value).partition(".")[2]) if isinstance(value, float) else 0
    return 0 if unit == 1 else round(unit * 10.0**-digits / 2)
