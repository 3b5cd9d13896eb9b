"""Going on below damaged steps: they are out of the way on every host before the run starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gangline.errors import CheckpointError, HostUnreachable
from gangline.provision.checkpoint_sources import CheckpointHost, Places, bring, find_checkpoint, rejected_error
from gangline.provision.trees import host_layout
from gangline.runs import checkpoints as disk
from gangline.runs.checkpoints import prune
from gangline.runs.cluster import Host
from gangline.runs.gang import Gang, GangRank
from gangline.runs.manifest import PART_FILE, commit_record, describe_part
from gangline.transport.local import LocalTransport
from gangline.transport.transport import CommandResult
from tests.saved import place_commit

RUN = "calm-otter-7"
NAMES = ("pc1", "pc2")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Two hosts."""
    hosts = [Host(name=name, workdir=str(tmp_path / name), python=sys.executable) for name in NAMES]
    return {host.name: CheckpointHost(host=host, transport=LocalTransport(host)) for host in hosts}


def save(places: Places, step: int, *, damaged: bool = False, held: dict[str, str] | None = None) -> None:
    """held: what the part of each holds; None: all of them everything."""
    parts = {}
    for name, place in places.items():
        folder = disk.part_folder(place.checkpoints(RUN), step, name)
        folder.mkdir(parents=True)
        (folder / "weights").write_text(f"step {step}{f' of {name}' if held else ''}", encoding="utf-8")
        description = {"attempt": 1, "hosts": NAMES, "num_ranks": 2, "fingerprints": {}, "held": held or {}}
        describe_part(folder, step=step, host=name, description=description)
        parts[name] = (folder / PART_FILE).read_bytes()
    for name, place in places.items():
        place_commit(place.checkpoints(RUN), commit_record(parts))
        if damaged:
            (disk.part_folder(place.checkpoints(RUN), step, name) / "weights").write_text(f"STEP {step}")


def go_on(places: Places) -> int | None:
    choice = find_checkpoint(places, RUN)
    bring(places, RUN, choice, targets=NAMES)
    return choice.step


def test_the_first_save_after_damaged_steps_leaves_the_step_that_the_run_went_on_from(places: Places) -> None:
    save(places, 130)
    for step in (140, 150):
        save(places, step, damaged=True)
    assert go_on(places) == 130
    for place in places.values():
        assert disk.saved_steps(place.checkpoints(RUN)) == [130]
        prune(place.checkpoints(RUN), keep_last=2, keep_best=True, writing=frozenset({133}))
    assert find_checkpoint(places, RUN).step == 130


def test_nothing_is_moved_where_nothing_newer_was_passed_over(places: Places) -> None:
    save(places, 130)
    save(places, 140)
    (disk.part_folder(places["pc2"].checkpoints(RUN), 140, "pc2") / "weights").write_text("damaged")
    assert go_on(places) == 140
    assert [disk.saved_steps(place.checkpoints(RUN)) for place in places.values()] == [[130, 140], [130, 140]]


class AwayTransport(LocalTransport):
    """A host that is switched off."""

    def run(self, *_words: object, **_options: object) -> CommandResult:
        """See `Transport.run`."""
        raise HostUnreachable(f"{self.host} does not answer")


def test_a_place_of_the_past_that_is_away_does_not_keep_the_run_from_going_on(places: Places, tmp_path: Path) -> None:
    save(places, 130)
    save(places, 140, damaged=True)
    host = Host(name="old", workdir=str(tmp_path / "old"), python=sys.executable)
    assert go_on({**places, "old": CheckpointHost(host=host, transport=AwayTransport(host))}) == 130


def test_a_host_on_which_steps_cannot_be_moved_is_named(places: Places) -> None:
    save(places, 130)
    save(places, 140, damaged=True)
    choice = find_checkpoint(places, RUN)
    (host_layout(places["pc2"].host, RUN).checkpoints / "aside-00000130-step-00000140").write_text("in the way")
    with pytest.raises(CheckpointError, match="pc2: checkpoints newer than step 130 cannot be moved aside"):
        bring(places, RUN, choice, targets=NAMES)


def test_a_part_is_brought_from_the_host_that_has_it_to_those_that_lack_it(tmp_path: Path) -> None:
    hosts = [Host(name=name, workdir=str(tmp_path / name), python=sys.executable, transport="ssh") for name in NAMES]
    places = {host.name: CheckpointHost(host=host, transport=LocalTransport(host)) for host in hosts}
    save(places, 130)
    part = disk.part_folder(places["pc1"].checkpoints(RUN), 130, "pc1")
    (part / "weights").write_text("damaged")
    assert go_on(places) == 130
    brought = disk.part_folder(places["pc1"].checkpoints(RUN), 130, "pc2")
    assert (brought / "weights").read_text() == "step 130"
    assert disk.find_parts(places["pc1"].checkpoints(RUN), 130, host="pc1")[0][0] == brought


def test_an_older_step_is_hashed_before_a_run_goes_on_from_it(places: Places) -> None:
    save(places, 130)
    (disk.part_folder(places["pc1"].checkpoints(RUN), 130, "pc1") / "weights").write_text("stoP 130")
    save(places, 140, damaged=True)
    choice = find_checkpoint(places, RUN)
    assert choice.step == 130
    assert [source.host for source in choice.sources] == ["pc2"]


def test_a_host_may_get_the_record_only(places: Places) -> None:
    save(places, 130)
    (disk.part_folder(places["pc1"].checkpoints(RUN), 130, "pc1") / "weights").unlink()
    choice = find_checkpoint(places, RUN)
    assert bring(places, RUN, choice, targets=NAMES, bare=["pc1"]) == []
    assert disk.read_commit(places["pc1"].checkpoints(RUN), 130) is not None
    assert bring(places, RUN, choice, targets=NAMES) == ["pc1"]


HELD = {"pc1": "the rows of rank 0 of 2", "pc2": "the rows of rank 1 of 2"}


def parts_of(place: CheckpointHost, step: int) -> dict[str, str]:
    folder = disk.step_folder(place.checkpoints(RUN), step)
    return {path.name: (path / "weights").read_text() for path in disk.part_folders(folder)}


def test_every_host_gets_the_parts_that_its_ranks_read_and_no_others(tmp_path: Path) -> None:
    hosts = [Host(name=name, workdir=str(tmp_path / name), python=sys.executable, transport="ssh") for name in NAMES]
    places = {host.name: CheckpointHost(host=host, transport=LocalTransport(host)) for host in hosts}
    save(places, 130, held=HELD)
    choice = find_checkpoint(places, RUN)
    same = Gang(run_id=RUN, attempt=2, ranks=tuple(GangRank(host=name, share=1) for name in NAMES), strategy="fsdp")
    assert bring(places, RUN, choice.for_ranks_of(same), targets=NAMES) == []
    assert parts_of(places["pc1"], 130) == {"part-pc1": "step 130 of pc1"}
    assert bring(places, RUN, choice, targets=NAMES) == ["pc1", "pc2"]
    for place in places.values():
        assert parts_of(place, 130) == {"part-pc1": "step 130 of pc1", "part-pc2": "step 130 of pc2"}
        assert (
            disk.find_parts(place.checkpoints(RUN), 130, host=place.host.name)[0][0].name == f"part-{place.host.name}"
        )
    assert bring(places, RUN, find_checkpoint(places, RUN), targets=NAMES) == []


def test_a_damaged_part_is_replaced_by_a_copy_that_lies_elsewhere(tmp_path: Path) -> None:
    hosts = [Host(name=name, workdir=str(tmp_path / name), python=sys.executable, transport="ssh") for name in NAMES]
    places = {host.name: CheckpointHost(host=host, transport=LocalTransport(host)) for host in hosts}
    save(places, 130, held=HELD)
    bring(places, RUN, find_checkpoint(places, RUN), targets=NAMES)
    (disk.part_folder(places["pc2"].checkpoints(RUN), 130, "pc2") / "weights").write_text("STEP 130 of pc2")
    assert bring(places, RUN, find_checkpoint(places, RUN), targets=NAMES) == ["pc2"]
    assert parts_of(places["pc2"], 130) == {"part-pc1": "step 130 of pc1", "part-pc2": "step 130 of pc2"}


def test_on_a_disk_that_hosts_share_nothing_is_moved(tmp_path: Path) -> None:
    hosts = [Host(name=name, workdir=str(tmp_path / "shared"), python=sys.executable) for name in NAMES]
    places = {host.name: CheckpointHost(host=host, transport=LocalTransport(host)) for host in hosts}
    save(places, 130, held=HELD)
    assert bring(places, RUN, find_checkpoint(places, RUN), targets=NAMES) == []


def test_where_a_part_is_lost_it_is_said_what_can_be_done(places: Places) -> None:
    save(places, 130, held=HELD)
    choice = find_checkpoint({"pc1": places["pc1"]}, RUN)
    assert choice.step is None
    error = rejected_error(RUN, choice)
    assert error.what == f"no checkpoint of {RUN} can be used without pc2: they lie in parts, one on each host"
    assert "part-pc2 was not found on any host; it held the rows of rank 1 of 2" in error.seen
    assert "bring that host or disk back, or put its part-<host> beside the others, into" in error.fix
    assert f"runs/{RUN}/checkpoints/step-<number>" in error.fix
    assert error.exit_code == 5
