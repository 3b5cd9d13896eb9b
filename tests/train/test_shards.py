"""Checkpoints in parts: every host writes what its ranks hold, and a run goes on from all of them, on whatever ranks."""

import math
import pickle
import shutil

import pytest

from gangline.runs import checkpoints as disk
from gangline.runs.manifest import COMMIT_FILE
from tests.train import cases_shards
from tests.train.test_resume import run

pytestmark = pytest.mark.rotating

HOSTS = ["pc0", "pc0", "pc1"]
IN_PARTS = {"each_host": "part", "disks": True}
MIB = 1 << 20
LOT = 32 * MIB
ALL = ("pc0", "pc1", "pc2", "pc3")


def test_on_the_same_ranks_it_goes_on_bit_equal_and_every_number_lies_on_one_host(pool, tmp_path):
    words = {"strategy": "fsdp", "hosts": HOSTS, "job": {"precision": "fp32"}, "steps": 12}
    whole = run(pool, tmp_path / "whole", [5, 3, 2], **words)
    first = run(pool, tmp_path / "cut", [5, 3, 2], **words, **IN_PARTS, stop_after=5)
    assert disk.part_folders(disk.step_folder(tmp_path / "cut" / "pc0", 5))[1:] == []
    sizes = {host: num_numbers(tmp_path / "cut" / host, 5, host) for host in ("pc0", "pc1")}
    of_whole = num_numbers(tmp_path / "whole", 12, "pc0")
    steps = len([name for name in first[0]["state"] if name.endswith(".step")])
    assert sum(sizes.values()) == of_whole + steps  # every rank counts AdamW's steps, so both hosts write them
    assert sizes["pc0"] == pytest.approx(2 * of_whole / 3, rel=0.05)
    second = run(pool, tmp_path / "cut", [5, 3, 2], **words, **IN_PARTS, resume_step=5)
    for rank in range(3):
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
        assert second[rank]["digest"] == whole[rank]["digest"]


def num_numbers(checkpoints, step, host):
    """How many numbers a part holds."""
    metadata = pickle.loads((disk.part_folder(checkpoints, step, host) / ".metadata").read_bytes())
    return sum(math.prod(chunk.sizes) for item in metadata.state_dict_metadata.values() for chunk in item.chunks)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fsdp", [5, 3, 2], HOSTS), [("fsdp", [7, 3], None), ("fsdp", [1, 2, 3, 4], None), ("ddp", [5, 5], None)]),
        (
            ("pipeline", [1, 2, 1], HOSTS),
            [("fsdp", [5, 5], None), ("pipeline", [3, 1], None), ("hsdp", [3, 2, 3, 2], None)],
        ),
        (("ddp", [5, 5], None), [("fsdp", [5, 3, 2], HOSTS)]),
        (("pipeline", [1, 3, 4], ["pc0", "pc1", "pc1"], (7, 3)), [("ddp", [5, 5], None)]),
    ],
    ids=["fsdp", "pipeline", "whole", "pipelines"],
)
def test_other_ranks_under_any_strategy_read_the_same_bits_from_all_parts(pool, tmp_path, before, after):
    job = {"precision": "fp64", "dropout": 0.0, "layers": 4}
    strategy, shares, hosts, *rows = before
    words = {"strategy": strategy, "hosts": hosts, "rows": rows[0] if rows else (10,)}
    first = run(pool, tmp_path, shares, **words, job=job, steps=12, stop_after=3, **IN_PARTS)
    expected = first[0]["state"]
    assert len(expected) > 4 * 9 * 3
    here = ("pc0", "pc1")
    for gang in (before, *after):
        if gang != before:
            bring_all(tmp_path, 3, here)
        strategy, shares, hosts, *rows = gang
        ask = {"folder": str(tmp_path), "strategy": strategy, "shares": shares, "hosts": hosts, "step": 3, "job": job}
        ask["rows"] = rows[0] if rows else (10,)
        for result in pool(len(shares)).run(cases_shards.state, **ask):
            assert result["error"] == ""
            assert result["step"] == 3
            assert result["digests"] == expected


def test_experts_that_were_cut_along_one_dimension_are_read_along_another(pool, tmp_path):
    job = {"precision": "fp32", "dropout": 0.0, "mixture": True}
    first = run(pool, tmp_path, [5, 3, 2], strategy="fsdp", hosts=HOSTS, job=job, steps=12, stop_after=3, **IN_PARTS)
    bring_all(tmp_path, 3, ("pc0", "pc1"))
    for strategy, shares in (("fsdp", [7, 3]), ("ddp", [5, 3, 2])):
        ask = {"folder": str(tmp_path), "strategy": strategy, "shares": shares, "hosts": None, "step": 3, "job": job}
        for result in pool(len(shares)).run(cases_shards.state, **ask):
            assert (result["error"], result["digests"]) == ("", first[0]["state"])


def test_a_rank_that_reads_what_another_part_holds_says_which_is_not_there(pool, tmp_path):
    job = {"precision": "fp64", "dropout": 0.0}
    run(pool, tmp_path, [5, 3, 2], strategy="fsdp", hosts=HOSTS, job=job, steps=12, stop_after=3, **IN_PARTS)
    ask = {"folder": str(tmp_path), "strategy": "fsdp", "shares": [5, 5], "step": 3, "job": job}
    first, second = pool(2).run(cases_shards.state, hosts=["pc0", "pc1"], alone=True, **ask)
    assert first["error"] == ""  # the rows of rank 0 of 2 are among those of ranks 0 and 1 of 3
    assert "lacks what this rank reads" in second["error"]
    assert "part-pc0 is not here, which holds the rows of ranks 0 to 1 of 3" in second["error"]


def test_a_save_takes_the_memory_of_the_hosts_own_part(pool, tmp_path):
    part, whole = (memory(pool, tmp_path / each, each) for each in ("part", "whole"))
    state = whole[0]["whole"]
    assert state > 80 * MIB
    host = [part[0]["own"] + part[1]["own"], 0, part[2]["own"]]  # two ranks of one host, of which the first saves
    for rank in range(3):
        on_its_way = LOT if rank < 2 else 0
        assert part[rank]["peak"] <= host[rank] + on_its_way + 16 * MIB, rank
    assert min(whole[rank]["peak"] for rank in (0, 2)) >= 2 * state  # all of it, and the copy that is written


def memory(pool, folder, each_host):
    return pool(3).run(cases_shards.memory_of_a_save, folder=str(folder), each_host=each_host)


def bring_all(folder, step, hosts):
    """Every part to every host, as files."""
    for source in hosts:
        own = disk.part_folder(folder / source, step, source)
        for target in set(ALL) - {source}:
            copy = disk.part_folder(folder / target, step, source)
            if not copy.exists():
                shutil.copytree(own, copy)
            shutil.copy(own.parent / COMMIT_FILE, copy.parent / COMMIT_FILE)
