"""`gangline export --push`, against a stand-in for the hub: what was sent is loaded by plain transformers and peft."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.model_hub import Hub, Repository
from tests.recorded import install
from tests.train import cases_publish

pytestmark = pytest.mark.timeout(600)

LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM
found = []
for base, adapter in json.loads(sys.argv[1]):
    model = AutoModelForCausalLM.from_pretrained(base)
    if adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        found.append(model.eval()(input_ids=torch.arange(2, 42).reshape(2, 20)).logits)
print(bool(torch.equal(*found) and found[0].abs().max() > 0))
"""


@pytest.fixture
def hub():
    with Hub() as running:
        yield running


def gangline(hub, tmp_path, *words):
    env = {**os.environ, **hub.variables(tmp_path / "cache"), "GANGLINE_HOME": str(tmp_path / "home")}
    # not the forked Python: huggingface_hub reads its variables when it is imported
    argv = [str(Path(sys.executable).with_name("gangline")), *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600, check=False)


def are_same(hub, tmp_path, one, other):
    """Whether a stranger gets the same logits of two models, each a base and an adapter or None."""
    env = {**os.environ, **hub.variables(tmp_path / "stranger")}
    words = [sys.executable, "-c", LOAD, json.dumps([one, other])]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1] == "True"


def test_a_run_is_exported_and_pushed_and_a_stranger_loads_the_same_model(tmp_path, quick_python, hub):
    run = install("ddp-finished", tmp_path / "home", python=quick_python)
    done = gangline(hub, tmp_path, "export", run, "--push", "tea/kettle", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert hub.requests == []
    assert not list((tmp_path / "home").rglob("model.safetensors"))
    done = gangline(hub, tmp_path, "export", run, "--push", "tea/kettle")
    assert done.returncode == 0, done.stderr
    folder, url = done.stdout.splitlines()
    assert url == f"{hub.url}/tea/kettle"
    kettle = hub.repositories["tea/kettle"]
    assert {"README.md", "loss.svg", "gangline.json", "model.safetensors", "config.json"} <= kettle.files.keys()
    assert are_same(hub, tmp_path, ("tea/kettle", None), (folder, None))
    home = str(tmp_path).encode()
    assert [name for name, data in kettle.files.items() if home in data or hub.token.encode() in data] == []
    assert [
        path for path in (tmp_path / "home").rglob("*") if path.is_file() and hub.token.encode() in path.read_bytes()
    ] == []
    assert hub.token not in done.stdout + done.stderr
    # once more: the folder is there and is sent as it is, and the hub has it
    hub.received.clear()
    again = gangline(hub, tmp_path, "export", run, "--push", "tea/kettle")
    assert again.returncode == 0, again.stderr
    assert "it is sent as it is" in again.stderr
    assert (hub.received, len(kettle.commits)) == ([], 1)
    shown = gangline(hub, tmp_path, "export", folder, "--push", "tea/kettle", "--dry-run")
    assert "model.safetensors  " in shown.stdout
    assert "nothing was sent" in shown.stderr


def test_an_adapter_is_loaded_over_its_base_from_the_hub(pool, tmp_path, hub):
    folder = pool(1).run(cases_publish.adapter, folder=str(tmp_path))[0]
    base = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    hub.repositories["kettles/base"] = Repository(
        gated="auto", files={**base, "README.md": b"---\nlicense: mit\n---\n"}
    )
    refused = gangline(hub, tmp_path, "export", folder, "--push", "tea/adapter")
    assert refused.returncode == 2
    assert "a base model that nobody else has" in refused.stderr
    assert hub.requests == []
    for name, key in (("adapter_config.json", "base_model_name_or_path"), ("gangline.json", "base_model")):
        path = tmp_path / "out" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), key: "kettles/base"}))
    done = gangline(hub, tmp_path, "export", folder, "--push", "tea/adapter")
    assert done.returncode == 0, done.stderr
    assert "kettles/base is gated" in done.stderr
    hub.repositories["kettles/base"].gated = False
    assert are_same(hub, tmp_path, ("kettles/base", "tea/adapter"), (str(tmp_path / "base"), folder))


def test_other_files_in_the_repository_are_not_written_over_without_yes(pool, tmp_path, hub):
    folder = pool(1).run(cases_publish.adapter, folder=str(tmp_path), merged=True)[0]
    hub.repositories["tea/kettle"] = Repository(files={"model.safetensors": b"of somebody"})
    words = ("export", folder, "--push", "tea/kettle")
    refused = gangline(hub, tmp_path, *words)
    assert refused.returncode == 2
    assert "it holds other files" in refused.stderr
    assert hub.repositories["tea/kettle"].files == {"model.safetensors": b"of somebody"}
    done = gangline(hub, tmp_path, *words, "--yes")
    assert done.returncode == 0, done.stderr
    assert len(hub.repositories["tea/kettle"].files["model.safetensors"]) > 1000
