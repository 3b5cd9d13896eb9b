"""OrderDelivery that are on their way."""

import threading

import pytest

from gangline.launch.backend import HostRequest, HostStatus, LaunchRequest
from gangline.supervise.gang_control import GangControl
from gangline.supervise.supervisor import OrderDelivery
from tests.waiting import wait_until

HOSTS = ("pc1", "pc2")
HERE = [HostStatus(host=host, phase="running") for host in HOSTS]


class Backend:
    """Host agents that receive an order when a test says so. sent: (host, whether it is a kill)."""

    def __init__(self, receives):
        self.receives = receives
        self.sent = []

    def stop(self, request, _transports, *, now, resting, epoch):
        (host,) = request.names
        self.sent.append((host, now))
        return [] if self.receives(host) else [host]


def orders_by(backend, *, patience_s):
    parts = [HostRequest(host=host, folder="/", rank_files="/", argv=(), env={}) for host in HOSTS]
    request = LaunchRequest(run_id="calm-otter-7", attempt=1, hosts=tuple(parts))
    return OrderDelivery(GangControl(backend=backend, request=request, transports={}, epoch=1), patience_s=patience_s)


def test_a_host_that_has_received_it_is_not_sent_it_again_and_one_that_has_not_is():
    backend = Backend(lambda host: host == "pc1" or len(backend.sent) > 2)
    orders = orders_by(backend, patience_s=20.0)
    orders.give("stop")
    for _ in range(3):
        orders.deliver(HERE)
    assert sorted(backend.sent) == [("pc1", False), ("pc2", False), ("pc2", False)]


def test_a_host_that_hangs_is_waited_for_once_and_receives_the_newest_order_in_the_end():
    let_go = threading.Event()
    backend = Backend(lambda host: host == "pc1" or let_go.wait(20))
    orders = orders_by(backend, patience_s=0.05)
    for order in ("stop", "kill"):
        orders.give(order)
        orders.deliver(HERE)
    assert ("pc2", True) not in backend.sent
    let_go.set()
    wait_until(lambda: orders.deliver(HERE) or ("pc2", True) in backend.sent, "pc2 receives it")
    assert backend.sent.count(("pc2", False)) == 1
    assert ("pc1", True) in backend.sent


def test_a_host_that_does_not_answer_is_sent_it_as_soon_as_it_does():
    backend = Backend(lambda _host: True)
    orders = orders_by(backend, patience_s=20.0)
    orders.give("stop")
    orders.deliver([HERE[0], HostStatus(host="pc2", phase="unreachable")])
    assert backend.sent == [("pc1", False)]
    orders.deliver(HERE)
    assert backend.sent == [("pc1", False), ("pc2", False)]


def test_an_error_is_raised_and_the_order_can_be_sent_again():
    problems = [KeyError("no such host")]

    def receives(host):
        if host == "pc1" and problems:
            raise problems.pop()
        return True

    backend = Backend(receives)
    orders = orders_by(backend, patience_s=20.0)
    orders.give("stop")
    with pytest.raises(KeyError):
        orders.deliver(HERE)
    orders.deliver(HERE)
    assert backend.sent.count(("pc1", False)) == 2
