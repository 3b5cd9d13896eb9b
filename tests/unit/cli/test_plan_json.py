"""`gangline plan --json`: every answer, good or not, is a document of docs/schemas/plan.schema.json."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from gangline.cli.main import main
from tests.unit.cli.test_plan_examples import ROOT, inside

jsonschema = pytest.importorskip("jsonschema")

SCHEMA = json.loads((ROOT / "docs" / "schemas" / "plan.schema.json").read_text(encoding="utf-8"))
PCS = "--hosts pc1=rtx5070ti-laptop,pc2=rtx4070-laptop,pc3=rtx3070ti --link 1gbit"
CASES = {
    "one card": ("--hosts rtx4090", 0),
    "unlike PCs": (PCS, 0),
    "one more": (f"{PCS} --add-host rtx4090", 0),
    "one less": (f"{PCS} --without pc2", 0),
    "another network": (f"{PCS} --link 10gbit", 0),
    "experts": ("--hosts 8xh100-80gb --model Qwen/Qwen3-30B-A3B method=lora", 0),
    "latent attention": ("--hosts 8xh100-80gb --model deepseek-ai/DeepSeek-V2-Lite method=lora", 0),
    "ddp on many hosts": ("--hosts 12xa100-80gb,12xa100-80gb strategy=ddp --link 100gbit", 0),
    "a length that nobody knows": ("--hosts rtx4090 steps=null epochs=1 data.packing=false", 0),
    "another software": ("--hosts rtx4090 --stack hf-kbit", 0),
    "too large": (f"{PCS} --model meta-llama/Llama-2-70b-hf", 6),
    "too large in full": ("--hosts rtx4090 method=full", 6),
    "no such model": ("--hosts rtx4090 --model nobody/nothing", 2),
    "no such card": ("--hosts voodoo2", 2),
    "no such key": ("--hosts rtx4090 colour=red", 2),
    "no such stack": ("--hosts rtx4090 --stack nothing", 2),
    "commands of nobody": ("--hosts rtx4090 --commands", 2),
}


def answer(words: str, home: Path) -> tuple[int, dict[str, Any], str]:
    """The exit code, the document and what people read beside it."""
    out, err = io.StringIO(), io.StringIO()
    with inside("home_lan", home), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", "job.yaml", *shlex.split(words), "--json"])
    return code, json.loads(out.getvalue(), parse_constant=pytest.fail), err.getvalue()


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("case", CASES)
def test_every_answer_is_a_document_of_the_schema(case: str, tmp_path: Path) -> None:
    words, expected = CASES[case]
    code, document, err = answer(words, tmp_path)
    jsonschema.validate(document, SCHEMA)
    error = document["error"]
    assert (code, error and error["exit_code"]) == (expected, expected or None), err
    assert error is None or error["what"] in err
    verdict = document["verdict"]
    assert (verdict is not None and verdict["best"] is not None) == (code == 0)
    assert (document["run"] is not None) == (code == 0)
    assert (verdict is not None and bool(verdict["instead"])) == case.startswith("too large")


@pytest.mark.parametrize("key", ["verdict", "error", "run"])
def test_a_document_that_lacks_something_is_none(key: str, tmp_path: Path) -> None:
    _, document, _ = answer("--hosts rtx4090", tmp_path)
    del document[key]
    with pytest.raises(jsonschema.ValidationError, match=rf"'{key}' is a required property"):
        jsonschema.validate(document, SCHEMA)


def test_hours_and_energy_are_those_of_the_screen(tmp_path: Path) -> None:
    _, document, _ = answer(PCS, tmp_path)
    run, best = document["run"], document["verdict"]["best"]
    assert run["hours"]["likely"] == pytest.approx(500 * best["step"]["total_s"] / 3600)
    assert run["hours"]["low"] < run["hours"]["likely"] < run["hours"]["high"]
    golden = (ROOT / "tests" / "golden" / "plans" / "home_lan-0.txt").read_text(encoding="utf-8")
    assert f"{run['kwh']:.3g} kWh at most" in golden


def test_a_change_of_machines_is_told_in_seconds(tmp_path: Path) -> None:
    _, document, _ = answer(CASES["one more"][0], tmp_path)
    assert document["change"]["after_s"] == document["verdict"]["best"]["step"]["total_s"]
    assert document["change"]["before_s"] > document["change"]["after_s"]
