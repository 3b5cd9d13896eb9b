"""The table of steps, the findings that name them, and what both halves have to say alike."""

import itertools
from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from gangline.agent.prepare import change_journal, sudo_session
from gangline.checks.judge import FAMILIES
from gangline.errors import UsageError
from gangline.prepare import host_side, prepare_hosts
from gangline.prepare.prepare_step import activated
from gangline.prepare.step_table import STEPS, chosen, machines_for
from gangline.runs.cluster import Cluster, Host

CLUSTER = Cluster(name="home", hosts=tuple(Host(name=name, workdir="/w", python="") for name in ("pc1", "pc2")))
NAMED = {rule.step for rule in itertools.chain(*FAMILIES.built_in.values()) if rule.step}


def test_every_finding_names_a_step_that_is_there():
    assert {step.name for step in STEPS} >= NAMED
    assert {"access", "names", "clock", "limits"} <= NAMED


def test_steps_have_names_of_their_own_and_none_is_called_as_a_word_of_the_verb():
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names)
    assert {"all", prepare_hosts.HERE}.isdisjoint(names)


def test_words_name_steps_and_hosts_in_any_order():
    steps, hosts = chosen(["pc2", "limits", "names"], CLUSTER.hosts)
    assert [step.name for step in steps] == ["names", "limits"]
    assert hosts == ("pc2",)


@pytest.mark.parametrize(
    ("words", "is_asked"),
    [(["between"], True), (["access", "between"], True), (["between", "limits"], False), ([], False)],
)
def test_a_witness_is_prepared_only_for_what_it_needs(words, is_asked):
    cluster = replace(CLUSTER, witness=Host(name="nas", workdir="/w", python=""))
    assert [host.name for host in machines_for(words, cluster)] == ["pc1", "pc2", *(["nas"] if is_asked else [])]


def test_a_word_that_is_neither_is_a_usage_error():
    with pytest.raises(UsageError, match=r"'namse' is neither a step nor a host of the cluster") as error:
        chosen(["namse"], CLUSTER.hosts)
    assert error.value.fix == "did you mean 'names'?"


def test_both_halves_say_the_same():
    assert host_side.NEEDS_PASSWORD == sudo_session.NEEDS_PASSWORD
    assert host_side.WRONG_PASSWORD == sudo_session.WRONG_PASSWORD
    assert PurePosixPath(change_journal.ROOT_FOLDER) == prepare_hosts.ROOT_JOURNAL
    assert prepare_hosts.USER_JOURNAL.as_posix() == f"~/{change_journal.USER_FOLDER}/journal.jsonl"


def test_what_puts_changes_into_force_is_first_to_be_listed_and_last_to_be_undone():
    first, last = activated((), ("systemctl", "reload", "ssh"))
    assert (first.argv, first.undo) == ((), ("systemctl", "reload", "ssh"))
    assert (last.argv, last.undo) == (("systemctl", "reload", "ssh"), ())
