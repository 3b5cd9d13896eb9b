"""What lines around a failure add to it, and rows that are consequences of others."""

from __future__ import annotations

import pytest

from gangline.diagnose.corpus import known_failures
from gangline.diagnose.log_context import ranks_apart, too_high_rate, view_of_a_part, zero_rate
from gangline.diagnose.log_search import LogSearch, Sighting

WAITED = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete"
)


def found_in(text: str) -> list[Sighting]:
    search = LogSearch()
    search.feed(text.encode())
    return search.finish()


def waits(rank: int, line: int, code: str) -> str:
    """The traceback of a rank that waited in vain in a line of its script."""
    lines = (
        "Traceback (most recent call last):",
        f'  File "/home/user/llm/train.py", line {line}, in main',
        f"    {code}",
        '  File "/home/user/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in f',
        "    work.wait()",
        WAITED,
    )
    return "".join(f"[rank{rank}]: {each}\n" for each in lines)


def test_ranks_that_waited_at_different_places_are_named_with_them() -> None:
    first = found_in(waits(1, 30, "loss = model(x)") + waits(0, 38, "dist.all_reduce(avg)"))[0]
    assert first.id == "waited"
    assert (
        "rank 0 at train.py line 38: dist.all_reduce(avg), rank 1 at train.py line 30: loss = model(x)" in first.means
    )
    assert "if rank == 0" in first.fix


def test_the_last_words_of_a_rank_that_did_not_come_are_told() -> None:
    first = found_in("[18:06:18][rank0] running validation ...\n" + waits(1, 43, "loss.backward()"))[0]
    assert "rank 1 waited at train.py line 43: loss.backward(), where rank 0 did not come" in first.means
    assert "'running validation ...'" in first.means


def test_ranks_at_one_place_are_not_apart() -> None:
    plain = known_failures()["waited"].means
    assert found_in(waits(0, 30, "loss = model(x)") + waits(1, 30, "loss = model(x)"))[0].means == plain
    assert ranks_apart({"0": "a line 1"}, None) == ""
    assert ranks_apart({"0": "a line 1", "1": "a line 1"}, ("2", "x")) == ""


def test_where_an_error_of_its_own_is_told_waiting_ranks_say_nothing_more() -> None:
    text = "[rank2]: ModuleNotFoundError: No module named 'peft'\n" + waits(0, 30, "a()") + waits(1, 31, "b()")
    assert [(each.id, each.means) for each in found_in(text)][1:] == [("waited", known_failures()["waited"].means)]


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("shape '[16, 64, 4, 16]' is invalid for input of size 32768", True),
        ("shape '[16, 64, 4, 16]' is invalid for input of size 65530", False),
        ("shape '[16, -1, 4, 16]' is invalid for input of size 32768", False),
        ("shape '[16, 0]' is invalid for input of size 32768", False),
        ("shape '[16, 64]' is invalid for input of size 0", False),
        ("no shape", False),
    ],
)
def test_a_view_of_a_part_is_told_by_its_numbers(text: str, is_told: bool) -> None:
    assert ("the view wants 2 times as many" in view_of_a_part(text)) is is_told


def test_a_learning_rate_is_far_too_high_above_one() -> None:
    assert too_high_rate([b"config: {'lr': 30.0, 'momentum': 0.9}"]) == "30.0"
    assert too_high_rate([b"step 3 | lr 3.00e+01"]) == "3.00e+01"
    assert too_high_rate([b"lr 30.0", b"lr 3e-4"]) == ""
    assert too_high_rate([b"clr 30.0", b"no rate"]) == ""
    nan = found_in("config: {'lr': 30.0}\nstep 0 | loss 6.3\nstep 3 | loss nan\n")[0]
    assert (nan.id, "learning rate of 30.0" in nan.means) == ("loss-nan", True)


def test_a_rate_that_was_rounded_to_zero_is_not_zero() -> None:
    assert zero_rate(["loss 6.4 | lr 0.00e+00"] * 4) == "the learning rate is 0 in the last 4 lines that tell it"
    assert zero_rate(["loss 6.4 | lr 0.0000"] * 4) == ""
    assert zero_rate(["loss 6.4 | lr 0.00e+00"] * 3) == ""
    assert zero_rate(["loss 6.4 | lr 0.00e+00"] * 4 + ["lr 1e-5"]) == ""


def test_a_missing_file_is_told_before_the_launcher_that_ended_for_it() -> None:
    text = "rank 1: data/shard-1.bin: No such file or directory\nMPI_ABORT was invoked on rank 1 in communicator\n"
    first, second = found_in(text)
    assert (first.id, second.id) == ("error-file", "mpi-one-failed")
    assert "data/shard-1.bin" in first.means


def test_a_consequence_is_told_after_what_explains_it() -> None:
    proxy = 'File "/env/httpcore/_sync/http_proxy.py", line 279, in f\n    x()\nhttpcore.ConnectError: [Errno 111] Connection refused\n'
    last = "huggingface_hub.errors.LocalEntryNotFoundError: Got: ConnectError: [Errno 111] Connection refused\n"
    assert [(each.id, each.level) for each in found_in(proxy + last)] == [
        ("hub-proxy-refused", "cause"),
        ("hub-offline", "echo"),
    ]
    assert [each.level for each in found_in(last)] == ["cause"]


def test_a_host_key_that_has_changed_is_not_told_as_one_that_is_not_known() -> None:
    refused = "Host key verification failed.\n"
    changed = (
        "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key for pc2 has changed and you have\n" + refused
    )
    assert [each.id for each in found_in(changed) if each.level == "cause"] == ["host-key"]
    assert [each.id for each in found_in(refused)] == ["host-key-refused"]


def test_ranks_that_lost_a_connection_may_stand_anywhere() -> None:
    lost = waits(0, 30, "a()").replace(WAITED, "RuntimeError: Connection closed by peer [10.0.0.2]:18664")
    first = found_in(lost + waits(1, 31, "b()"))[0]
    assert (first.id, first.means) == ("reset", known_failures()["reset"].means)


def test_rows_that_a_row_explains_exist_and_are_others() -> None:
    known = known_failures()
    wrong = {name: row.explains for name, row in known.items() if name in row.explains or set(row.explains) - {*known}}
    assert wrong == {}
    assert sum(bool(row.explains) for row in known.values()) > 10
