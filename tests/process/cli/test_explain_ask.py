"""`gangline explain --ask` on this computer: real checks, the records of a run that trained, nothing changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gangline.cli.main import main
from tests.recorded import KINDS, install

RUN = next(kind for kind in KINDS if kind.endswith("failed"))
CLUSTER = """\
name: two
hosts:
  - {name: h0, transport: local, slots: 1}
  - {name: h1, transport: local, slots: 1}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = main(["explain", "--ask", *words, "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    document: dict[str, Any] = json.loads(said.out)
    return document


def files(home: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in home.rglob("*") if path.is_file()}


def test_the_hosts_of_a_cluster_are_looked_at_and_the_rest_is_open(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    answer = told(capsys, "hangs-at-start", "--cluster", "cluster.yaml")
    assert (answer["symptom"], answer["run"], answer["hosts"]) == ("hangs-at-start", None, ["h0", "h1"])
    assert {"question": "How far did its start come, and what stopped it?", "why": "no run was named"} in answer["left"]
    (checked,) = [each for each in answer["questions"] if "gangline check" in each["question"]]
    assert {each["verdict"] for each in checked["answers"]} <= {"cause", "no"}


def test_a_cluster_with_a_fault_that_stops_a_start_names_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("cluster.yaml").write_text(CLUSTER.replace("slots: 1}\n", "slots: 1, interface: eth77}\n"), encoding="utf-8")
    answer = told(capsys, "hangs at start")
    assert answer["verdict"] == "cause"
    assert answer["cause"]["confidence"] == "high"
    assert any("E-NET-08" in line for each in [answer["cause"], *answer["also"]] for line in each["seen"])


def test_a_run_and_its_hosts_are_asked_and_stay_as_they_are(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = install(RUN, home)
    before = files(home / "runs" / run)
    answer = told(capsys, "gpu-not-used", run)
    assert answer["run"] == run
    assert files(home / "runs" / run) == before
    assert main(["explain", "--ask", "loss-stuck", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "loss-stuck: the loss stays where it is"
    assert any("Is there a gradient?" in line for line in lines)


def test_a_run_is_asked_by_its_records_where_its_hosts_cannot_be_looked_at(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lock of its environment is gone."""
    run = install(RUN, home)
    record = home / "runs" / run / "cluster.json"
    cluster = json.loads(record.read_text(encoding="utf-8"))
    for host in cluster["hosts"]:
        host["environment"] |= {"kind": "locked", "path": str(home / "gone.txt")}
    record.write_text(json.dumps(cluster), encoding="utf-8")
    answer = told(capsys, "hangs-at-start", run)
    assert (answer["run"], answer["hosts"]) == (run, [])
    assert any("gone.txt cannot be read" in why for why in answer["unchecked"])
    assert any(each["verdict"] != "unknown" for asked in answer["questions"] for each in asked["answers"])
