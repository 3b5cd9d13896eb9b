"""A run keeps one history when its head changes, and nothing of it is lost or told twice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gangline.errors import HostUnreachable
from gangline.provision.trees import Spot, carry_history, host_layout, same_place, spot_on
from gangline.runs.cluster import Host
from gangline.runs.layout import RunLayout
from gangline.transport.local import LocalTransport
from tests.saved import read_events

RUN_ID = "calm-otter-7"


def head(root: Path, name: str) -> tuple[Host, RunLayout]:
    host = Host(name=name, workdir=str(root / name), python="python")
    layout = host_layout(host, RUN_ID)
    layout.tensorboard.mkdir(parents=True)
    return host, layout


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def worker(event: str) -> dict[str, Any]:
    return {"kind": "event", "source": "worker", "event": event}


def supervisor(event: str) -> dict[str, Any]:
    return {"kind": "event", "source": "supervisor", "event": event}


def work_folder(host: Host, transports: dict[str, LocalTransport]) -> Spot:
    return spot_on(host, transports, host.workdir)


def carry(before: Host, now: Host) -> bool:
    hosts = {host.name: LocalTransport(host) for host in (before, now)}
    return carry_history(work_folder(before, hosts), work_folder(now, hosts), RUN_ID)


def test_events_of_the_supervisor_stay_where_the_new_head_works_in_the_home(tmp_path: Path) -> None:
    (before, old), (now, home) = head(tmp_path, "pc1"), head(tmp_path, "home")
    old.events.write_text(lines(worker("started"), worker("saved")), encoding="utf-8")
    home.events.write_text(lines(supervisor("started"), supervisor("stopped")), encoding="utf-8")
    carry(before, now)
    assert [(event["source"], event["event"]) for event in read_events(home.events)] == [
        ("supervisor", "started"),
        ("supervisor", "stopped"),
        ("worker", "started"),
        ("worker", "saved"),
    ]


def test_events_of_the_supervisor_are_not_carried_away_from_the_home(tmp_path: Path) -> None:
    (before, home), (now, new) = head(tmp_path, "home"), head(tmp_path, "pc1")
    home.events.write_text(lines(supervisor("started"), worker("started")), encoding="utf-8")
    carry(before, now)
    assert read_events(new.events) == [worker("started")]


def test_a_head_that_had_the_run_before_gets_only_what_is_missing(tmp_path: Path) -> None:
    (before, old), (now, new) = head(tmp_path, "pc1"), head(tmp_path, "pc2")
    first, second = {"kind": "step", "step": 1}, {"kind": "step", "step": 2}
    old.metrics.write_text(lines(first, second) + '{"kind": "st', encoding="utf-8")
    new.metrics.write_text(lines(first) + '{"torn', encoding="utf-8")
    for layout, name in ((old, "events.1"), (old, "events.2"), (new, "events.1"), (new, "events.0")):
        (layout.tensorboard / name).write_text(layout.root.name, encoding="utf-8")
    carry(before, now)
    carry(before, now)
    assert new.metrics.read_text(encoding="utf-8") == lines(first) + '{"torn\n' + lines(second)
    assert {path.name: path.read_text(encoding="utf-8") for path in new.tensorboard.iterdir()} == {
        "events.0": "pc2",
        "events.1": "pc2",
        "events.2": "pc1",
    }


def test_a_run_whose_head_wrote_nothing_has_nothing_to_carry(tmp_path: Path) -> None:
    (before, _old), (now, new) = head(tmp_path, "pc1"), head(tmp_path, "pc2")
    carry(before, now)
    assert not new.metrics.exists()
    assert not new.events.exists()


class AwayTransport(LocalTransport):
    """A host that is switched off."""

    def read(self, *_words: object, **_options: object) -> bytes:
        raise HostUnreachable(f"{self.host} does not answer")


@pytest.mark.parametrize("way", ["ssh", "local"])
def test_history_is_carried_between_heads_elsewhere(tmp_path: Path, way: str) -> None:
    (before, old), (now, new) = head(tmp_path, "pc1"), head(tmp_path, "pc2")
    before, now = (dataclasses.replace(host, transport=way) for host in (before, now))
    old.events.write_text(lines(worker("started")), encoding="utf-8")
    (old.tensorboard / "events.1").write_text("curve", encoding="utf-8")
    assert carry(before, now)
    assert read_events(new.events) == [worker("started")]
    assert (new.tensorboard / "events.1").read_text(encoding="utf-8") == "curve"


def test_an_old_head_that_is_gone_does_not_keep_the_run_from_going_on(tmp_path: Path) -> None:
    (before, old), (now, _new) = head(tmp_path, "pc1"), head(tmp_path, "pc2")
    old.metrics.write_text(lines({"kind": "step"}), encoding="utf-8")
    hosts = {"pc1": AwayTransport(before), "pc2": LocalTransport(now)}
    assert not carry_history(work_folder(before, hosts), work_folder(now, hosts), RUN_ID)


def test_two_hosts_with_work_folders_of_the_same_name_are_two_places(tmp_path: Path) -> None:
    one, other = (Host(name=name, workdir="/home/u/gangline", python="", transport="ssh") for name in ("pc1", "pc2"))
    hosts = {host.name: LocalTransport(host) for host in (one, other)}
    assert not same_place(work_folder(one, hosts), work_folder(other, hosts))
    assert same_place(work_folder(one, hosts), work_folder(one, hosts))
