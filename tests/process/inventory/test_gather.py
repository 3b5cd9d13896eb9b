"""Facts come from every host at once; a host that fails is recorded with the reason."""

import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import PurePath

import pytest

from gangline.errors import HostKeyRefused, HostUnreachable
from gangline.inventory.facts import Inventory
from gangline.inventory.gather import asked_names, facts_request, gather, read_facts
from gangline.runs.cluster import Cluster, Host
from gangline.transport.local import LocalTransport
from gangline.transport.transport import AGENT
from tests.fakes.transport import FakeTransport, Scripted
from tests.unit.checks.machines import pc

HOSTS = tuple(Host(name=name, workdir=f"/w/{name}", python="python3") for name in ("pc1", "pc2", "pc3"))
CLUSTER = Cluster(name="c", hosts=HOSTS)


def good(name):
    return Scripted(stdout=json.dumps(pc(name)))


def gathered(**answers):
    transports = {}
    for name in ("pc1", "pc2", "pc3"):
        answer = answers.get(name, good(name))
        transports[name] = FakeTransport(name, answer=answer if callable(answer) else lambda _call, said=answer: said)
    return gather(CLUSTER, transports)


def raising(error):
    def answer(_call):
        raise error

    return answer


def test_hosts_are_asked_at_the_same_time_and_listed_in_order():
    together = threading.Barrier(3, timeout=10)

    def answer(name):
        def ask(_call):
            together.wait()
            return good(name)

        return ask

    inventory = gathered(**{name: answer(name) for name in ("pc1", "pc2", "pc3")})
    assert [facts.host for facts in inventory.hosts] == ["pc1", "pc2", "pc3"]


def test_the_agent_is_asked_and_told_what_to_look_at():
    host = dataclasses.replace(
        HOSTS[0], code="/w/code", env={"NCCL_DEBUG": "INFO"}, prefix=("env",), address="10.0.0.1"
    )
    transport = FakeTransport("pc1", answer=lambda _call: good("pc1"))
    gather(Cluster(name="c", hosts=(host,), shared=("/mnt/nas",)), {"pc1": transport})
    (call,) = transport.calls
    assert call.argv == (AGENT, "facts")
    assert json.loads(call.stdin) == {
        "workdir": "/w/pc1",
        "python_argv": ["env", "python3"],
        "python_env": {"PYTHONSAFEPATH": "1", "PYTHONPATH": "/w/code", "NCCL_DEBUG": "INFO"},
        "names": ["pc1", "10.0.0.1"],
        "shared": ["/mnt/nas"],
        "files": [],
    }


def test_an_environment_that_is_not_there_yet_is_not_asked():
    host = dataclasses.replace(HOSTS[0], python="", env={"NCCL_TOPO_FILE": "/etc/topo.xml"})
    request = facts_request(host, CLUSTER)
    assert request["python_argv"] is None
    assert request["files"] == ["/etc/topo.xml"]


def test_every_name_and_address_of_the_cluster_is_looked_up_everywhere():
    hosts = (Host(name="a", workdir="/w", python="", address="10.0.0.1", ssh="me@a.lan"), HOSTS[1])
    assert asked_names(Cluster(name="c", hosts=hosts)) == ["a", "10.0.0.1", "a.lan", "pc2", "127.0.0.1"]


@pytest.mark.parametrize(
    ("error", "kind", "unreachable"),
    [
        (HostUnreachable("pc2 does not answer", seen="timed out"), "unreachable", True),
        (HostUnreachable("pc2: connection refused", reason="refused"), "refused", True),
        (HostUnreachable("pc2: no such name", reason="unknown-name"), "unknown-name", True),
        (HostUnreachable("pc2: permission denied", reason="denied"), "denied", True),
        (HostKeyRefused("pc2 has another key", reason="key-changed"), "key-changed", True),
        (HostKeyRefused("pc2: no key is pinned", reason="key-unpinned"), "key-unpinned", True),
        (HostUnreachable("pc2 has no Python", reason="no-python"), "no-python", False),
        (TimeoutError("too slow"), "no-facts", False),
        (OSError(28, "No space left on device"), "no-facts", False),
    ],
)
def test_a_host_that_cannot_be_asked_is_recorded_with_its_kind(error, kind, unreachable):
    inventory = gathered(pc2=raising(error))
    assert [facts.host for facts in inventory.hosts] == ["pc1", "pc3"]
    (failure,) = inventory.failures
    assert (failure.host, failure.kind, failure.unreachable) == ("pc2", kind, unreachable)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Scripted(stdout="hello"), "cannot be read"),
        (Scripted(stdout='{"hostname": 1, "surprise": 2}'), "no section `system`"),
        (Scripted(stdout="[" * 100_000), "cannot be read"),
        (Scripted(stdout="x" * (3 << 20)), "longer than 2 MiB"),
        (Scripted(returncode=1, stderr="Traceback\nNo module named gangline"), "No module named gangline"),
        (Scripted(returncode=127, stderr="\x1b[2Jgone"), "?[2Jgone"),
        (Scripted(duration_s=99), "no facts within 15 s"),
    ],
)
def test_a_host_that_talks_nonsense_or_is_too_slow_is_recorded(answer, why):
    (failure,) = gathered(pc2=answer).failures
    assert why in failure.why
    assert "\x1b" not in failure.why


@pytest.mark.parametrize(("load", "limit"), [("0.50", 15), ("8.00", 30), ("99.0", 90)])
def test_a_busy_host_may_take_longer(load, limit):
    slow = FakeTransport("pc2", answer=lambda _call: Scripted(duration_s=999))
    slow.files[PurePath("/proc/loadavg")] = f"{load} 1.00 1.00 3/99 7\n".encode()
    slow.files[PurePath("/sys/devices/system/cpu/online")] = b"0-2,5\n"
    (failure,) = gather(Cluster(name="c", hosts=HOSTS[1:2]), {"pc2": slow}).failures
    assert failure.why == f"no facts within {limit} s"


def test_what_ssh_says_to_do_is_kept():
    (failure,) = gathered(pc2=raising(HostUnreachable("gone", fix="ping pc2"))).failures
    assert failure.fix == "ping pc2"


def test_the_clocks_around_the_question_are_kept():
    facts = gathered().hosts[0]
    assert facts.asked_s is not None
    assert facts.answered_s is not None
    assert facts.asked_s <= facts.answered_s


def test_an_inventory_survives_its_file():
    inventory = gathered(pc3=raising(HostUnreachable("gone", reason="refused")))
    assert Inventory.from_json(json.loads(json.dumps(inventory.to_json()))) == inventory


def test_this_computer_can_be_asked(tmp_path):
    host = Host(name="here", workdir=str(tmp_path / "not" / "yet"), python=sys.executable)
    inventory = gather(Cluster(name="c", hosts=(host,)), {"here": LocalTransport(host)})
    assert inventory.failures == ()
    (facts,) = inventory.hosts
    assert facts.num_cpus >= 1
    assert facts.disk_free_bytes > 0
    assert facts.workdir == str((tmp_path / "not" / "yet").resolve())
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.gpus or facts.gpu_reason
    assert facts.holder("127.0.0.1") is not None
    assert not (tmp_path / "not").exists()


def test_what_this_computer_says_is_read(tmp_path):
    request = json.dumps({"workdir": str(tmp_path), "names": ["localhost"]}).encode()
    argv = [sys.executable, "-m", "gangline.agent", "facts"]
    done = subprocess.run(argv, input=request, capture_output=True, check=True, timeout=60)
    facts = read_facts("here", json.loads(done.stdout))
    assert facts.unread == ()
    assert facts.python_reason == "nobody named a Python"
    answer = facts.resolved("localhost")
    assert answer is not None
    assert set(answer.addresses) & {"127.0.0.1", "::1"}
