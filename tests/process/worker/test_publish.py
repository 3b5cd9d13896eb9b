"""The worker that publishes, against a stand-in for the hub: what is sent, what is sent again, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gangline.worker.publish import wait_s, with_license
from tests.fakes.model_hub import Fault, Hub, Repository

SIZES = {"a.safetensors": 70_000, "b.safetensors": 50_000}
UPLOAD = r"PUT /(objects|parts)/"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "export"
    made.mkdir()
    note = {"run": "calm-otter-7", "step": 3, "base_model": "/home/alice/llama", "method": "lora", "merged": True}
    (made / "gangline.json").write_text(json.dumps(note))
    (made / "README.md").write_text('---\nlibrary_name: "transformers"\n---\n\n# Tea\n')
    for number, (name, size) in enumerate(SIZES.items()):
        (made / name).write_bytes(bytes([number]) * size)
    return made


def publish(hub: Hub, tmp_path: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "gangline.worker", "publish", "--to", "tea/kettle", *words]
    env = {**os.environ, **hub.variables(tmp_path / "cache"), **variables}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)


def last(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (answer["kind"] == "result") == (done.returncode == 0), done.stderr
    return answer


@pytest.mark.parametrize("part_bytes", [0, 30_000])
def test_all_files_come_in_one_commit_and_a_second_call_sends_nothing(
    hub: Hub, tmp_path: Path, folder: Path, part_bytes: int
) -> None:
    hub.part_bytes = part_bytes
    done = last(publish(hub, tmp_path, str(folder), "--license=mit", "--private"))
    kettle = hub.repositories["tea/kettle"]
    assert kettle.commits == [["README.md", *SIZES, "gangline.json"]]
    assert kettle.private
    assert {name: len(kettle.files[name]) for name in SIZES} == SIZES
    assert b'license: "mit"' in kettle.files["README.md"]
    assert json.loads(kettle.files["gangline.json"])["base_model"] == "llama"  # no folder of this computer
    assert done["num_bytes"] == sum(map(len, kettle.files.values())) - len(kettle.files[".gitattributes"])
    last(publish(hub, tmp_path, str(folder), "--license=mit", "--private"))
    assert len(hub.received) == 2
    assert len(kettle.commits) == 1


def test_who_makes_new_repositories_private_is_not_overruled(hub: Hub, tmp_path: Path, folder: Path) -> None:
    hub.makes_private = True
    last(publish(hub, tmp_path, str(folder)))
    assert hub.repositories["tea/kettle"].private


def test_a_push_that_was_killed_goes_on_with_what_is_missing(hub: Hub, tmp_path: Path, folder: Path) -> None:
    second = sorted(SIZES)[1]
    hub.hold = r"commit/main"
    argv = [sys.executable, "-m", "gangline.worker", "publish", "--to", "tea/kettle", str(folder)]
    env = {**os.environ, **hub.variables(tmp_path / "cache")}
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
        assert hub.held.wait(200)
        client.send_signal(signal.SIGKILL)
    assert hub.repositories["tea/kettle"].commits == []  # nothing half is to be seen
    hub.hold = ""
    (folder / second).write_bytes(b"\2" * SIZES[second])  # one file is another now
    last(publish(hub, tmp_path, str(folder)))
    assert len(hub.received) == 3  # two before, and the other one: the first was not sent again
    assert len(set(hub.received)) == 3
    assert hub.repositories["tea/kettle"].files[second] == b"\2" * SIZES[second]


def test_what_fails_at_the_second_file_is_no_reason_to_send_the_first_again(
    hub: Hub, tmp_path: Path, folder: Path
) -> None:
    hub.faults.append(Fault(UPLOAD, status=400, skip=1, body="cut"))
    error = last(publish(hub, tmp_path, str(folder)))
    assert error["what"] == "--push tea/kettle: the hub refused a call"
    assert "canary-signature" not in json.dumps(error)
    hub.faults.append(Fault(UPLOAD, status=0))  # and a cut one is tried again by the library itself
    last(publish(hub, tmp_path, str(folder)))
    assert len(hub.received) == len(set(hub.received)) == 2
    assert len(hub.repositories["tea/kettle"].commits) == 1


def test_a_busy_hub_is_asked_again_after_the_time_that_it_says(hub: Hub, tmp_path: Path, folder: Path) -> None:
    hub.faults.extend(
        [
            Fault(r"repos/create", status=429, headers={"Retry-After": "0"}),
            Fault(r"commit/main", status=503, headers={"Retry-After": "0"}, times=2),
        ]
    )
    last(publish(hub, tmp_path, str(folder)))
    assert sum("commit/main" in each for each in hub.requests) == 3
    assert len(hub.repositories["tea/kettle"].commits) == 1


@pytest.mark.parametrize(
    ("match", "status", "kind", "words"),
    [
        ("repos/create", 403, "UsageError", "the hub refuses it"),
        ("objects/batch", 413, "RunFailed", "the hub has no room for it"),
        ("commit/main", 507, "RunFailed", "the hub has no room for it"),
        ("commit/main", 500, "HostUnreachable", "the hub is busy or broken"),
    ],
)
def test_what_a_hub_refuses_is_said_in_three_parts_without_the_token(
    hub: Hub, tmp_path: Path, folder: Path, match: str, status: int, kind: str, words: str
) -> None:
    body = json.dumps({"error": f"no, {hub.token}"})
    hub.faults.append(Fault(match, status=status, times=9, headers={"Retry-After": "0"}, body=body))
    done = publish(hub, tmp_path, str(folder))
    error = last(done)
    assert (error["error_kind"], error["what"]) == (kind, f"--push tea/kettle: {words}")
    assert str(status) in error["seen"]
    assert error["fix"]
    assert hub.token not in done.stdout + done.stderr
    assert hub.repositories.get("tea/kettle", Repository()).commits == []


def test_a_look_says_what_is_there_and_changes_nothing(hub: Hub, tmp_path: Path) -> None:
    note = b'{"run": "calm-otter-7", "merged": true}'
    hub.repositories["tea/kettle"] = Repository(files={".gitattributes": b"", "gangline.json": note, "x.bin": b"1"})
    hub.repositories["kettles/base"] = Repository(gated="auto", files={"README.md": b"---\nlicense: apache-2.0\n---\n"})
    seen = last(publish(hub, tmp_path, "--look", "--base", "kettles/base"))
    assert (seen["user"], seen["exists"], seen["files"]) == ("tea", True, ["gangline.json", "x.bin"])
    assert (seen["run"], seen["merged"], seen["license"], seen["gated"]) == ("calm-otter-7", True, "apache-2.0", True)
    assert not [each for each in hub.requests if each.startswith(("POST", "PUT"))]
    assert not (tmp_path / "cache/hub").exists()


@pytest.mark.parametrize(
    ("token", "role", "words"),
    [
        ("hf_wrong", "write", "the hub does not take the token"),
        ("", "write", "there is no token for the hub"),
        (None, "read", "may only read"),
    ],
)
def test_who_may_not_write_hears_it_before_anything_is_sent(
    hub: Hub, tmp_path: Path, token: str | None, role: str, words: str
) -> None:
    hub.role = role
    error = last(publish(hub, tmp_path, "--look", **({} if token is None else {"HF_TOKEN": token})))
    assert words in error["what"]
    assert error["error_kind"] == "UsageError"
    assert error["fix"]
    if token:
        assert token not in json.dumps(error)


def test_the_name_of_somebody_else_is_refused(hub: Hub, tmp_path: Path) -> None:
    error = last(publish(hub, tmp_path, "--look", "--to", "meta/kettle"))
    assert error["what"] == "--push meta/kettle: meta is not yours"
    assert "tea, kettles" in error["seen"]


def test_a_hub_that_is_not_there_is_said_to_be_so(hub: Hub, tmp_path: Path) -> None:
    error = last(publish(hub, tmp_path, "--look", HF_ENDPOINT="http://127.0.0.1:9"))
    assert error["error_kind"] == "HostUnreachable"
    assert error["what"] == "--push tea/kettle: the hub could not be reached"


def test_a_license_that_the_card_names_stays() -> None:
    assert with_license("---\na: 1\n---\nx", "mit") == '---\na: 1\nlicense: "mit"\n---\nx'
    assert with_license("---\nlicense: gpl\n---\nx", "mit") == "---\nlicense: gpl\n---\nx"
    assert with_license("no head", "mit") == "no head"


def test_a_busy_hub_may_not_keep_anybody_waiting_for_hours() -> None:
    assert (wait_s("7", 0), wait_s(None, 2), wait_s("Fri, 27 Nov 2026", 1), wait_s("3600", 0)) == (7.0, 4.0, 2.0, 60.0)
