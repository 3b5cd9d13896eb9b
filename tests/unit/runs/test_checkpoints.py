"""Which checkpoint a run starts from, whatever happened to the files."""

import json

import pytest

from gangline.errors import CheckpointError
from gangline.runs import checkpoints as disk
from gangline.runs.manifest import COMMIT_FILE, PART_FILE, Commit, commit_record, describe_part, verify_part
from tests.saved import place_commit

HOSTS = ("pc1", "pc2")


def write_part(checkpoints, step, host, *, attempt=1, hosts=HOSTS, loss=None, fingerprint="f00d"):
    folder = disk.part_folder(checkpoints, step, host)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"tensors of step %d " % step * 40)
    (folder / ".metadata").write_bytes(b"where they lie %d" % step)
    (folder / "state.json").write_text(json.dumps({"step": step}))
    description = {"attempt": attempt, "hosts": hosts, "num_ranks": 5, "fingerprints": {"job": fingerprint}}
    describe_part(folder, step=step, host=host, description=description, evaluation_loss=loss)
    return (folder / PART_FILE).read_bytes()


def save(tmp_path, step, *, hosts=HOSTS, attempt=1, commit=True, loss=None):
    """What a save leaves on all hosts."""
    parts = {host: write_part(tmp_path / host, step, host, attempt=attempt, hosts=hosts, loss=loss) for host in hosts}
    if commit:
        for host in hosts:
            place_commit(tmp_path / host, commit_record(parts))


def choose(tmp_path, hosts=HOSTS):
    # Through JSON, as it comes over a transport.
    return disk.choose({host: json.loads(json.dumps(disk.survey(tmp_path / host))) for host in hosts})


def reasons(choice):
    return [str(rejection) for rejection in choice.rejected]


def test_a_run_without_checkpoints_starts_from_the_beginning(tmp_path):
    choice = choose(tmp_path)
    assert (choice.step, choice.rejected, choice.adoptable) == (None, (), {})


@pytest.mark.parametrize("inside", ["part-pc1.tmp", ".COMMITTED.7.tmp", None])
def test_what_the_first_save_of_a_run_left_unfinished_is_no_checkpoint(tmp_path, inside):
    folder = disk.step_folder(tmp_path / "pc1", 10)
    (folder / inside if inside else folder).mkdir(parents=True)
    choice = choose(tmp_path)
    assert (choice.step, choice.rejected, choice.adoptable) == (None, (), {})
    save(tmp_path, 5)
    assert (choose(tmp_path).step, choose(tmp_path).rejected) == (5, ())


def test_a_finished_part_that_is_damaged_or_a_lone_record_is_a_checkpoint_that_was_passed_over(tmp_path):
    write_part(tmp_path / "pc1", 10, "pc1")
    flip(disk.part_folder(tmp_path / "pc1", 10, "pc1") / "state.json", 0.5)
    save(tmp_path, 20)
    for host in HOSTS:
        remove(disk.part_folder(tmp_path / host, 20, host))
    choice = choose(tmp_path)
    assert choice.step is None
    assert {rejection.step for rejection in choice.rejected} == {10, 20}


def test_the_newest_committed_step_is_chosen_with_every_whole_part_of_it(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 200)
    choice = choose(tmp_path)
    assert choice.step == 200
    assert [(source.host, source.part) for source in choice.sources] == [("pc1", "pc1"), ("pc2", "pc2")]
    assert choice.rejected == ()
    assert choice.record == (disk.step_folder(tmp_path / "pc2", 200) / COMMIT_FILE).read_bytes()


@pytest.mark.parametrize("place", [0, 0.3, 0.7, 1])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", PART_FILE])
def test_a_flipped_byte_in_any_file_is_named_and_the_previous_checkpoint_is_used(tmp_path, name, place):
    save(tmp_path, 100, hosts=("pc1",))
    save(tmp_path, 200, hosts=("pc1",))
    flip(disk.part_folder(tmp_path / "pc1", 200, "pc1") / name, place)
    choice = choose(tmp_path, ("pc1",))
    assert choice.step == 100
    assert choice.adoptable == {}
    assert any(row.startswith(f"step 200 on pc1: part-pc1/{name} ") for row in reasons(choice))


def flip(path, place, mask=0x01):
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= mask
    path.write_bytes(data)


def test_every_single_byte_of_part_json_and_of_the_commit_record_counts(tmp_path):
    save(tmp_path, 100, hosts=("pc1",), loss=1.25)
    record = disk.step_folder(tmp_path / "pc1", 100) / COMMIT_FILE
    for place in every_flip(record):
        assert disk.read_commit(tmp_path / "pc1", 100) is None, place
    description = disk.part_folder(tmp_path / "pc1", 100, "pc1") / PART_FILE
    for place in every_flip(description):
        assert verify_part(description.parent), place


def every_flip(path):
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        yield place


def test_a_flip_that_is_no_utf8_any_more_is_survived(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 200)
    for host in HOSTS:
        flip(disk.step_folder(tmp_path / host, 200) / COMMIT_FILE, 0.5, mask=0x80)
    choice = choose(tmp_path)
    assert choice.step == 100
    assert "step 200 on pc1: COMMITTED cannot be used" in reasons(choice)[0]
    # The record is damaged and every part is whole: the checkpoint can be committed again.
    assert list(choice.adoptable) == [200]


@pytest.mark.parametrize("hashes", [True, False])
def test_a_truncated_file_is_named_even_without_reading_it(tmp_path, hashes):
    write_part(tmp_path, 100, "pc1")
    folder = disk.part_folder(tmp_path, 100, "pc1")
    path = folder / "__0_0.distcp"
    size_bytes = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    assert verify_part(folder, hashes=hashes) == [f"__0_0.distcp has {size_bytes - 1} bytes instead of {size_bytes}"]


def test_missing_and_extra_files_are_named(tmp_path):
    write_part(tmp_path, 100, "pc1")
    folder = disk.part_folder(tmp_path, 100, "pc1")
    (folder / "state.json").unlink()
    (folder / "notes.txt").write_text("mine")
    assert verify_part(folder) == ["state.json is missing", "notes.txt is not listed in part.json"]


def test_a_part_without_its_description_and_one_of_an_unknown_kind_are_refused(tmp_path):
    write_part(tmp_path, 100, "pc1")
    path = disk.part_folder(tmp_path, 100, "pc1") / PART_FILE
    data = path.read_bytes()
    path.unlink()
    assert verify_part(path.parent) == ["part.json is missing"]
    path.write_bytes(data.replace(b'"replica"', b'"shard"'))
    assert "part.json cannot be used" in verify_part(path.parent)[0]
    path.write_bytes(b"[]")
    assert "part.json cannot be used" in verify_part(path.parent)[0]


def test_one_whole_copy_is_enough_and_the_damaged_one_is_named(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 200)
    flip(disk.part_folder(tmp_path / "pc2", 200, "pc2") / "__0_0.distcp", 0.5)
    choice = choose(tmp_path)
    assert choice.step == 200
    assert [source.host for source in choice.sources] == ["pc1"]
    assert reasons(choice) == ["step 200 on pc2: part-pc2/__0_0.distcp differs from its digest"]


def test_both_copies_damaged_means_the_checkpoint_before(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 200)
    for host in HOSTS:
        flip(disk.part_folder(tmp_path / host, 200, host) / "state.json", 0.5)
    choice = choose(tmp_path)
    assert choice.step == 100
    assert len(choice.rejected) == 2
    assert choice.adoptable == {}


def test_a_missing_part_on_one_host_is_named(tmp_path):
    save(tmp_path, 100)
    remove(disk.part_folder(tmp_path / "pc1", 100, "pc1"))
    choice = choose(tmp_path)
    assert choice.step == 100
    assert reasons(choice) == ["step 100 on pc1: part-pc1 was not found on any host"]


def remove(folder):
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_the_record_on_one_host_only_is_enough(tmp_path):
    save(tmp_path, 100)
    (disk.step_folder(tmp_path / "pc1", 100) / COMMIT_FILE).unlink()
    choice = choose(tmp_path)
    assert choice.step == 100
    assert [source.host for source in choice.sources] == ["pc1", "pc2"]


def test_the_record_on_one_host_and_a_part_on_another_make_a_checkpoint(tmp_path):
    save(tmp_path, 100)
    (disk.step_folder(tmp_path / "pc1", 100) / COMMIT_FILE).unlink()
    remove(disk.part_folder(tmp_path / "pc2", 100, "pc2"))
    choice = choose(tmp_path)
    assert choice.step == 100
    assert [(source.host, source.part) for source in choice.sources] == [("pc1", "pc1")]


def test_a_host_that_is_away_does_not_hide_what_the_other_has(tmp_path):
    save(tmp_path, 100)
    assert choose(tmp_path, ("pc2",)).step == 100


def test_without_any_record_whole_parts_of_all_hosts_can_be_adopted(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 200, commit=False)
    choice = choose(tmp_path)
    assert choice.step == 100
    assert list(choice.adoptable) == [200]
    for host in HOSTS:
        place_commit(tmp_path / host, choice.adoptable[200])
    assert choose(tmp_path).step == 200


def test_a_step_that_one_host_did_not_finish_is_adopted_from_the_other(tmp_path):
    save(tmp_path, 100)
    write_part(tmp_path / "pc1", 200, "pc1")
    half = disk.part_folder(tmp_path / "pc2", 200, "pc2").with_name("part-pc2.tmp")
    half.mkdir(parents=True)
    choice = choose(tmp_path)
    assert (choice.step, list(choice.adoptable)) == (100, [200])
    place_commit(tmp_path / "pc1", choice.adoptable[200])
    again = choose(tmp_path)
    assert (again.step, [(source.host, source.part) for source in again.sources]) == (200, [("pc1", "pc1")])


def test_an_older_step_is_never_adopted_over_a_newer_commit(tmp_path):
    save(tmp_path, 100, commit=False)
    save(tmp_path, 200)
    choice = choose(tmp_path)
    assert (choice.step, choice.adoptable) == (200, {})


def test_parts_of_two_attempts_do_not_make_one_checkpoint(tmp_path):
    write_part(tmp_path / "pc1", 100, "pc1", attempt=1)
    write_part(tmp_path / "pc2", 100, "pc2", attempt=2)
    (record,) = choose(tmp_path).adoptable.values()
    commit = Commit.from_bytes(record)
    assert (commit.attempt, list(commit.parts)) == (2, ["pc2"])
    with pytest.raises(CheckpointError, match="cannot be committed") as caught:
        commit_record({host: part_bytes(tmp_path / host, 100, host) for host in HOSTS})
    assert "not of one step, attempt and input" in caught.value.seen
    assert caught.value.fix


def part_bytes(checkpoints, step, host):
    return (disk.part_folder(checkpoints, step, host) / PART_FILE).read_bytes()


def test_the_commit_of_an_older_attempt_does_not_vouch_for_the_parts_of_a_newer_one(tmp_path):
    save(tmp_path, 50)
    save(tmp_path, 100, attempt=1)
    for host in HOSTS:
        remove(disk.part_folder(tmp_path / host, 100, host))
    write_part(tmp_path / "pc1", 100, "pc1", attempt=2)
    choice = choose(tmp_path)
    assert choice.step == 50
    assert any("part.json is not the one of the commit record (attempt 1)" in row for row in reasons(choice))
    assert Commit.from_bytes(choice.adoptable[100]).attempt == 2


def test_of_two_records_of_one_step_the_newer_attempt_counts(tmp_path):
    save(tmp_path, 100, attempt=1)
    old = (disk.step_folder(tmp_path / "pc1", 100) / COMMIT_FILE).read_bytes()
    for host in HOSTS:
        remove(disk.part_folder(tmp_path / host, 100, host))
    save(tmp_path, 100, attempt=2)
    (disk.step_folder(tmp_path / "pc1", 100) / COMMIT_FILE).write_bytes(old)
    choice = choose(tmp_path)
    assert choice.step == 100
    assert len(choice.sources) == 2
    assert choice.record == (disk.step_folder(tmp_path / "pc2", 100) / COMMIT_FILE).read_bytes()


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"step": 200}, "not of one step"),
        ({"attempt": 2}, "not of one step"),
        ({"fingerprint": "beef"}, "not of one step"),
        ({"hosts": ("pc1", "pc2", "pc3")}, "not of one step"),
    ],
)
def test_parts_that_do_not_belong_together_are_not_committed(tmp_path, change, seen):
    first = write_part(tmp_path / "pc1", 100, "pc1")
    second = write_part(tmp_path / "pc2", **{"step": 100, "host": "pc2", **change})
    with pytest.raises(CheckpointError) as caught:
        commit_record({"pc1": first, "pc2": second})
    assert seen in caught.value.seen


def test_a_commit_needs_every_host_of_the_attempt_under_its_own_name(tmp_path):
    first = write_part(tmp_path, 100, "pc1")
    for parts, seen in [
        ({"pc1": first}, "no part of pc2"),
        ({"pc2": first}, "written by pc1"),
        ({}, "no host has a part"),
        ({"pc1": first[:-9]}, "cannot be used"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            commit_record(parts)
        assert seen in caught.value.seen


def test_a_record_of_another_step_in_a_step_folder_is_refused(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 200, commit=False)
    record = (disk.step_folder(tmp_path / "pc1", 100) / COMMIT_FILE).read_bytes()
    (disk.step_folder(tmp_path / "pc1", 200) / COMMIT_FILE).write_bytes(record)
    choice = choose(tmp_path)
    assert choice.step == 100
    assert "it is the record of step 100" in reasons(choice)[0]
    assert disk.read_commit(tmp_path / "pc1", 200) is None


def test_the_part_to_load_is_the_own_one_or_else_one_that_was_brought_here(tmp_path):
    save(tmp_path, 100)
    assert disk.find_parts(tmp_path / "pc1", 100, host="pc1")[0][0].name == "part-pc1"
    own = disk.part_folder(tmp_path / "pc1", 100, "pc1")
    own.rename(own.with_name("part-pc1.tmp"))
    with pytest.raises(CheckpointError, match="no part here is the one that was committed"):
        disk.find_parts(tmp_path / "pc1", 100, host="pc1")
    disk.part_folder(tmp_path / "pc2", 100, "pc2").rename(own.with_name("part-pc2"))
    assert disk.find_parts(tmp_path / "pc1", 100, host="pc1")[0][0].name == "part-pc2"
    with pytest.raises(CheckpointError, match="no commit record"):
        disk.find_parts(tmp_path / "pc1", 300, host="pc1")


def test_a_host_tells_what_it_has_as_json_on_stdout(tmp_path, capsys):
    def said(*words):
        assert disk.main(["survey", str(tmp_path / "pc1"), *words]) == 0
        return json.loads(capsys.readouterr().out)

    save(tmp_path, 100)
    flip(disk.part_folder(tmp_path / "pc1", 100, "pc1") / "__0_0.distcp", 0.5)
    quick, full = said(), said("--verify")
    assert quick[0]["parts"][0]["problems"] == []
    assert full[0]["parts"][0]["problems"] == ["__0_0.distcp differs from its digest"]
    assert full == disk.survey(tmp_path / "pc1")
    assert said("--verify-newest") == full
    save(tmp_path, 200)
    assert [entry["parts"][0]["problems"] for entry in said("--verify-newest")] == [[], []]
    assert disk.main(["survey"]) == 2


def test_what_is_not_a_step_is_not_looked_at(tmp_path):
    save(tmp_path, 100)
    for name in (".trash-step-00000300", "step-latest", "step_400"):
        (tmp_path / "pc1" / name).mkdir()
    assert disk.saved_steps(tmp_path / "pc1") == [100]
