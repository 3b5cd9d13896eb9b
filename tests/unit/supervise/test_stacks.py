"""Stacks are asked of every host at once, anew for every suspicion; a host that does not answer keeps nobody waiting."""

import json
import threading

from gangline.errors import HostUnreachable
from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.supervise.gang_view import StackAsking
from gangline.transport.transport import AGENT, CommandResult

ANSWER = {"ranks": {"0": {"state": "S"}}}


class Host:
    """Answers when a test lets it."""

    def __init__(self, answer):
        self.answer = answer
        self.may_answer = threading.Event()
        self.answered = threading.Semaphore(0)
        self.asked = []

    def run(self, argv, *, stdin, timeout_s):
        self.asked.append((argv, json.loads(stdin)))
        self.may_answer.wait(20)
        self.answered.release()
        if isinstance(self.answer, Exception):
            raise self.answer
        return CommandResult(host="pc1", argv=tuple(argv), returncode=0, stdout=self.answer, stderr="")


def asking(**hosts):
    parts = [
        HostRequest(host=name, folder=f"/{name}", rank_files="/files", argv=(), env={"SECRET": "x"}, ranks=(rank,))
        for rank, name in enumerate(hosts)
    ]
    return StackAsking(LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=tuple(parts)), hosts)


def until(asked, number, hosts):
    """What is said once these hosts have answered."""
    while not hosts <= (said := asked.about(number)).keys():
        pass
    return said


def test_what_hosts_have_said_so_far_is_there_at_once():
    quick, slow = Host(json.dumps(ANSWER)), Host(json.dumps(ANSWER))
    asked = asking(pc1=quick, pc2=slow)
    quick.may_answer.set()
    assert until(asked, 1, {"pc1"}) == {"pc1": ANSWER}
    slow.may_answer.set()
    assert until(asked, 1, {"pc1", "pc2"}) == {"pc1": ANSWER, "pc2": ANSWER}
    request = {"rank_files": "/files", "ranks": [0], "program": "worker"}
    assert quick.asked == [((AGENT, "stacks"), {"request": request})]


def test_a_host_that_cannot_be_asked_or_talks_nonsense_has_said_nothing():
    hosts = {
        "pc1": Host(HostUnreachable("pc1 does not answer")),
        "pc2": Host("no JSON"),
        "pc3": Host(TimeoutError()),
        "pc4": Host("{}"),
    }
    asked = asking(**hosts)
    asked.about(1)
    for host in hosts.values():
        host.may_answer.set()
        host.answered.acquire(timeout=20)
    assert until(asked, 1, set(hosts)) == {host: {} for host in hosts}


def test_another_suspicion_has_all_asked_anew():
    host = Host(json.dumps(ANSWER))
    asked = asking(pc1=host)
    asked.about(1)
    assert asked.about(2) == {}
    host.may_answer.set()
    until(asked, 2, {"pc1"})
    host.answered.acquire(timeout=20)
    host.answered.acquire(timeout=20)
    assert len(host.asked) == 2
