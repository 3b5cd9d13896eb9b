"""Where a process of a host finds its place in an attempt."""

import pytest

from gangline.runs.files import write_json
from gangline.runs.gang import Gang, GangRank
from gangline.worker.prefork import first_position, read_position

TOLD = {
    "words": ["train", "job.json", "gang.json", "root"],
    "ranks": [3, 4],
    "world_size": 6,
    "meet": ["10.0.0.7", 29501],
    "files": "attempts/2",
}


@pytest.fixture
def second_of_its_host(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")


def test_a_position_says_which_rank_this_process_is_and_where_all_meet(tmp_path, second_of_its_host):
    write_json(tmp_path / "position-2.json", TOLD)
    position = read_position(tmp_path, 2)
    assert (position.number, position.rank, str(position.files)) == (2, 4, "attempts/2")
    assert position.words == ("train", "job.json", "gang.json", "root")
    assert position.environment == {
        "RANK": "4",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "29501",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def test_there_is_no_position_before_the_host_agent_gives_one(tmp_path):
    assert read_position(tmp_path, 2) is None


def test_torchrun_tells_the_first_where_the_host_agent_does_not(tmp_path, second_of_its_host):
    gang = tmp_path / "gang.json"
    Gang(run_id="calm-otter-7", attempt=1, ranks=(GangRank(host="pc1", share=1),) * 2).save(gang)
    words = ("train", "job.json", str(gang), str(tmp_path))
    position = first_position(tmp_path, words)
    assert (position.number, position.rank, position.words, position.environment) == (1, 1, words, {})
    assert position.files == tmp_path / "runs" / "calm-otter-7" / "attempts" / "1"
    write_json(tmp_path / "position-1.json", TOLD)
    assert first_position(tmp_path, words).rank == 4
