"""bench over real hosts: links and collectives of the right size, speeds alone and together, nothing left, and a port
that is shut."""

import json
import sys

import pytest

from tests.lab.hosts import lab_folders

VERB = """
import sys
from gangline.cli import main
main.VERBS.setdefault("bench", ("gangline.cli.bench", ""))
sys.exit(main.main(["bench", *sys.argv[1:]]))
"""


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}
JOB = """\
model: {path: model, start: random}
data: {train: rows.txt, sequence_length: 128}
method: lora
batch: 8
micro_batch: 2
steps: 1
"""


def write_cluster(lab, more=("", "", "")):
    rows = [
        f"  - {{name: {host.name}, address: {host.address}, port: {host.ssh_port}, python: {sys.executable}, "
        f"host_key: {host.host_key}, slots: {slots}{words}}}\n"
        for host, slots, words in zip(lab.hosts, (1, 2, 1), more, strict=False)
    ]
    lab.user.write("home.yaml", "hosts:\n" + "".join(rows))


def slowed(factor):
    """Of a row of the cluster file."""
    return f", env: {{GANGLINE_SIMULATED_SLOWDOWN: {factor}}}"


def bench(lab, *words):
    return lab.user.run([sys.executable, "-c", VERB, *words], env={"GANGLINE_HOME": "state"}, timeout_s=170)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_three_hosts_at_1_gigabit(lab):
    lab = lab(3, binds=lab_folders(), rate="1gbit")
    write_cluster(lab)
    done = bench(lab, "network", "home.yaml", "--seconds", "20", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said["links"]) == 6
    assert all(100 < link["throughput_mbps"] < 1100 for link in said["links"])
    by_size = {one["num_bytes"]: one for one in said["collectives"]}
    assert (1 << 20) in by_size
    assert all((one["world_size"], one["backend"]) == (4, "gloo") for one in by_size.values())
    # a ring moves 2 * 3 / 4 of 1 MiB over each link: 13 ms at this speed, longer on a busy machine
    assert 0.008 < by_size[1 << 20]["seconds"] < 1
    assert said["slots"] == {"h0": 1, "h1": 2, "h2": 1}
    assert [host.processes() for host in lab.hosts] == [[], [], []]
    assert [host.check(["sh", "-c", "ls -d /tmp/torchelastic* 2>/dev/null | wc -l"]).strip() for host in lab.hosts] == [
        "0"
    ] * 3
    kept = json.loads(lab.user.read("state/clusters/home/network.json"))
    assert kept["collectives"] == said["collectives"]


@pytest.mark.timeout(120)
def test_ranks_are_not_started_where_they_could_not_talk(lab):
    lab = lab(2, binds=lab_folders())
    write_cluster(lab)
    lab.hosts[1].faults.drop(port="32768-60999")
    done = bench(lab, "network", "home.yaml", "--seconds", "4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["Mbit/s,", "from", "to", "h0", "to", "h1"]
    assert any(line.startswith("skipped  collectives: ports are closed: h0 -> h1") for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_speed_of_every_rank_at_a_job(lab):
    lab = lab(2, binds=lab_folders())
    write_cluster(lab, ("", slowed(3)))
    lab.user.write("model/config.json", json.dumps(CONFIG))
    lab.user.write("rows.txt", "a row\n")
    lab.user.write("job.yaml", JOB)
    done = bench(lab, "compute", "job.yaml", "--cluster", "home.yaml", "--seconds", "8", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["skipped"] == []
    assert [rank["host"] for rank in said["ranks"]] == ["h0", "h1", "h1"]
    for rank in said["ranks"]:
        assert rank["profile"]["key"]["gpu"] == "cpu"
        assert {(point["layers"], point["tokens"]) for point in rank["profile"]["points"]} == {
            (layers, tokens) for layers in (1, 2) for tokens in (32, 256, 512)
        }
        # 12 layers of 0.2 million weights on 256 tokens
        assert 0.002 < rank["micro_batch_s"] < 15
    kept = lab.user.check(["ls", "state/profiles"]).split()
    assert [name.rsplit("-", 1)[1] for name in kept] == ["h0.json", "h1.json"]
    assert [host.processes() for host in lab.hosts] == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_every_host_alone_against_all_together_at_1_gigabit(lab):
    lab = lab(3, binds=lab_folders(), rate="1gbit")
    write_cluster(lab, ("", slowed(1.8), slowed(2.2)))
    lab.user.write("model/config.json", json.dumps(CONFIG))
    lab.user.write("rows.txt", "a row\n")
    lab.user.write("job.yaml", JOB)
    done = bench(lab, "scaling", "job.yaml", "batch=24", "--cluster", "home.yaml", "--seconds", "40", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [(host["host"], host["ranks"], host["device"]) for host in said["hosts"]] == [
        ("h0", [0], "cpu"),
        ("h1", [1, 2], "cpu, slowed 1.8 x (simulated)"),
        ("h2", [3], "cpu, slowed 2.2 x (simulated)"),
    ]
    assert not said["one_machine"]
    assert said["hosts"][0]["tokens_per_s"] > said["hosts"][2]["tokens_per_s"]
    assert said["sum_tokens_per_s"] == pytest.approx(sum(host["tokens_per_s"] for host in said["hosts"]))
    # the lab's hosts share two processors: what one of them leaves another one takes
    assert 0.2 < said["worst_ratio"] <= said["ratio"] < 2
    assert all(turn["shares"] == [3, 3, 3, 3] for turn in said["even"])
    assert all(sum(turn["shares"]) == 12 for turn in said["together"])
    assert [host.processes() for host in lab.hosts] == [[], [], []]
    lab.hosts[2].faults.drop(port="32768-60999")
    done = bench(lab, "scaling", "job.yaml", "batch=24", "--cluster", "home.yaml", "--seconds", "10")
    assert done.returncode != 0
    assert done.stdout == ""
    assert [host.processes() for host in lab.hosts] == [[], [], []]
