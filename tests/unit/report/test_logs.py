"""Which logs are shown, also where a host does not answer; what is left of a progress bar."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest

from gangline.errors import HostKeyRefused, HostUnreachable
from gangline.report.tail import log_files
from gangline.report.text_table import last_shown
from gangline.runs.cluster import Cluster, Host
from gangline.transport.local import LocalTransport


class Silent(LocalTransport):
    """A host that does not answer."""

    def names(self, path: PurePath) -> list[str]:
        raise HostUnreachable(f"{self.host} does not answer")


class Strange(LocalTransport):
    """Somebody else answers."""

    def names(self, path: PurePath) -> list[str]:
        raise HostKeyRefused(f"{self.host} shows another key")


def cluster(root: Path) -> Cluster:
    names = ("pc1", "pc2", "pc3")
    hosts = tuple(Host(name=name, workdir=str(root / name), python="python") for name in names)
    for rank, name in enumerate(names):
        folder = root / name / "runs" / "calm-otter-7" / "attempts" / "1"
        (folder / name).mkdir(parents=True)
        (folder / f"rank-{rank}.log").touch()
        (folder / name / "console.log").touch()
    return Cluster(name="home", hosts=hosts)


@pytest.mark.parametrize(
    ("console", "names"), [(False, ["pc1 rank 0", "pc3 rank 2"]), (True, ["pc1 console", "pc3 console"])]
)
def test_the_logs_of_the_hosts_that_answer_are_shown(tmp_path: Path, console: bool, names: list[str]) -> None:
    hosts = cluster(tmp_path)
    transports = {host.name: (Silent if host.name == "pc2" else LocalTransport)(host) for host in hosts.hosts}
    files, silent = log_files("calm-otter-7", hosts, transports, attempt=1, console=console)
    assert [file.name for file in files] == names
    assert {host: error.what for host, error in silent.items()} == {"pc2": "pc2 does not answer"}


def test_another_host_in_the_place_of_one_ends_it(tmp_path: Path) -> None:
    hosts = cluster(tmp_path)
    transports = {host.name: Strange(host) for host in hosts.hosts}
    with pytest.raises(HostKeyRefused):
        log_files("calm-otter-7", hosts, transports, attempt=1, console=False)


def test_of_a_progress_bar_the_end_is_shown() -> None:
    assert last_shown("loading:   0 %\rloading: 100 %") == "loading: 100 %"
    assert last_shown("a line of Windows\r") == "a line of Windows"
