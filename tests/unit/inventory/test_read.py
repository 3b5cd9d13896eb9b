"""A host may be old, new, broken or lying: what it says of itself is looked at before it is believed."""

import copy
import json
import random

import pytest

from gangline.checks.judge import judge
from gangline.inventory.facts import Inventory
from gangline.inventory.gather import NUM_ITEMS, Unreadable, read_facts
from tests.unit.checks.machines import cluster, host, pc, server


def put(answer, place, value):
    target = answer
    *folders, last = [int(word) if word.isdigit() else word for word in place.split(".")]
    for word in folders:
        target = target[word]
    target[last] = value
    return answer


def test_what_a_newer_agent_says_besides_is_passed_over():
    answer = pc()
    answer["antigravity"] = {"present": True}
    answer["gpus"]["cards"][0]["tensor_cores"] = 512
    assert read_facts("pc1", answer) == read_facts("pc1", pc())


@pytest.mark.parametrize(
    "section", ["nics", "gpus", "rdma", "storage", "limits", "names", "routes", "files", "programs"]
)
def test_what_an_older_agent_does_not_say_is_unknown(section):
    answer = pc()
    del answer[section]
    read_facts("pc1", answer)


@pytest.mark.parametrize(
    "section", ["nics", "gpus", "rdma", "storage", "limits", "names", "routes", "packages", "topology", "variables"]
)
def test_a_section_that_failed_spoils_no_other(section):
    answer = pc()
    answer[section] = {"error": "PermissionError: no"}
    facts = read_facts("pc1", answer)
    assert [(row.section, row.why) for row in facts.unread] == [(section, "PermissionError: no")]
    assert facts.hostname == "pc1"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("system.num_cpus", "many"),
        ("system.num_cpus", True),
        ("system.num_cpus", 1 << 80),
        ("system.memory_total_bytes", 1.5),
        ("system.time_s", float("nan")),
        ("system.machine", ["id"]),
        ("nics", {"lo": 1}),
        ("nics.0.mtu", "1500"),
        ("nics.0.addresses", "192.168.1.11"),
        ("gpus.cards", "eight"),
        ("gpus.cards.0.name", 4090),
        ("gpus.cards.0.memory_total_bytes", None),
        ("storage.0.free_bytes", [1]),
        ("packages.packages", ["torch"]),
        ("packages.torch", "2.13"),
        ("limits", [1024]),
        ("variables.0", "RANK=0"),
    ],
)
def test_a_value_of_another_kind_is_a_lie_and_its_place_is_named(place, value):
    answer = pc()
    answer["variables"] = [{"name": "RANK"}]
    with pytest.raises(Unreadable, match=place.partition(".")[0]):
        read_facts("pc1", put(answer, place, value))


@pytest.mark.parametrize("answer", [None, [], "facts", 7, {}, {"system": None}, {"system": {"error": "no"}}])
def test_something_else_than_facts_is_refused(answer):
    with pytest.raises(Unreadable):
        read_facts("pc1", answer)


def test_lists_and_texts_are_cut():
    answer = put(pc(), "nics", [{"name": f"veth{number}"} for number in range(5000)])
    answer["system"]["os"] = "x" * 1_000_000
    facts = read_facts("pc1", answer)
    assert len(facts.nics) == NUM_ITEMS
    assert len(facts.system.os or "") == 2000


def test_nothing_that_steers_a_terminal_comes_through():
    evil = "\x1b]0;owned\x07\x9b31m\u202e"
    answer = put(put(pc(), "system.hostname", evil), "gpus.cards.0.name", evil)
    answer["packages"] = {"error": evil}
    text = json.dumps([repr(read_facts("pc1", answer))], ensure_ascii=False)
    assert not set(text) & set("\x1b\x07\x9b\u202e")


def test_a_card_that_does_not_say_everything_is_a_card_all_the_same():
    answer = pc()
    answer["gpus"]["cards"][0] = {"index": 0, "name": "Some Card", "memory_total_bytes": 1, "memory_free_bytes": 1}
    (gpu,) = read_facts("pc1", answer).gpus
    assert (gpu.name, gpu.uuid, gpu.compute_capability) == ("Some Card", "?", None)


def test_a_work_folder_that_does_not_answer_is_still_the_work_folder():
    answer = put(pc(), "storage.0", {"path": "/mnt/nas/w", "error": "no answer within 5 s"})
    facts = read_facts("pc1", answer)
    assert facts.workdir == "/mnt/nas/w"
    assert facts.work_folder is not None
    assert facts.work_folder.error == "no answer within 5 s"


def test_a_simulated_card_says_so_wherever_it_is_named():
    (gpu,) = read_facts("pc1", put(pc(), "gpus.simulated", True)).gpus
    assert gpu.name == "NVIDIA GeForce RTX 4090 (simulated)"


def places(value, path=()):
    yield path
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in rows:
        yield from places(below, (*path, key))


JUNK = [
    None,
    True,
    -1,
    1 << 70,
    1.5,
    float("inf"),
    "",
    "x",
    [],
    [None],
    [[1]],
    {},
    {"": None},
    {"error": 1},
    {"a": [{}]},
]


def replaced(base, path, junk):
    answer = copy.deepcopy(base)
    target = answer
    for word in path[:-1]:
        target = target[word]
    target[path[-1]] = copy.deepcopy(junk)
    return answer


@pytest.mark.parametrize("base", [pc(), server()], ids=["pc", "server"])
def test_nothing_that_a_host_says_breaks_the_reader_or_the_checks(base):
    """Any place of an answer, with every kind of junk: facts that can be judged, or a refusal with a reason."""
    base["files"] = [{"path": "/t", "text": "<gpu/>"}]
    base["routes"] = {"10.0.0.1": {"source": "10.0.0.2", "interface": "eth0"}}
    base["names"]["addresses"]["x"] = {"error": "no"}
    where = [path for path in places(base) if path]
    members = cluster(host("pc1"), host("pc2"))
    other = read_facts("pc2", pc("pc2"))
    num_refused = 0
    for path in random.Random(7).sample(where, 60):
        for junk in JUNK:
            try:
                facts = read_facts("pc1", replaced(base, path, junk))
            except Unreadable:
                num_refused += 1
                continue
            judge(Inventory(gathered="", hosts=(facts, other)), members)
    assert 0 < num_refused < 60 * len(JUNK)
