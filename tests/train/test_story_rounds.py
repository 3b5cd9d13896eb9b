"""`strategy: local-sgd` through the real command: hosts train apart, stop at the end of a round, and go on elsewhere."""

import json

import pytest

from tests.train.story import copy_world, make_user, write_cluster, write_job

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def user(world, quick_python, tmp_path):
    """Somebody with a corpus, a model and a job that is trained in rounds of 4 steps."""
    user = make_user(tmp_path, python=quick_python)
    copy_world(world, user)
    write_job(user, strategy={"kind": "local-sgd", "inner_steps": 4}, optimizer={"learning_rate": 3e-3})
    write_cluster(user, "first", pc1={"share": 3}, pc2={"share": 1, "env": {"GANGLINE_SIMULATED_SLOWDOWN": 20}})
    write_cluster(user, "second", pc2={}, pc4={})
    yield user
    user.end_runs()


def test_rounds_are_planned_stopped_at_their_end_and_go_on_on_other_hosts(user):
    watching = user.start("gangline", "train", "job.yaml", "--cluster", "first.yaml")
    run = watching.stdout.readline().strip()
    user.wait_for_step(run, 4)
    user.gangline("stop", run)
    told = watching.communicate()[1]
    assert "each of the 2 hosts trains apart for 4 steps" in told
    assert "NOT the same numbers as one big machine" in told
    first = user.metrics("pc1", run)
    assert [line["step"] for line in first] == list(range(4, 4 * len(first) + 1, 4))
    assert first[-1]["step"] < 60
    assert first[0]["round_steps"] == 4
    assert first[0]["inner_steps"] == {"pc1": 6, "pc2": 2}
    assert [rank["micro_batches"] for rank in first[0]["ranks"]] == [36, 12]
    user.gangline("resume", run, "--cluster", "second.yaml")
    assert user.wait_for_end(run) == "finished"
    whole = user.metrics("pc2", run)
    assert [line["step"] for line in whole] == list(range(4, 61, 4))
    assert [line["attempt"] for line in whole] == [1] * len(first) + [2] * (15 - len(first))
    lines = [json.loads(line) for line in (user.at_host("pc2", run) / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "evaluation"]
    assert losses[-1] < first[0]["loss"]
