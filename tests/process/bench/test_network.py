"""bench network: what is measured in which time, what is kept, and what ends when something fails."""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from gangline.bench.cluster_network import (
    SIZES,
    backend_for,
    measure_collectives,
    measure_links,
    measure_network,
    schedule,
    versions,
)
from gangline.bench.torchrun import BenchHosts, CommandGang, rank_argv
from gangline.inventory.facts import Gpu, GpuProcess, HostFacts, HostFailure, Inventory
from gangline.inventory.measured import (
    Collective,
    Link,
    Network,
    load_network,
    network_line,
    network_path,
    save_network,
)
from gangline.inventory.pairs import rounds
from gangline.runs.cluster import Cluster, Host
from gangline.transport.local import LocalTransport
from tests.fakes.transport import FakeTransport, Scripted


def cluster(num=2, slots=1, **more):
    hosts = [
        Host(name=f"pc{n}", workdir=f"/w/pc{n}", python="py", address=f"127.0.0.{n + 1}", slots=slots)
        for n in range(1, num + 1)
    ]
    return Cluster(name="home", hosts=tuple(dataclasses.replace(host, **more) for host in hosts))


def facts(name, torch="2.13.0", gpus=()):
    return HostFacts(
        host=name,
        hostname=name,
        num_cpus=8,
        memory_total_bytes=1 << 34,
        memory_available_bytes=1 << 33,
        workdir="/w",
        disk_free_bytes=1 << 40,
        python="3.12.1",
        packages={"torch": torch},
        gpus=gpus,
    )


def inventory(*hosts, failures=()):
    return Inventory(gathered="2026-01-01T00:00:00+00:00", hosts=hosts, failures=failures)


def gpu(index=0, processes=()):
    return Gpu(
        index=index,
        name="x",
        uuid=str(index),
        memory_total_bytes=1,
        memory_free_bytes=1,
        driver="570",
        processes=processes,
    )


# --- what is kept


def network(**more):
    kept = Network(
        cluster="home",
        measured="2026-01-01T00:00:00+00:00",
        method="m",
        addresses={"pc1": "127.0.0.2", "pc2": "127.0.0.3"},
        slots={"pc1": 1, "pc2": 1},
        versions={"torch": "2.13.0"},
        links=(Link(source="pc1", target="pc2", latency_s=0.0002, throughput_mbps=940.0, retransmits=0),),
        collectives=(
            Collective(
                operation="all_reduce", num_bytes=25 << 20, seconds=0.3, iterations=9, world_size=2, backend="gloo"
            ),
        ),
    )
    return dataclasses.replace(kept, **more)


def test_what_was_measured_is_found_again(tmp_path):
    assert (
        save_network(tmp_path, network()) == network_path(tmp_path, "home") == tmp_path / "clusters/home/network.json"
    )
    assert load_network(tmp_path, cluster()) == network()


def test_figures_of_other_hosts_or_addresses_are_not_used(tmp_path):
    save_network(tmp_path, network())
    assert load_network(tmp_path, cluster(3)) is None
    assert load_network(tmp_path, cluster(2, address="127.0.0.9")) is None
    assert load_network(tmp_path, dataclasses.replace(cluster(), name="other")) is None


def test_what_was_measured_is_told_in_one_line():
    slow = Link(source="pc2", target="pc1", throughput_mbps=94.2)
    few = network(links=(*network().links, slow, Link(source="pc1", target="pc3")))
    assert network_line(few) == (
        "network measured 2026-01-01: slowest pair 94 Mbit/s (pc2 to pc1), all-reduce 0.70 Gbit/s at 25 MiB"
    )
    assert network_line(network(links=(), collectives=())).endswith(": nothing that can be compared")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2}', '{"schema_version": 1, "cluster": 3}'])
def test_a_file_that_is_not_ours_is_as_none(tmp_path, text):
    path = network_path(tmp_path, "home")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert load_network(tmp_path, cluster()) is None


def test_the_speed_of_a_ring_all_reduce():
    one = Collective(
        operation="all_reduce", num_bytes=125_000_000, seconds=2.0, iterations=3, world_size=4, backend="gloo"
    )
    assert one.algorithm_gbps == pytest.approx(0.5)
    assert one.bus_gbps == pytest.approx(0.75)  # 2 * 3 / 4


# --- links


def bench_hosts(hosts, transports):
    seen = inventory(facts("pc1"), facts("pc2"))
    return BenchHosts(cluster=hosts, inventory=seen, transports=transports, networks={})


@pytest.mark.parametrize("num", [2, 3, 4, 8, 16, 50])
@pytest.mark.parametrize("seconds", [4.0, 10.0, 60.0])
def test_the_schedule_keeps_to_its_time(num, seconds):
    hosts = [f"pc{n}" for n in range(num)]
    meetings, each_s = schedule(hosts, seconds)
    assert 0.3 <= each_s <= 1.0
    assert 2 * len(meetings) * (each_s + 0.35) <= max(seconds, 1.3) + 1e-6
    assert all(meeting in rounds(hosts) for meeting in meetings)


def test_every_ordered_pair_is_measured_alone():
    hosts = cluster()
    transports = {host.name: LocalTransport(host) for host in hosts.hosts}
    found = measure_links(bench_hosts(hosts, transports), seconds=1.3)
    assert [(link.source, link.target) for link in found.links] == [("pc1", "pc2"), ("pc2", "pc1")]
    assert all(link.latency_s < 0.1 and link.throughput_mbps > 10 for link in found.links)
    assert (found.closed, found.skipped) == ((), ())


def test_one_machine_has_no_links():
    hosts = cluster(2, address="127.0.0.1")
    found = measure_links(bench_hosts(hosts, {}), seconds=1)
    assert found.links == ()
    assert found.skipped


# --- collectives


def test_every_host_is_told_the_same_but_its_number():
    hosts = cluster(3, slots=2, transport="ssh")
    commands = [rank_argv(hosts, host, "bench-collective", "{}", port=29500) for host in hosts.hosts]
    words = dict(zip(commands[1][3:-4:2], commands[1][4:-4:2], strict=True))
    assert commands[1][:3] == ("py", "-m", "torch.distributed.run")
    assert (words["--nnodes"], words["--node-rank"], words["--nproc-per-node"]) == ("3", "1", "2")
    assert (words["--master-addr"], words["--local-addr"], words["--log-dir"]) == ("127.0.0.2", "127.0.0.3", os.devnull)
    assert commands[0][-2] == "bench-collective"
    assert {command[-1] for command in commands} == {"{}"}


def test_nccl_where_every_rank_has_a_gpu():
    hosts = cluster(2, slots=2)
    full = [facts(name, gpus=(gpu(0), gpu(1))) for name in ("pc1", "pc2")]
    assert backend_for(hosts, inventory(*full)) == "nccl"
    assert backend_for(hosts, inventory(full[0], facts("pc2", gpus=(gpu(0),)))) == "gloo"
    assert backend_for(hosts, inventory(full[0])) == "gloo"


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


FIGURE = {
    "kind": "collective",
    "operation": "all_reduce",
    "num_bytes": 1 << 20,
    "seconds": 0.01,
    "iterations": 5,
    "world_size": 2,
}


def fakes(**answers):
    def transport(name, answer):
        free = Scripted(stdout='{"port": 29511}\n')
        return FakeTransport(name, answer=lambda call: free if call.argv[1] == "free-port" else answer)

    return {name: transport(name, answer) for name, answer in answers.items()}


def measured(**answers):
    return measure_collectives(bench_hosts(cluster(), fakes(**answers)), seconds=5)


def test_the_head_says_the_figures():
    skipped = {"kind": "skipped", "num_bytes": 100 << 20, "why": "0.1 s were left"}
    figures, left_out = measured(
        pc1=Scripted(stdout=lines({"beat": 1.0}, FIGURE, skipped)), pc2=Scripted(stdout=lines({"beat": 1.0}))
    )
    assert [(one.num_bytes, one.world_size, one.backend) for one in figures] == [(1 << 20, 2, "gloo")]
    assert [(one.what, one.why) for one in left_out] == [("all_reduce of 100 MiB", "0.1 s were left")]


def test_a_host_that_fails_is_the_reason():
    stderr = "noise\nModuleNotFoundError: No module named 'torch'\nE1121 torch.distributed.elastic ChildFailedError:\n"
    figures, left_out = measured(pc1=Scripted(), pc2=Scripted(returncode=1, stderr=stderr))
    assert figures == []
    assert [one.why for one in left_out] == ["pc2: ModuleNotFoundError: No module named 'torch'"]


def test_a_gang_ends_when_one_of_it_fails():
    transports = {name: LocalTransport(Host(name=name, workdir="/w", python="p")) for name in ("pc1", "pc2")}
    gang = CommandGang(transports=transports, timeout_s=60)
    begun = time.monotonic()
    gang.run({"pc1": (("sleep", "61.5"), {}), "pc2": ((sys.executable, "-c", "raise SystemExit('no way')"), {})})
    assert time.monotonic() - begun < 20
    assert gang.failures == {"pc2": "no way"}
    assert not running("61.5")


def test_a_gang_that_is_interrupted_leaves_nothing():
    gang = CommandGang(transports={"pc1": LocalTransport(Host(name="pc1", workdir="/w", python="p"))}, timeout_s=60)

    def interrupt():
        while not running("62.5"):
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        gang.run({"pc1": (("sleep", "62.5"), {})})
    assert not running("62.5")


def running(word):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().split(b"\0")[:2])
        except OSError:
            continue
    return [b"sleep", word.encode()] in found


# --- all of it


def bench(tmp_path, seen, hosts=None, **answers):
    given = BenchHosts(
        cluster=hosts or cluster(2, address="127.0.0.1"), inventory=seen, transports=fakes(**answers), networks={}
    )
    return measure_network(given, home=tmp_path, seconds=5, report=lambda _: None)


def test_the_result_is_kept_with_date_method_and_versions(tmp_path):
    hosts = cluster(2, address="127.0.0.1")
    transports = fakes(pc1=Scripted(stdout=lines(FIGURE)), pc2=Scripted())
    found = measure_network(bench_hosts(hosts, transports), home=tmp_path, seconds=5, report=lambda _: None)
    assert load_network(tmp_path, hosts) == found
    assert found.versions["torch"] == "2.13.0"
    assert found.measured.startswith("20")
    assert found.method.startswith("links: ")
    assert len(found.collectives) == 1
    assert [one.what for one in found.skipped] == ["pc2", "pairs of hosts"]
    sent = json.loads(transports["pc2"].calls[0].stdin)
    order = json.loads(sent["argv"][-1])
    assert (order["backend"], order["sizes"], order["seconds"]) == ("gloo", list(SIZES), 2.5)
    assert order["deadline_s"] < sent["seconds"]


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (inventory(facts("pc1"), facts("pc2", torch=None)), "pc2 has no torch"),
        (
            inventory(facts("pc1"), failures=(HostFailure(host="pc2", why="off", unreachable=True),)),
            "pc2 cannot be asked",
        ),
    ],
)
def test_ranks_that_could_not_meet_are_not_started(tmp_path, seen, why):
    found = bench(tmp_path, seen, pc1=Scripted(returncode=1), pc2=Scripted(returncode=1))
    assert ("collectives", why) in [(one.what, one.why) for one in found.skipped]


def test_one_rank_has_no_collective(tmp_path):
    found = bench(tmp_path, inventory(facts("pc1")), cluster(1), pc1=Scripted())
    assert ("collectives", "there is one rank") in [(one.what, one.why) for one in found.skipped]


def test_programs_that_disturb_are_noted(tmp_path):
    busy = facts("pc1", gpus=(gpu(0), gpu(1, processes=(GpuProcess(pid=7),))))
    found = bench(tmp_path, inventory(busy), cluster(1), pc1=Scripted())
    assert found.notes == ("pc1: other programs computed on GPU 1 meanwhile",)


def test_versions_that_differ_are_all_said():
    assert versions(inventory(facts("pc1"), facts("pc2", torch="2.12.1")))["torch"] == "2.13.0, 2.12.1"
