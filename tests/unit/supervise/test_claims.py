"""What hosts say of another supervisor."""

from gangline.launch.backend import HostStatus
from gangline.supervise.liveness import EpochClaims
from tests.unit.supervise.test_board import Clock


def hosts(**epochs):
    return [HostStatus(host=host, phase="running", epoch=epoch) for host, epoch in epochs.items()]


def noted(claims, clock, at, **epochs):
    clock.now = at
    return [(event, details["host"], details["epoch"]) for event, details in claims.note(hosts(**epochs), epoch=3)]


def claims(num_hosts):
    clock = Clock()
    return EpochClaims(num_hosts=num_hosts, doubt_s=15.0, clock=clock), clock


def test_our_own_epoch_and_lower_ones_are_no_claims():
    seen, clock = claims(2)
    assert noted(seen, clock, 0.0, pc1=3, pc2=None) == []
    assert noted(seen, clock, 60.0, pc1=2, pc2=3) == []
    assert seen.believed is None


def test_two_hosts_are_believed_at_once_and_the_higher_claim_of_one_is_not():
    seen, clock = claims(3)
    assert noted(seen, clock, 0.0, pc1=4, pc2=999_999_999, pc3=3) == []
    assert seen.believed == 4


def test_one_host_among_several_is_told_of_after_a_while_and_only_once():
    seen, clock = claims(3)
    assert noted(seen, clock, 0.0, pc1=3, pc2=9, pc3=3) == []
    assert noted(seen, clock, 14.0, pc1=3, pc2=9, pc3=3) == []
    assert noted(seen, clock, 15.0, pc1=3, pc2=9, pc3=3) == [("doubted", "pc2", 9)]
    assert noted(seen, clock, 16.0, pc1=3, pc2=9, pc3=3) == []
    assert seen.believed is None


def test_a_claim_that_is_taken_back_begins_anew():
    seen, clock = claims(2)
    noted(seen, clock, 0.0, pc1=3, pc2=9)
    noted(seen, clock, 10.0, pc1=3, pc2=3)
    assert noted(seen, clock, 20.0, pc1=3, pc2=9) == []


def test_the_only_host_of_a_run_is_believed():
    seen, clock = claims(1)
    assert noted(seen, clock, 0.0, pc1=4) == []
    assert seen.believed == 4
