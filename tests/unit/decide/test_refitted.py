"""What runs have taken corrects the speeds that were measured, once for each attempt of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gangline.decide.hosts import SpeedTable, refit_profiles
from gangline.inventory.measured import load_profiles, save_profile
from gangline.planner.calibration import Profile, architecture_digest, method_words
from gangline.planner.config import read_architecture
from gangline.planner.machines import Placement
from gangline.planner.speed import ComputeModel
from gangline.planner.training import Training
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout
from tests.unit.planner.outcomes import GPU, line, outcome, plan, profile

KNOWN = profile()
SHAPE = read_architecture(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    }
)


class Home:
    """A home with a measured speed, and what is told there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[str] = []
        save_profile(root, KNOWN)

    def report(self, words: str) -> None:
        self.said.append(words)

    def progress(self, words: str) -> None:
        """Ticks are for eyes only."""

    def ran(self, run_id: str, factor: float, *, used: Profile = KNOWN, attempt: int = 1) -> RunLayout:
        """A run whose micro-batches took so many times what was measured."""
        layout = RunLayout(self.root, run_id)
        layout.attempt(attempt).mkdir(parents=True)
        records = [line(step, compute=(0.6 * factor, 0.2)) for step in range(1, 21)]
        comparison = outcome(plan(profiles=(used.name, None)), records, run_id=run_id)
        assert comparison is not None
        write_json(layout.comparison, {**comparison.to_json(), "attempt": attempt})
        return layout

    def factor(self) -> float:
        (found,) = load_profiles(self.root)
        return found.factor

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_run_corrects_what_was_measured_and_it_is_told(home: Home) -> None:
    home.ran("calm-otter-7", 1.25)
    refit_profiles(home.root, home)
    assert home.factor() == pytest.approx(1.25)
    (words,) = home.said
    assert words.startswith("refitted   NVIDIA GeForce RTX 4070 (pc1): calm-otter-7 took 1.25 x what was measured")


def test_a_run_is_taken_account_of_once(home: Home) -> None:
    home.ran("calm-otter-7", 1.25)
    refit_profiles(home.root, home)
    home.ran("wry-crane-1", 1.25 * 1.1)
    refit_profiles(home.root, home)
    refit_profiles(home.root, home)
    assert home.factor() == pytest.approx(1.25 * 1.1**0.3)
    assert len(home.said) == 2


def test_a_run_that_was_resumed_counts_again(home: Home) -> None:
    home.ran("calm-otter-7", 1.25)
    refit_profiles(home.root, home)
    home.ran("calm-otter-7", 1.25 * 1.1, attempt=2)
    refit_profiles(home.root, home)
    assert home.factor() == pytest.approx(1.25 * 1.1**0.3)


def test_runs_that_say_nothing_of_a_measured_speed_are_passed_over(home: Home) -> None:
    home.ran("calm-otter-7", 1.25, used=profile(host="pc9"))
    RunLayout(home.root, "dim-finch-2").folder.mkdir()
    RunLayout(home.root, "wry-crane-1").folder.mkdir()
    RunLayout(home.root, "wry-crane-1").comparison.write_text("[", encoding="utf-8")
    before = home.files()
    refit_profiles(home.root, home)
    assert (home.files(), home.said) == (before, [])


def test_a_comparison_of_another_run_teaches_nothing(home: Home) -> None:
    there = home.ran("calm-otter-7", 1.25)
    RunLayout(home.root, "wry-crane-1").attempt(1).mkdir(parents=True)
    there.comparison.rename(RunLayout(home.root, "wry-crane-1").comparison)
    refit_profiles(home.root, home)
    assert home.factor() == 1.0


def test_a_home_without_a_measured_speed_or_without_runs_is_left_as_it_is(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    refit_profiles(home.root, home)
    refit_profiles(tmp_path / "nowhere", home)
    assert (home.factor(), home.said) == (1.0, [])
    assert not (tmp_path / "nowhere").exists()


def speed_of(home: Home, *, checkpointing: bool) -> ComputeModel:
    """What a plan takes a rank on that card to need, where the method was measured without recomputation."""
    measured = Training(method="lora", micro_batch=1, sequence_length=100, compute="bf16", parameters="fp32")
    key = dataclasses.replace(KNOWN.key, method=method_words(measured), architecture=architecture_digest(SHAPE))
    save_profile(home.root, dataclasses.replace(KNOWN, key=key))
    speeds = SpeedTable(architecture=SHAPE, home=home.root)
    model = speeds.of(Placement(host="pc1", gpu=GPU), dataclasses.replace(measured, checkpointing=checkpointing))
    assert model is not None
    return model


def test_a_plan_names_the_measurement_behind_a_speed(home: Home) -> None:
    assert speed_of(home, checkpointing=False).profile in {each.name for each in load_profiles(home.root)}


def test_what_was_reckoned_from_another_measurement_does_not_name_it(home: Home) -> None:
    assert speed_of(home, checkpointing=True).profile is None
