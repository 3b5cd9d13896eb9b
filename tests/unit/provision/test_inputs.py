"""Token sets on the hosts: only those that are the head's, byte for byte."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path, PurePath

import pytest

from gangline.errors import DataError
from gangline.provision.inputs import Inputs, distribute
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import file_digest, write_json
from gangline.runs.layout import RunLayout
from gangline.transport.local import LocalTransport
from tests.unit.provision.hosts import Lines

INPUTS = Inputs(train="feed", evaluation="beef", model="cafe", record={})
NAMES = ("pc1", "pc2", "pc3")


def make_set(root: Path, content_hash: str, tokens: bytes) -> None:
    folder = RunLayout(root, "").token_set(content_hash)
    folder.mkdir(parents=True)
    (folder / "tokens.bin").write_bytes(tokens)
    write_json(folder / "set.json", {"files": {"tokens.bin": {"blake2b": file_digest(folder / "tokens.bin")}}})


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Three hosts of which the head has two sets."""
    make_set(tmp_path / "pc1", "feed", b"the tokens to learn")
    make_set(tmp_path / "pc1", "beef", b"the tokens to test")
    hosts = tuple(Host(name=name, workdir=str(tmp_path / name), python=sys.executable) for name in NAMES)
    return Cluster(name="kennel", hosts=hosts)


def served(cluster: Cluster, **others: LocalTransport) -> list[str]:
    transports = {host.name: others.get(host.name) or LocalTransport(host) for host in cluster.hosts}
    return distribute(cluster, transports, INPUTS)


def file_of(tmp_path: Path, host: str, content_hash: str = "feed", name: str = "tokens.bin") -> Path:
    return RunLayout(tmp_path / host, "").token_set(content_hash) / name


def test_hosts_get_what_they_lack_and_nothing_twice(cluster: Cluster, tmp_path: Path) -> None:
    assert served(cluster) == ["pc2", "pc3"]
    assert file_of(tmp_path, "pc3", "beef").read_bytes() == b"the tokens to test"
    assert served(cluster) == []


def test_a_flipped_byte_on_one_host_is_noticed_and_its_set_replaced(cluster: Cluster, tmp_path: Path) -> None:
    served(cluster)
    path = file_of(tmp_path, "pc2")
    path.write_bytes(b"T" + path.read_bytes()[1:])
    assert served(cluster) == ["pc2"]
    assert path.read_bytes() == b"the tokens to learn"


def test_a_set_that_is_whole_and_yet_another_than_the_heads_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    make_set(tmp_path / "pc2", "feed", b"made by another version")
    served(cluster)
    assert file_of(tmp_path, "pc2").read_bytes() == b"the tokens to learn"
    assert served(cluster) == []


@pytest.mark.parametrize("name", ["tokens.bin", "set.json"])
def test_a_set_that_lacks_a_file_is_replaced(cluster: Cluster, tmp_path: Path, name: str) -> None:
    served(cluster)
    file_of(tmp_path, "pc2", name=name).unlink()
    assert served(cluster) == ["pc2"]


class FlippingTransport(LocalTransport):
    """A host whose disk does not keep what it is given."""

    def push(self, source: Path, target: PurePath, **options: object) -> None:
        super().push(source, target, **options)
        Path(target / "tokens.bin").write_bytes(b"THE tokens to learn")


def test_a_host_that_damages_what_it_gets_is_refused_by_name_with_the_file(cluster: Cluster) -> None:
    with pytest.raises(DataError, match=r"pc2: .*feed/tokens\.bin is damaged") as caught:
        served(cluster, pc2=FlippingTransport(cluster.hosts[1]))
    assert caught.value.fix


@pytest.mark.parametrize("name", ["tokens.bin", "set.json"])
def test_a_set_that_is_damaged_on_the_head_is_not_passed_on(cluster: Cluster, tmp_path: Path, name: str) -> None:
    path = file_of(tmp_path, "pc1", name=name)
    path.unlink() if name == "set.json" else path.write_bytes(b"THE tokens to learn")
    with pytest.raises(DataError, match=rf"pc1: .*feed/{name} is damaged"):
        served(cluster)
    assert not file_of(tmp_path, "pc2").exists()


def test_from_a_head_elsewhere_the_sets_pass_through_this_computer(cluster: Cluster, tmp_path: Path) -> None:
    hosts = tuple(dataclasses.replace(host, transport="ssh") for host in cluster.hosts)
    lines = Lines()
    transports = {host.name: LocalTransport(host) for host in hosts}
    away = dataclasses.replace(cluster, hosts=hosts)
    assert distribute(away, transports, INPUTS, scratch=tmp_path / "home", console=lines) == ["pc2", "pc3"]
    assert file_of(tmp_path, "pc3", "beef").read_bytes() == b"the tokens to test"
    assert list((tmp_path / "home").iterdir()) == []
    (line,) = lines.said
    assert line == "copied tokens from this computer to pc2, pc3"


def test_where_only_some_of_it_was_brought_it_is_said_what(cluster: Cluster, tmp_path: Path) -> None:
    served(cluster)
    file_of(tmp_path, "pc2").unlink()
    lines = Lines()
    transports = {host.name: LocalTransport(host) for host in cluster.hosts}
    assert distribute(cluster, transports, INPUTS, console=lines) == ["pc2"]
    assert [line.partition(":")[0] for line in lines.said] == ["copied training tokens from pc1 to pc2"]
    assert any(line.startswith("training tokens to pc2: ") for line in lines.ticked)
    assert distribute(cluster, transports, INPUTS, console=lines) == []
    assert len(lines.said) == 1


def test_training_data_alone_is_called_tokens(cluster: Cluster) -> None:
    lines = Lines()
    transports = {host.name: LocalTransport(host) for host in cluster.hosts}
    alone = dataclasses.replace(INPUTS, evaluation=None)
    assert distribute(cluster, transports, alone, console=lines) == ["pc2", "pc3"]
    assert [line.partition(":")[0] for line in lines.said] == ["copied tokens from pc1 to pc2, pc3"]


def test_the_heads_description_is_what_counts(cluster: Cluster, tmp_path: Path) -> None:
    served(cluster)
    forged = json.dumps({"files": {}}).encode()
    file_of(tmp_path, "pc3", name="set.json").write_bytes(forged)
    assert served(cluster) == ["pc3"]
