"""Facts come from every host at once; a host that fails is recorded with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gangline.agent.facts import facts as read_facts
from gangline.errors import HostUnreachable
from gangline.inventory.facts import HostFacts, Inventory
from gangline.inventory.gather import facts_argv, gather
from gangline.remote.transport import Result
from gangline.runs.cluster import Cluster, Host

HOSTS = tuple(Host(name=name, workdir=f"/w/{name}", python="python3") for name in ("pc1", "pc2", "pc3"))


class Answering:
    """A transport of which only `run` is asked."""

    def __init__(self, host: str, answer: Callable[[], Result]) -> None:
        self.host = host
        self.answer = answer

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        on_line: Callable[[str], None] | None = None,
    ) -> Result:
        return self.answer()


def result(host: str, *, returncode: int = 0, stdout: str = "", stderr: str = "") -> Result:
    return Result(host=host, argv=(), returncode=returncode, stdout=stdout, stderr=stderr)


def good(host: str) -> Result:
    return result(host, stdout=json.dumps(read_facts("/")))


def gathered(answers: dict[str, Callable[[], Result]]) -> Inventory:
    transports: dict[str, Any] = {name: Answering(name, answer) for name, answer in answers.items()}
    return gather(Cluster(name="c", hosts=HOSTS), transports)


def test_hosts_are_asked_at_the_same_time_and_listed_in_order() -> None:
    together = threading.Barrier(3, timeout=10)

    def answer(host: str) -> Callable[[], Result]:
        def ask() -> Result:
            together.wait()
            return good(host)

        return ask

    inventory = gathered({host.name: answer(host.name) for host in HOSTS})
    assert [facts.host for facts in inventory.hosts] == ["pc1", "pc2", "pc3"]


def test_a_host_that_fails_is_recorded_with_the_reason() -> None:
    def unreachable() -> Result:
        raise HostUnreachable("pc2 does not answer", seen="connection refused")

    def without_gangline() -> Result:
        return result("pc3", returncode=1, stderr="Traceback\nNo module named gangline")

    inventory = gathered({"pc1": lambda: good("pc1"), "pc2": unreachable, "pc3": without_gangline})
    assert [facts.host for facts in inventory.hosts] == ["pc1"]
    assert [(failure.host, failure.unreachable) for failure in inventory.failures] == [("pc2", True), ("pc3", False)]
    assert "No module named gangline" in inventory.failures[1].why


def test_a_host_that_talks_nonsense_or_is_too_slow_is_recorded() -> None:
    def slow() -> Result:
        raise TimeoutError

    inventory = gathered(
        {
            "pc1": lambda: result("pc1", stdout="hello"),
            "pc2": lambda: result("pc2", stdout='{"hostname": 1, "surprise": 2}'),
            "pc3": slow,
        }
    )
    assert inventory.hosts == ()
    assert [failure.host for failure in inventory.failures] == ["pc1", "pc2", "pc3"]


def test_the_agent_prints_facts_that_the_inventory_reads(tmp_path: Path) -> None:
    host = Host(name="here", workdir=str(tmp_path / "not" / "yet"), python=sys.executable)
    done = subprocess.run(facts_argv(host), capture_output=True, check=True, text=True, timeout=60)
    facts = HostFacts.from_json({**json.loads(done.stdout), "host": "here"})
    assert facts.num_cpus >= 1
    assert facts.disk_free_bytes > 0
    assert facts.workdir == str((tmp_path / "not" / "yet").resolve())
    assert facts.gpus or facts.gpu_reason
    assert not (tmp_path / "not").exists()


def test_an_inventory_survives_its_file() -> None:
    inventory = gathered({host.name: (lambda name=host.name: good(name)) for host in HOSTS})  # type: ignore[misc]
    assert Inventory.from_json(json.loads(json.dumps(inventory.to_json()))) == inventory
