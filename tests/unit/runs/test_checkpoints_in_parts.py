"""Which checkpoint a run starts from where every host has a part of it only: from none that lacks one."""

import dataclasses

import pytest

from gangline.errors import CheckpointError
from gangline.runs import checkpoints as disk
from gangline.runs.gang import Gang, GangRank, held_by
from gangline.runs.manifest import COMMIT_FILE, PART_FILE, CheckpointPart, commit_record, describe_part
from tests.saved import place_commit
from tests.unit.runs.test_checkpoints import choose, flip, reasons, remove

HOSTS = ("pc1", "pc2")


def gang_of(*hosts, strategy="fsdp", stages=(), replicas=1):
    ranks = tuple(GangRank(host=host, share=1) for host in hosts)
    words = {"strategy": strategy, "stages": stages, "replicas": replicas}
    return Gang(run_id="calm-otter-7", attempt=1, ranks=ranks, **words)


HELD = held_by(gang_of("pc1", "pc1", "pc2"))


def write_part(checkpoints, step, host, *, attempt=1, held=HELD, hosts=HOSTS):
    folder = disk.part_folder(checkpoints, step, host)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(f"rows of {host} at step {step}".encode() * 40)
    description = {"attempt": attempt, "hosts": hosts, "num_ranks": 3, "fingerprints": {}, "held": held}
    describe_part(folder, step=step, host=host, description=description)
    return (folder / PART_FILE).read_bytes()


def save(tmp_path, step, *, commit=True, on=HOSTS, attempt=1):
    parts = {host: write_part(tmp_path / host, step, host, attempt=attempt) for host in on}
    if commit:
        for host in HOSTS:
            place_commit(tmp_path / host, commit_record(parts))


@pytest.mark.parametrize(
    ("gang", "held"),
    [
        (gang_of("pc1", "pc1", "pc2"), {"pc1": "the rows of ranks 0 to 1 of 3", "pc2": "the rows of rank 2 of 3"}),
        (gang_of("pc1", "pc1", "pc2", strategy="hsdp"), HELD),  # unlike numbers of ranks: as fsdp
        (gang_of("pc1", "pc2", strategy="hsdp"), {"pc1": "the rows of rank 0 of 2", "pc2": "the rows of rank 1 of 2"}),
        (gang_of("pc1", "pc1", "pc2", "pc2", strategy="hsdp"), {}),
        (
            gang_of("pc1", "pc1", "pc2", strategy="pipeline", stages=(3, 4, 5)),
            {"pc1": "layers 1 to 7 of 12", "pc2": "layers 8 to 12 of 12"},
        ),
        (gang_of("pc1", "pc1", "pc2", "pc2", strategy="pipeline", stages=(3, 9, 4, 8), replicas=2), {}),
        (
            gang_of("pc1", "pc2", "pc2", "pc3", strategy="pipeline", stages=(5, 7, 4, 8), replicas=2),
            {
                "pc1": "layers 1 to 5 of 12",
                "pc2": "layers 1 to 4 and 6 to 12 of 12",
                "pc3": "layers 5 to 12 of 12",
            },
        ),
        (gang_of("pc1", "pc1"), {}),
        (gang_of("pc1", "pc2", strategy="ddp"), {}),
        (gang_of("pc1", "pc2", strategy="local-sgd"), {}),
    ],
)
def test_what_every_host_holds_is_said_in_words_where_none_holds_all(gang, held):
    assert held_by(gang) == held


def test_a_step_is_chosen_once_every_part_is_whole_on_some_host(tmp_path):
    save(tmp_path, 100)
    choice = choose(tmp_path)
    assert (choice.step, choice.rejected, choice.held) == (100, (), HELD)
    assert [(source.host, source.part) for source in choice.sources] == [("pc1", "pc1"), ("pc2", "pc2")]
    disk.part_folder(tmp_path / "pc2", 100, "pc2").rename(disk.part_folder(tmp_path / "pc1", 100, "pc2"))
    choice = choose(tmp_path, ("pc1",))
    assert (choice.step, [source.part for source in choice.sources]) == (100, ["pc1", "pc2"])


def test_a_part_that_is_away_is_named_with_what_it_held_and_an_older_whole_step_is_taken(tmp_path):
    save(tmp_path, 100)
    for host in HOSTS:  # this one was saved whole on every host
        write_part(tmp_path / host, 50, host, held={})
        parts = {name: (disk.part_folder(tmp_path / name, 50, name) / PART_FILE) for name in HOSTS}
    for host in HOSTS:
        place_commit(tmp_path / host, commit_record({name: path.read_bytes() for name, path in parts.items()}))
    choice = choose(tmp_path, ("pc1",))
    assert choice.step == 50
    assert reasons(choice) == [
        "step 100 on pc2: part-pc2 was not found on any host; it held the rows of rank 2 of 3",
        "step 50 on pc2: part-pc2 was not found on any host",
    ]
    assert [each.in_parts for each in choice.rejected] == [True, False]


def test_a_damaged_part_is_lost_as_well_but_not_while_another_host_has_a_copy(tmp_path):
    save(tmp_path, 100)
    own = disk.part_folder(tmp_path / "pc2", 100, "pc2")
    copy = disk.part_folder(tmp_path / "pc1", 100, "pc2")
    copy.mkdir()
    for path in own.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    flip(own / "__0_0.distcp", 0.5)
    choice = choose(tmp_path)
    assert choice.step == 100
    assert reasons(choice) == ["step 100 on pc2: part-pc2/__0_0.distcp differs from its digest"]
    assert choice.lacks("pc2") == ("pc1", "pc2")
    remove(copy)
    choice = choose(tmp_path)
    assert (choice.step, choice.adoptable) == (None, {})
    assert reasons(choice)[-1] == "step 100 on pc2: part-pc2 is whole on no host; it held the rows of rank 2 of 3"


def test_a_step_that_nobody_committed_is_adopted_with_all_parts_and_never_with_some(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 200, commit=False)
    choice = choose(tmp_path)
    assert (choice.step, list(choice.adoptable)) == (100, [200])
    remove(disk.part_folder(tmp_path / "pc1", 200, "pc1"))
    choice = choose(tmp_path)
    assert (choice.step, choice.adoptable) == (100, {})
    assert "no part of pc1 (step 200); pc1 held the rows of ranks 0 to 1 of 3" in reasons(choice)[0]
    assert choice.rejected[0].in_parts


def test_parts_of_one_step_must_be_of_one_kind_and_one_division(tmp_path):
    first = write_part(tmp_path / "pc1", 100, "pc1")
    other = held_by(gang_of("pc1", "pc2"))
    for number, held in enumerate(({}, other)):
        second = write_part(tmp_path / str(number), 100, "pc2", held=held)
        with pytest.raises(CheckpointError, match="cannot be committed") as caught:
            commit_record({"pc1": first, "pc2": second})
        assert "not of one step, attempt and input" in caught.value.seen
    with pytest.raises(CheckpointError, match="cannot be committed"):
        commit_record({"pc1": first}, of_some=True)


@pytest.mark.parametrize(
    ("kind", "held"), [("shard", {}), ("shard", {"pc1": "all"}), ("replica", HELD), ("half", HELD)]
)
def test_a_part_that_does_not_say_what_all_parts_hold_is_refused(tmp_path, kind, held):
    part = CheckpointPart.from_bytes(write_part(tmp_path, 100, "pc1"))
    with pytest.raises(ValueError, match=r"it is of kind|it does not say what the parts of all its hosts hold"):
        CheckpointPart.from_bytes(dataclasses.replace(part, kind=kind, held=held).to_bytes())


def test_a_host_whose_ranks_hold_what_they_held_needs_its_own_part_alone(tmp_path):
    save(tmp_path, 100)
    choice = choose(tmp_path)
    again = choice.for_ranks_of(gang_of("pc1", "pc1", "pc2"))
    assert [again.lacks(host) for host in HOSTS] == [(), ()]
    swapped = choice.for_ranks_of(gang_of("pc2", "pc2", "pc1"))
    assert [swapped.lacks(host) for host in HOSTS] == [("pc2",), ("pc1",)]
    elsewhere = choice.for_ranks_of(gang_of("pc8", "pc8", "pc9"))
    assert [elsewhere.lacks(host) for host in ("pc8", "pc9")] == [("pc1",), ("pc2",)]
    for other in (gang_of("pc1", "pc2"), gang_of("pc1", "pc1", "pc2", strategy="ddp")):
        assert [choice.for_ranks_of(other).lacks(host) for host in HOSTS] == [("pc2",), ("pc1",)]


def test_of_two_parts_that_hold_the_same_one_is_enough(tmp_path):
    hosts = ("pc1", "pc2", "pc3", "pc4")
    gang = gang_of(*hosts, strategy="pipeline", stages=(7, 5, 7, 5), replicas=2)
    held = held_by(gang)
    parts = {host: write_part(tmp_path / host, 100, host, held=held, hosts=hosts) for host in hosts}
    for host in hosts:
        place_commit(tmp_path / host, commit_record(parts))
    every = choose(tmp_path, hosts)
    assert [every.for_ranks_of(gang).lacks(host) for host in hosts] == [()] * 4
    choice = choose(tmp_path, ("pc2", "pc3"))
    assert (choice.step, choice.held) == (100, {host: held[host] for host in ("pc2", "pc3")})
    assert reasons(choice) == [f"step 100 on {host}: part-{host} was not found on any host" for host in ("pc1", "pc4")]
    assert [each.in_parts for each in choice.rejected] == [False, False]
    assert choice.for_ranks_of(gang).lacks("pc1") == ("pc3",)
    assert choice.lacks("pc2") == ("pc3",)
    assert choose(tmp_path, ("pc1", "pc3")).step is None  # the last five layers are nowhere


def test_the_parts_to_load_are_all_that_lie_here_its_own_first(tmp_path):
    save(tmp_path, 100)
    disk.part_folder(tmp_path / "pc1", 100, "pc1").rename(disk.part_folder(tmp_path / "pc2", 100, "pc1"))
    assert [folder.name for folder, _ in disk.find_parts(tmp_path / "pc2", 100, host="pc2")] == ["part-pc2", "part-pc1"]
    (disk.part_folder(tmp_path / "pc2", 100, "pc1") / PART_FILE).write_bytes(b"")
    assert [folder.name for folder, _ in disk.find_parts(tmp_path / "pc2", 100, host="pc2")] == ["part-pc2"]
    (disk.step_folder(tmp_path / "pc2", 100) / COMMIT_FILE).unlink()
    with pytest.raises(CheckpointError, match="no commit record"):
        disk.find_parts(tmp_path / "pc2", 100, host="pc2")
