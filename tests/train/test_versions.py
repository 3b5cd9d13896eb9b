"""A run that one version of gangline has recorded goes on under another minor version, with keys that this one lacks."""

import json

import pytest

from tests.train.story import copy_world, make_user, write_cluster, write_job

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def user(world, quick_python, tmp_path):
    user = make_user(tmp_path, python=quick_python)
    copy_world(world, user)
    write_job(user, steps=30)
    slow = {"env": {"GANGLINE_SIMULATED_SLOWDOWN": 20}}
    write_cluster(user, "two", pc1=slow, pc2=slow)
    write_cluster(user, "fast", pc1={}, pc2={})
    yield user
    user.end_runs()


def records(user, run):
    """All JSON files of a run, here and on its hosts; those of a checkpoint have the version of its part.json."""
    folders = [user.home / "runs" / run, *(user.home / "hosts").glob(f"*/runs/{run}")]
    found = (path for folder in folders for path in folder.rglob("*.json"))
    return sorted(path for path in found if not path.parent.name.startswith("part-"))


def newer(path):
    """As a build with another minor version would have written it: a key that nobody knows here."""
    value = json.loads(path.read_text())
    value |= {"schema_version": "1.7", "weather": {"snow_cm": 12}}
    path.write_text(json.dumps(value))


def test_every_record_has_a_version_and_a_newer_minor_one_is_resumed(user):
    run = user.gangline("train", "job.yaml", "--cluster", "two.yaml", "--detach").out.strip()
    user.wait_for_step(run, 6)
    user.gangline("stop", run)
    found = records(user, run)
    without = [path for path in found if "schema_version" not in json.loads(path.read_text())]
    assert [str(path.relative_to(user.home)) for path in without] == []
    names = {path.name for path in found}
    assert names >= {"job.json", "cluster.json", "plan.json", "state.json", "inputs.json", "request.json", "gang.json"}
    assert names >= {"outcome.json", "status.json", "agent.json", "exit.json", "result.json", "order-1.json"}
    for path in found:
        newer(path)
    assert [(row["id"], row["phase"], row["damage"]) for row in user.runs()] == [(run, "stopped", None)]
    user.gangline("explain", run)
    user.gangline("resume", run, "--cluster", "fast.yaml")
    assert user.wait_for_end(run) == "finished"
    assert sorted({line["step"] for line in user.metrics("pc1", run)}) == list(range(1, 31))
