"""The ranks of `bench scaling`: who works with whom, what they time, within the time; and all of it on this computer."""

import json

import pytest

from gangline.bench.measure import bench_scaling
from gangline.bench.text import scaling_lines
from gangline.cli.output import Terminal
from gangline.context import StartOptions
from gangline.errors import UsageError
from gangline.runs.gang import split_whole
from tests.train import cases_scaling
from tests.train.cases_calibrate import CONFIG
from tests.train.story import own_ports
from tests.train.tolerances import FP32

pytestmark = pytest.mark.rotating

HOSTS = ["pc1", "pc2", "pc2"]


def of_kind(lines, kind):
    return [line for line in lines if line["kind"] == kind]


def test_every_way_to_train_is_timed_in_turns(pool):
    ranks = pool(3).run(cases_scaling.lines, hosts=HOSTS, seconds=8.0)
    head = ranks[0]
    turns = of_kind(head, "turn")
    ways = [turn["way"] for turn in turns]
    assert ways[:3] == ["alone", "together", "even"]
    assert ways.count("alone") == ways.count("together") <= 5
    for turn in turns:
        found = turn["ranks"]
        assert all(len(values) == 3 for values in found.values())
        assert min(found["seconds"]) > 0
        assert min(found["steps"]) >= 1
        assert found["steps"][1] == found["steps"][2]
        if turn["way"] == "even":
            assert turn["shares"] == list(split_whole(12, [1, 1, 1]))
        if turn["way"] == "together":
            assert sum(turn["shares"]) == 12
            assert len(set(found["steps"])) == 1
    for rank, lines in enumerate(ranks):
        assert [line["rank"] for line in of_kind(lines, "device")] == [rank]
        assert [line["own_cpus"] > 0 for line in of_kind(lines, "busy")] == [True]
        assert rank == 0 or not of_kind(lines, "turn")


@pytest.mark.parametrize("method", ["lora", "full"])
def test_alone_a_host_computes_the_gradient_of_the_whole_batch_and_nothing_is_learned(pool, method):
    ranks = pool(3).run(cases_scaling.exchanges, hosts=HOSTS, method=method)
    for found in ranks:
        assert found["alone"] == pytest.approx(found["together"], rel=FP32, abs=1e-8)
        assert found["alone"] == pytest.approx(ranks[0]["alone"], rel=FP32, abs=1e-8)
        assert max(found["alone"]) > 0
        assert found["same_weights"]


def test_the_ranks_of_a_host_are_a_world_of_their_own_for_a_while(pool):
    assert pool(3).run(cases_scaling.world_sizes, hosts=HOSTS) == [
        [[1, 0], [3, 0]],
        [[2, 0], [3, 1]],
        [[2, 1], [3, 2]],
    ]


def test_every_host_is_measured_with_the_passes_that_a_run_gives_it(pool):
    found = pool(2).run(cases_scaling.rows_of_passes, hosts=["pc1", "pc2"], sizes=[2, 8])
    assert found[0] == {"alone": 2, "together": 2}
    assert found[1]["alone"] > 3
    assert found[1]["together"] > 2


def test_a_job_for_which_there_is_no_time_says_how_much_it_needs(pool):
    errors = pool(3).run(cases_scaling.lines, hosts=HOSTS, seconds=0.05)
    assert errors[0]["kind"] == "UsageError"
    assert errors[0]["what"] == "bench scaling cannot measure this job in 0 s"
    assert errors[0]["fix"].startswith("--seconds ")
    assert errors == [errors[0]] * 3


def test_samples_are_made_up_and_the_first_steps_are_short(pool):
    found = pool(2).run(cases_scaling.made_up)[0]
    assert found == {"rows": 100, "tokens": [8, 8, 800, 800], "shifted": True, "micro_batches": [2, 2, 3, 3]}


def test_what_a_rank_computes_is_known_to_be_its_own(pool):
    for found in pool(2).run(cases_scaling.busy):
        assert 0 < found["own_cpus"] <= found["machine_cpus"] + 0.2
        assert found["machine_cpus"] <= found["num_cpus"] + 0.2


CLUSTER = f"""\
name: three-on-one
ports: {own_ports()}
hosts:
  - {{name: pc1, transport: local, python: {{python}}}}
  - {{name: pc2, transport: local, python: {{python}}, env: {{GANGLINE_SIMULATED_SLOWDOWN: 1.8}}}}
  - {{name: pc3, transport: local, python: {{python}}, env: {{GANGLINE_SIMULATED_SLOWDOWN: 2.2}}}}
"""
JOB = """\
name: tiny
model: {path: model, start: random}
data: {train: rows.txt, sequence_length: 32}
method: lora
batch: 12
micro_batch: 1
steps: 1
"""


@pytest.fixture
def start(quick_python, tmp_path):
    """Three unlike hosts on this computer, and a job without weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    cluster = CLUSTER.replace("{python}", str(quick_python))
    for name, text in {"rows.txt": "a row\n", "job.yaml": JOB, "cluster.yaml": cluster}.items():
        (tmp_path / name).write_text(text)
    return StartOptions(home=tmp_path / "home", job=tmp_path / "job.yaml", cluster=tmp_path / "cluster.yaml")


def test_three_unlike_hosts_on_this_computer(start):
    scaling = bench_scaling(start, seconds=8.0, console=Terminal(quiet=True))
    assert [(host.host, host.device) for host in scaling.hosts] == [
        ("pc1", "cpu"),
        ("pc2", "cpu, slowed 1.8 x (simulated)"),
        ("pc3", "cpu, slowed 2.2 x (simulated)"),
    ]
    fast, _, slow = (host.tokens_per_s for host in scaling.hosts)
    assert fast > slow
    assert scaling.moving
    assert scaling.one_machine
    assert all(sum(turn.shares) == 12 and min(turn.shares) > 0 for turn in scaling.together)
    assert all(turn.shares == (4, 4, 4) for turn in scaling.even)
    # what else this machine does may make a turn longer or shorter
    assert 0.2 < scaling.ratio < 2
    assert scaling.ceiling <= 1.0001
    assert sum("(simulated)" in line for line in scaling_lines(scaling)) == 2
    assert not (start.home / "runs").exists()
    assert not (start.home / "profiles").exists()


def test_one_host_has_nobody_to_be_compared_with(start):
    start.cluster.write_text("hosts: [{name: pc1, transport: local}]\n")
    with pytest.raises(UsageError, match="compares several hosts") as caught:
        bench_scaling(start, seconds=8.0, console=Terminal(quiet=True))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("batch=2",), "a step of this job has too little work for 3 ranks"),
        (("strategy=fsdp",), "strategy: fsdp, in which the model lies in parts, and no host can do it alone"),
        (("strategy=local-sgd", "method=full"), "bench scaling measures hosts that hold the model"),
    ],
)
def test_a_job_that_cannot_be_compared_is_refused_before_anything_starts(start, words, what):
    asked = StartOptions(home=start.home, job=start.job, overrides=words, cluster=start.cluster)
    with pytest.raises(UsageError, match=what):
        bench_scaling(asked, seconds=8.0, console=Terminal(quiet=True))
    assert not (start.home / "hosts").exists()
