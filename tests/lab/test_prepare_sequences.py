"""Random sequences of `gangline prepare` on real hosts, two of them; `python -m benchmarks.prepare_sequences` plays 200.

The same with 200 sequences on folders that stand for a host: tests/process/agent/prepare/test_random_sequences.py.
"""

import pytest

from tests.lab import prepare_sequences
from tests.lab.prepare_sequences import OURS, RELOAD, PrepareSequence


@pytest.mark.slow
@pytest.mark.lab("root")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_nobody_is_ever_locked_out_and_all_is_taken_back(num_hosts):
    with PrepareSequence(f"test {num_hosts}", num_hosts=num_hosts) as sequence:
        sequence.play(6)
        sequence.end()


def lost_line(sequence, pc1):
    sequence.other(pc1)
    host, path, line = sequence.lines[-1]
    assert host == "pc1"
    pc1.check(["sed", "-i", f"/^{line}$/d", path], as_root=True)


def changed_rights(sequence, pc1):
    sequence.mode(pc1)
    pc1.check(["chmod", "0777", "/etc/hosts"], as_root=True)


def untrue_journal(sequence, pc1):
    sequence.types("prepare", "limits", "--yes", code=0)
    sequence.check(ask=True)
    pc1.check(["rm", OURS[0]], as_root=True)


def lock_out(_sequence, pc1):
    pc1.check(
        ["sh", "-c", f"echo 'DenyUsers *' > /etc/ssh/sshd_config.d/00-no.conf && {' '.join(RELOAD)}"], as_root=True
    )


SEEN = {
    lost_line: r"pc1 \S+ lost",
    changed_rights: r"pc1 /etc/hosts: 0o777, theirs",
    untrue_journal: r"the journal is not true: .*limits\.d/60-gangline\.conf: said True, there False",
    lock_out: r"pc1 does not let in",
}


@pytest.mark.lab("root")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", SEEN)
def test_what_goes_wrong_is_seen(fault, monkeypatch):
    monkeypatch.setattr(prepare_sequences, "TRUE_WITHIN_S", 0.0)
    monkeypatch.setattr(prepare_sequences, "BACK_WITHIN_S", 0.0)
    with PrepareSequence("seen", num_hosts=1) as sequence:
        fault(sequence, sequence.lab["pc1"])
        with pytest.raises(AssertionError, match=SEEN[fault]):
            sequence.check(ask=False)
