"""Names and values that mean harm: refused by an allow-list, or at least told without a crash."""

import copy
import json
import random

import pytest

from gangline.config.load import load_cluster, load_job
from gangline.errors import SpecError

NAMES = [
    "-x", "--help", "a;b", "a b", "a\nb", "a\n", "$(id)", "`id`", "a|b", "a&b", "../x", "..", ".", "", "a/b", "~", "a'b",
    'a"b', "a\\b", "\x1b[2J", "\u202ea", "\uff41", "é", "a" * 64, "a\0b", "%s", "{0}", "a*", "a:b", "a@b", "-oProxyCommand=x",
    "*", "!x", "&x", "#x", "a,b", "a=b",
]  # fmt: skip


def refused(folder, kind, data):
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(data))
    with pytest.raises(SpecError) as caught:
        load_job(path) if kind == "job" else load_cluster(path, home=folder)
    text = str(caught.value)
    assert all(character.isprintable() or character == "\n" for character in text)
    return text


@pytest.mark.parametrize("name", NAMES)
def test_a_host_has_a_plain_name(tmp_path, name):
    assert "hosts.0" in refused(tmp_path, "cluster", {"hosts": [{"name": name, "transport": "local"}]})


@pytest.mark.parametrize("name", [name for name in NAMES if name != "a@b"])
def test_a_destination_of_ssh_is_plain(tmp_path, name):
    bad = [name, f"{name}@host", f"user@{name}"]
    if name == "a" * 64:
        bad = [f"{name}a@host"]
    if name == "..":
        bad = ["..", "..@host"]
    for ssh in bad:
        told = refused(tmp_path, "cluster", {"hosts": [{"name": "a", "transport": "ssh", "ssh": ssh}]})
        assert "hosts.0.ssh" in told


PATHS = ["-x", "", "x", "./x", "../x", "/x/../y", "~root/x", "~", "/a;b", "/a\nb", "/$(id)", "/`id`", "/a'b", '/a"b',
         "/a\0b", "/a\x1b[2J", "/a:b", "/a\u202eb", "/a\n", "/*", "/a|b", "/a&b", "/{a,b}", "/a<b", "/!a", "/a#b"]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_path_on_another_host_is_plain(tmp_path, path):
    host = {"name": "a", "ssh": "10.0.0.1"}
    for key in ("workdir", "python"):
        if key == "workdir" or path not in {"x", "/x/../y"}:
            assert key in refused(tmp_path, "cluster", {"hosts": [{**host, key: path}]})
    for key in ("conda", "apptainer"):
        assert key in refused(tmp_path, "cluster", {"hosts": [{**host, "environment": {key: path}}]})
    assert "shared" in refused(tmp_path, "cluster", {"hosts": [host], "shared": [path]})


@pytest.mark.parametrize("key", ["ssh-dss AAAA", "ssh-ed25519", "ssh-ed25519 " + "A" * 68, "@cert-authority * ssh-rsa A",
                                 "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f\nx"])  # fmt: skip
def test_a_host_key_is_a_whole_key(tmp_path, key):
    assert "host_key" in refused(tmp_path, "cluster", {"hosts": [{"name": "a", "host_key": key}]})


@pytest.mark.parametrize("name", NAMES)
def test_jobs_projects_and_interfaces_have_plain_names(tmp_path, name):
    job = {
        "name": name,
        "report": {"wandb": name, "trackio": name},
        "method": {"kind": "lora", "targets": ["-" + name]},
    }
    text = refused(tmp_path, "job", {**job, "model": "owner/name", "data": {"train": "hub:a/b"}, "batch": 1})
    assert all(key in text for key in ("  name\n", "  report.wandb\n", "  report.trackio\n", "  method.targets.0\n"))
    assert "interface" in refused(tmp_path, "cluster", {"hosts": [{"name": "localhost", "interface": name}]})


@pytest.mark.parametrize(
    "address", ["pc9:5000", "ftp://pc9", "http://me:secret@pc9:5000", "http://", "sqlite:///relative.db", "file:///a"]
)
def test_the_address_of_a_tracker_is_one_and_has_no_password(tmp_path, address):
    job = {"model": "owner/name", "data": {"train": "hub:a/b"}, "batch": 1, "report": {"mlflow": address}}
    assert "report.mlflow" in refused(tmp_path, "job", job)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {"a" * 64, "a/b"}])
def test_hub_names_are_plain(tmp_path, name):
    refused(tmp_path, "job", {"model": f"./{name}", "data": {"train": {"hub": name}}, "batch": 1})
    refused(tmp_path, "job", {"model": "owner/-" + name, "data": {"train": f"hub:-{name}"}, "batch": 1})


@pytest.mark.parametrize("name", ["a b", "1A", "A-B", "A;B", "", "A\nB", "é", "LD=X"])
def test_variables_have_plain_names(tmp_path, name):
    assert "env" in refused(tmp_path, "cluster", {"hosts": [{"name": "localhost", "env": {name: "x"}}]})


VALUES = [None, True, 0, -1, 10**30, 10**400, 0.5, -1e308, "", "x", "\x1b[2J", [], [[]], [None], {}, {"": 1}, {"x": {}}]
KEYS = [
    "name", "model", "model.path", "model.x", "method", "method.kind", "method.rank", "method.targets", "data", "batch",
    "data.train", "data.train.files", "data.train.hub", "data.eval", "data.eval.fraction", "data.fields", "data.format",
    "data.fields.text", "micro_batch", "epochs", "steps", "seed", "precision", "optimizer", "optimizer.betas",
    "optimizer.learning_rate", "schedule", "schedule.warmup_steps", "evaluation", "checkpoint.every_minutes", "report",
    "report.wandb", "hosts", "",
]  # fmt: skip


def planted(chance):
    """A job with values that do not belong there."""
    job = {"model": "owner/name", "data": {"train": "hub:a/b"}, "batch": 8}
    for _ in range(chance.randint(1, 4)):
        *parents, last = chance.choice(KEYS).split(".")
        inside = job
        for part in parents:
            inside[part] = inside[part] if isinstance(inside.get(part), dict) else {}
            inside = inside[part]
        inside[last] = copy.deepcopy(chance.choice(VALUES))
    return job


@pytest.mark.parametrize("seed", range(150))
def test_any_value_anywhere_gives_a_job_or_a_report(tmp_path, seed):
    chance = random.Random(seed)
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(planted(chance)))
    overrides = [f"{chance.choice(KEYS)}={json.dumps(chance.choice(VALUES))}" for _ in range(chance.randint(0, 2))]
    try:
        job = load_job(path, overrides)
    except SpecError as error:
        text = str(error)
        assert "job.yaml" in text or "command line" in text
        assert text.count("\n  seen  ") == text.count("\n  fix   ") >= 1
        assert all(character.isprintable() or character == "\n" for character in text)
    else:
        assert json.loads(json.dumps(job.to_json()))
