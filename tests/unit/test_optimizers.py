"""The table of optimizers: one row says what job.yaml, the plan and a checkpoint ask."""

import typing

from gangline.optimizers import OPTIMIZERS, OptimizerKind, kind_of_states
from gangline.runs.job import OptimizerJob


def test_every_name_has_a_row_and_every_key_a_field():
    assert set(typing.get_args(OptimizerKind)) == set(OPTIMIZERS)
    for row in OPTIMIZERS.values():
        assert set(row.keys) <= set(OptimizerJob.__dataclass_fields__)


def test_the_states_of_a_checkpoint_say_by_which_optimizer_it_was_written():
    named = {
        "adamw": {"step", "exp_avg", "exp_avg_sq"},
        "adamw-8bit or paged-adamw-8bit": {"state1", "state2", "step", "absmax1"},
        "muon": {"muon_mean", "step", "exp_avg", "exp_avg_sq"},
        "lion": {"lion_mean"},
        "adafactor": {"row_mean", "column_mean", "square_mean", "step"},
        "sgd": {"momentum_buffer"},
        "": {"somebody_elses"},
    }
    assert {kind: kind_of_states(frozenset(names)) for kind, names in named.items()} == {kind: kind for kind in named}
