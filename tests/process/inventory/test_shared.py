"""Whether a folder is one on all hosts, whether model and data are the same, and whether files can be written."""

import json

import pytest

from gangline.decide.inspect import compare
from gangline.inventory.folders import probe_disks, probe_shared
from gangline.provision.trees import Spot
from gangline.runs.cluster import Cluster, Host
from gangline.transport.local import LocalTransport
from tests.fakes.transport import FakeTransport


def host(name, **more):
    return Host(**{"name": name, "workdir": "/w", "python": "", **more})


class Elsewhere(LocalTransport):
    """A host of this computer that has another folder at the same path."""

    def __init__(self, name, asked, real):
        super().__init__(host(name))
        self.asked, self.real = asked, real

    def run(self, argv, *, stdin=b"", **more):
        return super().run(argv, stdin=stdin.replace(self.asked.encode(), str(self.real).encode()), **more)


def transports(tmp_path, **folders):
    return {name: Elsewhere(name, "/mnt/nas", tmp_path / folder) for name, folder in folders.items()}


def test_one_folder_on_all_hosts(tmp_path):
    (tmp_path / "one").mkdir()
    probe = probe_shared("/mnt/nas", transports(tmp_path, a="one", b="one", c="one"))
    assert [(view.host, view.error, view.sees, view.sees_rename) for view in probe.views] == [
        ("a", None, ("a", "b", "c"), None),
        ("b", None, ("a", "b", "c"), True),
        ("c", None, ("a", "b", "c"), True),
    ]
    assert list((tmp_path / "one").iterdir()) == []


def test_two_folders_of_one_name(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    probe = probe_shared("/mnt/nas", transports(tmp_path, a="one", b="one", c="two"))
    assert [view.sees for view in probe.views] == [("a", "b"), ("a", "b"), ("c",)]
    assert list(tmp_path.glob("*/*")) == []
    assert list(tmp_path.glob("*/.*")) == []


def test_a_folder_that_is_not_there(tmp_path):
    (tmp_path / "one").mkdir()
    probe = probe_shared("/mnt/nas", transports(tmp_path, a="one", b="none"))
    assert [view.error for view in probe.views] == [None, "No such file or directory"]


def test_a_host_that_does_not_answer_is_left_out(tmp_path):
    (tmp_path / "one").mkdir()
    silent = FakeTransport("b")
    silent.reachable = False
    probe = probe_shared("/mnt/nas", {**transports(tmp_path, a="one"), "b": silent})
    assert [view.host for view in probe.views] == ["a"]


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", "x" * 65])
def test_a_marker_never_leads_out_of_the_folder(tmp_path, name):
    request = {"folder": str(tmp_path), "probe": "p", "mine": name, "do": "write"}
    result = LocalTransport(host("a")).run(("gangline-agent", "shared"), stdin=json.dumps(request).encode())
    assert result.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_copies_are_compared_by_content_and_the_file_is_named(tmp_path):
    for number, text in enumerate(("same", "same", "sane")):
        folder = tmp_path / f"h{number}"
        folder.mkdir()
        (folder / "weights").write_text(text)
        (folder / "config.json").write_text("{}")
    hosts = [host(f"h{number}") for number in range(4)]
    spots = [Spot(host=one, transport=LocalTransport(one), path=tmp_path / one.name) for one in hosts]
    compared = compare("model", spots)
    trees = [copy.tree for copy in compared.copies]
    assert trees[0] == trees[1] != trees[2]
    assert trees[3] is None
    assert compared.differing == ("weights",)


def test_files_are_really_written_and_nothing_is_left(tmp_path):
    (tmp_path / "w").mkdir()
    hosts = (host("a", workdir=str(tmp_path / "w")), host("b", workdir=str(tmp_path / "w" / "not" / "yet")))
    rows = probe_disks(Cluster(name="c", hosts=hosts), {one.name: LocalTransport(one) for one in hosts})
    assert [(row.host, row.error) for row in rows] == [("a", None), ("b", None)]
    assert all(row.seconds is not None for row in rows)
    assert list((tmp_path / "w").iterdir()) == []


def test_a_file_that_cannot_be_written_is_told():
    rows = probe_disks(Cluster(name="c", hosts=(host("a", workdir="/proc/w"),)), {"a": LocalTransport(host("a"))})
    assert rows[0].error is not None
