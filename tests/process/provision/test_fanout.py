"""A folder brought to hosts: whole or not at all, only to those that lack it, from host to host where that works."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath

import pytest

from gangline.errors import HostUnreachable, ModelError
from gangline.provision import relay
from gangline.provision.relay import Cargo, bring, partial_of
from gangline.provision.trees import Spot, here, look, tree_of
from gangline.runs.cluster import Host
from gangline.transport.local import LocalTransport
from gangline.transport.transport import AGENT, CommandResult


class HostTransport(LocalTransport):
    """A host whose files lie on this computer, and that reaches some of the others."""

    def __init__(self, host: Host, *, reaches: Sequence[str] = ()) -> None:
        super().__init__(host)
        self.reaches = set(reaches)
        self.pushed: list[PurePath] = []
        self.sent: list[str] = []

    def push(self, source: Path, target: PurePath, **options: object) -> None:
        self.pushed.append(target)
        super().push(source, target, **options)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        on_line: Callable[[str], None] | None = None,
    ) -> CommandResult:
        if tuple(argv) != (AGENT, "send"):
            return super().run(argv, stdin=stdin, env=env, timeout_s=timeout_s, on_line=on_line)
        request = json.loads(stdin)
        name = request["peer"]["name"]
        answer = {"kind": "result", "sent": name in self.reaches, "why": "Permission denied (publickey)\x1b[31m."}
        if answer["sent"]:
            self.sent.append(name)
            for file in request["names"]:
                target = Path(request["target"]) / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(request["folder"]) / file, target)
        assert on_line
        on_line(json.dumps(answer))
        return CommandResult(host=self.host, argv=tuple(argv), returncode=0, stdout="", stderr="")


class Lines:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.ticked: list[str] = []

    def report(self, line: str) -> None:
        self.said.append(line)

    def progress(self, line: str) -> None:
        self.ticked.append(line)


@pytest.fixture(autouse=True)
def no_ssh_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SMALL_BYTES", 0)
    monkeypatch.setattr(relay, "peer_of", lambda host: {"name": host.name} if host.host_key else None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "parts").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "parts" / "one.safetensors").write_bytes(b"w" * 1000)
    return folder


def spots(tmp_path: Path, reaches: Mapping[str, Sequence[str]], *, keyless: Sequence[str] = ()) -> list[Spot]:
    hosts = [
        Host(
            name=name,
            workdir=str(tmp_path / name),
            python="",
            transport="ssh",
            host_key=None if name in keyless else "ssh-ed25519 AAAA",
        )
        for name in reaches
    ]
    return [
        Spot(
            host=host,
            transport=HostTransport(host, reaches=reaches[host.name]),
            path=PurePath(host.workdir) / "models" / "m",
        )
        for host in hosts
    ]


def cargo_of(folder: Path, **options: object) -> Cargo:
    source = here(folder)
    return Cargo(what="model", source=source, tree=look(source), kind=ModelError, **options)


def content(spot: Spot) -> bytes:
    return Path(spot.path / "parts" / "one.safetensors").read_bytes()


def test_it_goes_from_host_to_host_and_leaves_this_computer_once(tmp_path: Path, folder: Path) -> None:
    names = ["pc1", "pc2", "pc3", "pc4"]
    targets = spots(tmp_path, dict.fromkeys(names, names))
    lines = Lines()
    delivery = bring(cargo_of(folder), targets, console=lines)
    assert delivery.hops[:2] == (("this computer", "pc1"), ("pc1", "pc2"))
    assert len({source for source, _ in delivery.hops}) == 3
    assert sorted(delivery.served) == names
    assert [len(target.transport.pushed) for target in targets] == [1, 0, 0, 0]
    assert {content(target) for target in targets} == {b"w" * 1000}
    assert lines.said[0] == "copied model from this computer to pc1"
    assert any("model to" in line and "100 % of" in line for line in lines.ticked)


def test_hosts_that_have_it_are_left_alone_and_send_it_on(tmp_path: Path, folder: Path) -> None:
    targets = spots(tmp_path, {"pc1": ["pc3"], "pc2": ["pc1", "pc3"], "pc3": []})
    shutil.copytree(folder, targets[1].path)
    delivery = bring(cargo_of(folder), targets)
    assert sorted(delivery.served) == ["pc1", "pc3"]
    assert [target.transport.pushed for target in targets] == [[], [], []]
    assert bring(cargo_of(folder), targets).served == ()


def test_hosts_that_cannot_log_in_to_each_other_get_it_from_here_and_the_reason_is_told(
    tmp_path: Path, folder: Path
) -> None:
    targets = spots(tmp_path, {"pc1": [], "pc2": [], "pc3": []})
    lines = Lines()
    delivery = bring(cargo_of(folder), targets, console=lines)
    assert {source for source, _ in delivery.hops} == {"this computer"}
    assert {content(target) for target in targets} == {b"w" * 1000}
    assert lines.said[1] == "  pc1 cannot send to pc2: Permission denied (publickey)?[31m."
    assert len(delivery.obstacles) == 1


def test_a_host_without_a_pinned_key_is_never_sent_to_by_another(tmp_path: Path, folder: Path) -> None:
    targets = spots(tmp_path, {"pc1": ["pc2"], "pc2": []}, keyless=["pc2"])
    assert {source for source, _ in bring(cargo_of(folder), targets).hops} == {"this computer"}


def test_from_one_host_to_others_that_it_does_not_reach_it_passes_through_here(tmp_path: Path, folder: Path) -> None:
    first, *others = spots(tmp_path, {"pc1": [], "pc2": [], "pc3": []})
    shutil.copytree(folder, first.path)
    cargo = Cargo(what="data", source=first, tree=look(first))
    delivery = bring(cargo, [first, *others], scratch=tmp_path / "scratch")
    assert sorted(delivery.served) == ["pc2", "pc3"]
    assert {content(target) for target in others} == {b"w" * 1000}
    assert list((tmp_path / "scratch").iterdir()) == []


def test_small_things_go_to_all_at_once(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SMALL_BYTES", 1 << 20)
    targets = spots(tmp_path, {"pc1": ["pc2"], "pc2": ["pc1"]})
    assert {source for source, _ in bring(cargo_of(folder), targets).hops} == {"this computer"}


class FlippingTransport(HostTransport):
    """A host whose disk does not keep what it is given."""

    def push(self, source: Path, target: PurePath, **options: object) -> None:
        super().push(source, target, **options)
        Path(target / "parts" / "one.safetensors").write_bytes(b"W" + b"w" * 999)


def test_what_arrives_damaged_never_takes_its_place_and_the_file_is_named(tmp_path: Path, folder: Path) -> None:
    (target,) = spots(tmp_path, {"pc1": []})
    target = dataclasses.replace(target, transport=FlippingTransport(target.host))
    Path(target.path).mkdir(parents=True)
    (Path(target.path) / "old").write_text("what was there before")
    with pytest.raises(ModelError, match=r"pc1: .*models/m/parts/one\.safetensors is damaged"):
        bring(cargo_of(folder), [target])
    assert [path.name for path in Path(target.path).iterdir()] == ["old"]
    assert [path.name for path in Path(target.path).parent.iterdir()] == ["m"]


def test_files_gathered_from_several_places_are_brought_one_by_one_and_gone_on_with(
    tmp_path: Path, folder: Path
) -> None:
    (target,) = spots(tmp_path, {"pc1": []})
    blob = tmp_path / "blob"
    blob.write_bytes(b"weights")
    files = {"config.json": folder / "config.json", "model.safetensors": blob}
    cargo = dataclasses.replace(
        cargo_of(folder), files=files, tree=tree_of({name: look(here(path)).files[""] for name, path in files.items()})
    )
    partial = Path(partial_of(target, cargo.tree))
    partial.mkdir(parents=True)
    (partial / "config.json").write_text("{}")
    assert bring(cargo, [target]).served == ("pc1",)
    assert [path.name for path in target.transport.pushed] == ["model.safetensors"]
    assert (Path(target.path) / "model.safetensors").read_bytes() == b"weights"


def test_a_shared_folder_is_filled_once(tmp_path: Path, folder: Path) -> None:
    shared = tmp_path / "nas"
    targets = [
        dataclasses.replace(target, path=PurePath(shared / "models" / "m"))
        for target in spots(tmp_path, {"pc1": ["pc2"], "pc2": ["pc1"]})
    ]
    assert bring(cargo_of(folder), targets, shared=[str(shared)]).served == ("pc1",)


def test_a_folder_that_is_called_shared_and_is_not_is_refused_by_name(tmp_path: Path, folder: Path) -> None:
    one, other = spots(tmp_path, {"pc1": [], "pc2": []})
    path = PurePath("/nas/models/m")

    class Elsewhere(HostTransport):
        """/nas on this host is a folder of its own."""

        def run(self, argv, *, stdin=b"", **options):
            stdin = stdin.replace(b"/nas/", str(tmp_path / self.host / "nas").encode() + b"/")
            on_line = options.pop("on_line", None)
            back = on_line and (lambda line: on_line(line.replace(str(tmp_path / self.host / "nas"), "/nas")))
            return super().run(argv, stdin=stdin, on_line=back, **options)

        def push(self, source: Path, target: PurePath, **options: object) -> None:
            super().push(source, tmp_path / self.host / target.relative_to("/"), **options)

    targets = [dataclasses.replace(spot, path=path, transport=Elsewhere(spot.host)) for spot in (one, other)]
    with pytest.raises(ModelError, match="pc2: /nas/models/m is not the folder that the others have"):
        bring(cargo_of(folder), targets, shared=["/nas"])


def test_a_single_file_is_brought_too(tmp_path: Path, folder: Path) -> None:
    targets = spots(tmp_path, {"pc1": ["pc2"], "pc2": ["pc1"]})
    file = folder / "config.json"
    assert sorted(bring(cargo_of(file), targets).served) == ["pc1", "pc2"]
    assert Path(targets[0].path).read_text() == "{}"


class HangingTransport(HostTransport):
    """A host whose disk hangs."""

    def run(self, argv: Sequence[str], **options: object) -> CommandResult:
        if argv[0] == "mkdir":
            raise TimeoutError(f"{self.host}: mkdir did not end within 600 s")
        return super().run(argv, **options)


def test_a_disk_that_hangs_is_a_host_that_does_not_get_on(tmp_path: Path, folder: Path) -> None:
    first, second = spots(tmp_path, {"pc1": ["pc2"], "pc2": []})
    second = dataclasses.replace(second, transport=HangingTransport(second.host))
    with pytest.raises(HostUnreachable, match="pc2 does not get on") as caught:
        bring(cargo_of(folder), [first, second])
    assert "mkdir did not end" in caught.value.seen
