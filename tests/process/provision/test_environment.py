"""A Python on every host: built from a lock, or the user's own; and the same everywhere."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from gangline.errors import CheckFailed, GanglineError, RunFailed, UsageError
from gangline.inventory.facts import FoundPython, Inventory
from gangline.provision import environment as module
from gangline.provision import wheelhouse
from gangline.provision.environment import (
    PROVIDERS,
    Difference,
    Ground,
    compare_environments,
    place_environments,
    preview_environments,
    require_equal,
    seeing,
    wrapped,
)
from gangline.provision.requirements import read_lock
from gangline.provision.wheelhouse import Gathering, NoWheels, Platform, download_argv, gather_wheels
from gangline.runs.cluster import Cluster, Environment, Host
from gangline.tested import BY_NAME
from gangline.transport.transport import CommandResult
from tests.unit.provision.hosts import HostTransport, Lines, answered, kennel
from tests.unit.provision.wheels import make_wheel

NOBODY = Inventory(gathered="", hosts=())


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds its packages in these tests: two tiny ones. No network."""
    folder = tmp_path / "shop"
    make_wheel(folder, "tiny_a", "1.0", needs="tiny_b")
    make_wheel(folder, "tiny_b", "2.0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "my.lock"
    path.write_text("tiny-a==1.0\ntiny_b==2.0\n")
    return path


@pytest.fixture(autouse=True)
def this_python_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts of these tests have all Pythons of this computer, whatever these may be."""
    real = module.why_not
    own = sys.version_info[:3]
    monkeypatch.setattr(
        module,
        "why_not",
        lambda found, **how: real(found, **how) if found.version == own else "other",
    )


def locked(cluster: Cluster, lock: Path) -> Cluster:
    environment = Environment(kind="locked", path=str(lock))
    return dataclasses.replace(
        cluster, hosts=tuple(dataclasses.replace(host, environment=environment) for host in cluster.hosts)
    )


def place(cluster: Cluster, transports: dict[str, HostTransport], tmp_path: Path, **options: object) -> Cluster:
    return place_environments(cluster, NOBODY, transports, home=tmp_path / "home", **options)


def imported(host: Host) -> str:
    code = "import tiny_a, tiny_b, sys; print(tiny_a.version, tiny_b.version, sys.prefix)"
    return subprocess.run(host.argv("-c", code), capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where wheelhouses are kept that a test has filled: pip takes seconds."""
    return tmp_path_factory.mktemp("gathered")


@pytest.fixture
def home(tmp_path: Path, gathered: Path) -> Path:
    """A folder of this computer that has the wheels of `lock` already, if any test has gathered them."""
    if list(gathered.iterdir()):
        shutil.copytree(gathered, tmp_path / "home" / "wheelhouse")
    return tmp_path / "home"


def test_every_host_gets_the_environment_of_the_lock_and_keeps_it(
    tmp_path: Path, shop: Path, lock: Path, gathered: Path
) -> None:
    cluster, transports = kennel(tmp_path, "pc1", "pc2")
    cluster, lines = locked(cluster, lock), Lines()
    preview = preview_environments(cluster, NOBODY, transports)
    placed = place(cluster, transports, tmp_path, console=lines)
    assert placed == preview
    for host in placed.hosts:
        folder = Path(host.python).parents[1]
        assert imported(host) == f"1.0 2.0 {folder}"
        assert folder.parent == Path(host.workdir) / "environments"
        assert folder.name.endswith("-cpu")
        # a first line that is too long for the kernel goes by way of sh
        assert f"{folder}/bin/python" in (folder / "bin" / "tiny_a").read_text().partition("\nimport ")[0]
        assert list((Path(host.workdir) / "wheelhouse").iterdir()) == []
        everything = [path for path in folder.parent.rglob("*") if not path.is_symlink()]
        assert [path for path in everything if path.stat().st_mode & 0o022] == []
    built = [line for line in lines.said if line.startswith("environment built on ")]
    assert [line.partition(":")[0] for line in built] == ["environment built on pc1", "environment built on pc2"]
    kind = f"Python {sys.version_info[0]}.{sys.version_info[1]} without a GPU"
    assert any(line.startswith(f"2 packages for {kind} gathered: ") for line in lines.said)
    assert any(line.startswith(f"packages for {kind}: 2 of 2, ") for line in lines.ticked)
    assert any(line.startswith("building the environment on ") for line in lines.ticked)
    assert compare_environments(placed, transports) == ()
    shutil.copytree(tmp_path / "home" / "wheelhouse", gathered, dirs_exist_ok=True)
    for folder in (shop, tmp_path / "home"):  # nobody needs them any more
        shutil.rmtree(folder)
    for transport in transports.values():
        transport.pushed.clear()
    assert place(cluster, transports, tmp_path) == placed
    assert [transport.pushed for transport in transports.values()] == [[], []]


def test_a_host_on_this_computer_uses_the_wheels_where_they_are(
    tmp_path: Path, shop: Path, lock: Path, home: Path
) -> None:
    cluster, transports = kennel(tmp_path, "here", transport="local")
    placed = place(locked(cluster, lock), transports, tmp_path)
    assert imported(placed.head).startswith("1.0 2.0")
    assert transports["here"].pushed == []
    assert (home / "wheelhouse").is_dir()


def test_hosts_with_one_shared_work_folder_build_once(tmp_path: Path, shop: Path, lock: Path, home: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1", "pc2", workdir=str(tmp_path / "nas" / "gangline"))
    cluster = dataclasses.replace(locked(cluster, lock), shared=(str(tmp_path / "nas"),))
    lines = Lines()
    placed = place(cluster, transports, tmp_path, console=lines)
    assert sum(line.startswith("environment built") for line in lines.said) == 1
    assert placed.hosts[0].python == placed.hosts[1].python


def test_a_changed_environment_is_refused_and_one_that_was_never_finished_is_built_anew(
    tmp_path: Path, shop: Path, lock: Path, home: Path
) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    cluster = locked(cluster, lock)
    folder = Path(preview_environments(cluster, NOBODY, transports).head.python).parents[1]
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("half")
    python = Path(place(cluster, transports, tmp_path).head.python)
    (record,) = folder.glob("lib/python*/site-packages/tiny_b-2.0.dist-info/RECORD")
    text = record.read_text()
    record.write_text(text.replace("sha256=", "sha256=0"))
    with pytest.raises(CheckFailed, match=r"pc1: .* is not what gangline built") as caught:
        place(cluster, transports, tmp_path)
    assert caught.value.seen == "changed since it was built: tiny-b"
    assert f"rm -r {folder}" in caught.value.fix
    record.write_text(text)
    python.unlink()  # as when the system gets another Python
    with pytest.raises(CheckFailed, match="is not what gangline built"):
        place(cluster, transports, tmp_path)


def test_the_same_lock_with_other_packages_on_two_hosts_is_refused() -> None:
    sites = module.choose([site("pc1", (3, 11, 0)), site("pc2", (3, 11, 4))])
    there = {"pc1": {"torch": ["2.13.0", "x"]}, "pc2": {"torch": ["2.13.0", "y"]}}
    with pytest.raises(CheckFailed, match="pc1 and pc2 have different environments of one lock") as caught:
        module._require_equal(sites, there)
    assert caught.value.seen == "different: torch"


def test_a_package_without_a_wheel_is_told_as_pip_tells_it(tmp_path: Path, shop: Path, lock: Path) -> None:
    lock.write_text("tiny-a==1.0\ntiny_b==2.0\nnobody-has==3.0\n")
    cluster, transports = kennel(tmp_path, "pc1")
    with pytest.raises(NoWheels, match=r"not all packages have a wheel for Python 3\.") as caught:
        place(locked(cluster, lock), transports, tmp_path)
    assert "nobody-has==3.0" in caught.value.seen
    assert list((tmp_path / "home" / "wheelhouse").iterdir()) == []


@pytest.mark.parametrize(("has_gpu", "expected"), [(False, "2.13.0+cpu"), (True, "2.13.0")])
def test_a_host_without_gpu_gets_the_cpu_build_of_torch_where_pip_has_one(
    tmp_path: Path, shop: Path, has_gpu: bool, expected: str
) -> None:
    make_wheel(shop, "torch", "2.13.0")
    if not has_gpu:
        make_wheel(shop, "torch", "2.13.0+cpu")
    kind = Platform(version=sys.version_info[:3], machine="x86_64", glibc=(2, 36), has_gpu=has_gpu)
    house = gather_wheels(read_lock("torch==2.13.0", "lock"), kind, home=tmp_path)
    assert house.requirements.startswith(f"torch=={expected} --hash=sha256:")
    assert f"torch-{expected}-py3-none-any.whl" in house.tree.files
    assert house.installed_bytes > 500


def test_an_index_out_of_reach_is_no_missing_wheel(tmp_path: Path, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    kind = Platform(version=sys.version_info[:3], machine="x86_64", glibc=(2, 36), has_gpu=False)
    with pytest.raises(GanglineError, match="pip on this computer does not reach an index") as caught:
        gather_wheels(read_lock("torch==2.13.0", "lock"), kind, home=tmp_path)
    assert not isinstance(caught.value, NoWheels)


def test_where_pip_has_no_cpu_build_any_will_do(tmp_path: Path, shop: Path) -> None:
    make_wheel(shop, "torch", "2.13.0")
    kind = Platform(version=sys.version_info[:3], machine="x86_64", glibc=(2, 36), has_gpu=False)
    lines = Lines()
    house = gather_wheels(read_lock("torch==2.13.0", "lock"), kind, home=tmp_path, console=lines)
    assert house.requirements.startswith("torch==2.13.0 --hash=sha256:")
    assert lines.said[0].startswith("pip finds no CPU build of torch 2.13.0: ")


def test_the_password_of_an_index_is_in_no_argv_and_not_kept(tmp_path: Path, shop: Path) -> None:
    own = read_lock("--extra-index-url https://me:canary@example.org/simple\ntiny-b==2.0", "lock")
    kind = Platform(version=sys.version_info[:3], machine="x86_64", glibc=(2, 36), has_gpu=True)
    house = gather_wheels(own, kind, home=tmp_path)
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"canary" in text for text in texts)
    assert "canary" not in house.requirements + " ".join(download_argv(tmp_path / "in.txt", kind, tmp_path))


@pytest.mark.parametrize("is_right", [True, False])
def test_a_lock_with_hashes_takes_no_other_wheel(tmp_path: Path, shop: Path, is_right: bool) -> None:
    data = (shop / "tiny_b-2.0-py3-none-any.whl").read_bytes()
    digest = hashlib.sha256(data if is_right else b"another").hexdigest()
    own = read_lock(f"tiny-b==2.0 --hash=sha256:{digest}", "lock")
    kind = Platform(version=sys.version_info[:3], machine="x86_64", glibc=(2, 36), has_gpu=False)
    if is_right:
        house = gather_wheels(own, kind, home=tmp_path)
        assert house.requirements == f"tiny-b==2.0 --hash=sha256:{digest}\n"
    else:
        with pytest.raises(GanglineError, match="a package is not the one that the lock names"):
            gather_wheels(own, kind, home=tmp_path)


def inode(host: Host, name: str) -> int:
    (path,) = Path(host.python).parents[1].glob(f"lib/python*/site-packages/{name}")
    return path.stat().st_ino


def test_environments_share_the_files_of_packages_that_they_have_in_common(
    tmp_path: Path, shop: Path, lock: Path, home: Path
) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    first = place(locked(cluster, lock), transports, tmp_path).head
    lock.write_text("tiny_b==2.0\n")
    second = place(locked(cluster, lock), transports, tmp_path).head
    assert first.python != second.python
    assert inode(first, "tiny_b/__init__.py") == inode(second, "tiny_b/__init__.py")
    unpacked = Path(first.workdir) / "environments" / ".uv"
    os.utime(unpacked, (time.time() - 31 * 86400,) * 2)
    lock.write_text("tiny_b==2.0 ; python_version > '3'\n")
    third = place(locked(cluster, lock), transports, tmp_path).head
    assert inode(third, "tiny_b/__init__.py") != inode(second, "tiny_b/__init__.py")
    assert imported(first).startswith("1.0 2.0"), "what was deleted was one name of its files"


def test_a_wheel_that_changed_after_it_was_gathered_is_not_installed(
    tmp_path: Path, shop: Path, lock: Path, home: Path
) -> None:
    cluster, transports = kennel(tmp_path, "here", transport="local")
    (site,) = module.look_around(locked(cluster, lock).hosts, transports, {})
    (site,) = module.choose([site])
    house = gather_wheels(site.lock, site.kind, home=home)
    make_wheel(house.folder, "tiny_b", "2.0", text="version = 'another'\n")
    with pytest.raises(RunFailed, match="here: uv cannot make the packages") as caught:
        place(locked(cluster, lock), transports, tmp_path)
    assert "Hash mismatch for `tiny-b==2.0`" in caught.value.seen
    assert caught.value.fix == "put right what uv names, and start again"
    assert preview_environments(locked(cluster, lock), NOBODY, transports).head == site.located


def make_uv(folder: Path, tag: str) -> None:
    version = metadata.version("uv")
    info = f"uv-{version}.dist-info"
    with zipfile.ZipFile(folder / f"uv-{version}-py3-none-{tag}.whl", "w") as wheel:
        wheel.writestr(f"uv-{version}.data/scripts/uv", tag)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: uv\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_a_host_with_another_processor_gets_the_uv_that_runs_there(tmp_path: Path, shop: Path) -> None:
    other = "x86_64" if platform.machine() == "aarch64" else "aarch64"
    kind = Platform(version=sys.version_info[:3], machine=other, glibc=(2, 36), has_gpu=False)
    own = read_lock("tiny-b==2.0", "lock")
    with pytest.raises(NoWheels, match=f"on {other}") as caught:
        gather_wheels(own, kind, home=tmp_path)
    assert f"uv=={metadata.version('uv')}" in caught.value.seen
    make_uv(shop, f"manylinux_2_17_{other}")
    house = gather_wheels(own, kind, home=tmp_path)
    assert (house.folder / "uv").read_text() == f"manylinux_2_17_{other}"
    assert sorted(house.tree.files) == ["gathered", "requirements.txt", "tiny_b-2.0-py3-none-any.whl", "uv"]
    assert house.requirements.count("\n") == 1


def test_a_gangline_without_its_uv_says_so(tmp_path: Path, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheelhouse, "UV", "no-such-program")
    kind = Platform(version=sys.version_info[:3], machine="x86_64", glibc=(2, 36), has_gpu=False)
    with pytest.raises(GanglineError, match="the Python that runs gangline has no uv") as caught:
        gather_wheels(read_lock("tiny-b==2.0", "lock"), kind, home=tmp_path)
    assert caught.value.seen == f"{sys.executable}: No package metadata was found for no-such-program"
    assert caught.value.fix == f"{sys.executable} -m pip install '{BY_NAME['uv'].requirement}'"


def test_a_uv_that_cannot_be_started_says_what_the_host_needs(
    tmp_path: Path, shop: Path, lock: Path, home: Path
) -> None:
    cluster, transports = kennel(tmp_path, "here", transport="local")
    (site,) = module.choose(module.look_around(locked(cluster, lock).hosts, transports, {}))
    house = gather_wheels(site.lock, site.kind, home=home)
    (house.folder / "uv").write_bytes(b"\x7fELF of another processor")
    with pytest.raises(RunFailed, match="here: uv, which builds the environment, cannot be started") as caught:
        place(locked(cluster, lock), transports, tmp_path)
    assert "Exec format error" in caught.value.seen
    assert "noexec" in caught.value.fix


def test_hosts_that_build_at_once_share_one_line_and_who_is_ready_leaves_it() -> None:
    lines = Lines()
    builders = module._Builders(["pc1", "pc2"], console=lines)
    builders.at("pc1", "packages")
    builders.at("pc2", "wait for another start that builds the same")
    builders.at("pc2", "wait for another start that builds the same")
    builders.whole("pc1")
    builders.whole("pc2")
    assert lines.ticked == [
        "building the environment on pc1 pc2: 0 s",
        "building the environment on pc1 pc2 (wait for another start that builds the same): 0 s",
        "building the environment on pc2 (wait for another start that builds the same): 0 s",
    ]


def test_hosts_with_the_same_environment_are_told_in_one_line() -> None:
    sites = module.choose([site("pc1", (3, 11, 0)), site("pc2", (3, 11, 4))])
    (line,) = module._built_lines([(each, {"torch": []}) for each in sites], 75.0)
    assert line == f"environment built on pc1 pc2: 1 packages in 1 min 15 s, {sites[0].folder}"


def test_a_download_says_how_much_is_there(tmp_path: Path) -> None:
    lines = Lines()
    gathering = Gathering("Python 3.11 with a GPU", tmp_path, num_packages=58, console=lines)
    with gathering.beating():
        (tmp_path / "pip-unpack").mkdir()
        (tmp_path / "pip-unpack" / "torch.whl").write_bytes(b"x" * 2048)
        gathering.hear("Collecting torch==2.13.0")
        gathering.hear("  Downloading torch-2.13.0.whl (800 MB)")
    assert lines.ticked == [
        "packages for Python 3.11 with a GPU: asking pip, 0 s",
        "packages for Python 3.11 with a GPU: 1 of 58, torch, 2 KiB, 0 s",
    ]


def test_a_gpu_that_nobody_can_use_is_told(tmp_path: Path, shop: Path) -> None:
    make_wheel(shop, "torch", "2.13.0+cpu")
    lock = tmp_path / "torch.lock"
    lock.write_text("torch==2.13.0\n")
    cluster, transports = kennel(tmp_path, "pc1")
    lines = Lines()
    ground = Ground(transports=transports, gpus={"pc1": True}, home=tmp_path / "home")
    PROVIDERS["locked"].place(locked(cluster, lock).hosts, ground, console=lines)
    assert lines.said[-1].startswith("pc1 has a GPU and gets torch 2.13.0+cpu, which cannot use it")


def test_no_room_is_told_before_anything_is_built(
    tmp_path: Path, shop: Path, lock: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    real = module._look
    monkeypatch.setattr(module, "_look", lambda *w, **o: dataclasses.replace(real(*w, **o), free_bytes=1000))
    with pytest.raises(CheckFailed, match="pc1: no room for the environment"):
        place(locked(cluster, lock), transports, tmp_path)
    assert transports["pc1"].pushed == []


def test_a_host_without_a_fit_python_is_told_what_it_has(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, transports = kennel(tmp_path, "pc1")
    monkeypatch.setattr(module, "why_not", lambda *_words, **_options: "Python 3.9.2")
    with pytest.raises(CheckFailed, match="pc1: no Python to build an environment with") as caught:
        place(locked(cluster, lock), transports, tmp_path)
    assert "(Python 3.9.2)" in caught.value.seen
    assert "install Python 3.12" in caught.value.fix


def test_a_host_that_lies_about_its_pythons_is_named(tmp_path: Path, lock: Path) -> None:
    class Liar(HostTransport):
        def run(self, argv: Sequence[str], **options: object) -> CommandResult:
            assert argv == ("gangline-agent", "environment")
            return answered(self, argv, options["on_line"], {"pythons": [{"path": ["no", "text"]}]})

    cluster, _ = kennel(tmp_path, "pc1")
    with pytest.raises(GanglineError, match="what pc1 says cannot be understood"):
        preview_environments(locked(cluster, lock), NOBODY, {"pc1": Liar(cluster.head)})


def found(*version: int) -> FoundPython:
    return FoundPython(
        path="/usr/bin/python3",
        version=version,
        implementation="CPython",
        machine="x86_64",
        libc=("glibc", "2.36"),
        free_threaded=False,
    )


def site(name: str, *versions: tuple[int, int, int], built: tuple[str, ...] = ()) -> module.Site:
    all_found = tuple(found(*version) for version in versions)
    host = Host(name=name, workdir="/w", python="")
    return module.Site(
        host=host,
        transport=HostTransport(host),
        lock=read_lock("a==1", "lock"),
        has_gpu=False,
        pythons=all_found,
        python=all_found[0],
        built=built,
        free_bytes=None,
    )


def versions_of(*sites: module.Site, **options: object) -> list[tuple[int, int]]:
    return [each.python.version[:2] for each in module.choose(sites, **options)]


def test_hosts_get_the_version_that_most_of_them_have() -> None:
    sites = [site("pc1", (3, 10, 0), (3, 12, 1)), site("pc2", (3, 13, 0), (3, 12, 9)), site("pc3", (3, 13, 2))]
    assert versions_of(*sites) in ([(3, 12), (3, 12), (3, 13)], [(3, 12), (3, 13), (3, 13)])
    common = [site("pc1", (3, 10, 0), (3, 13, 1)), site("pc2", (3, 10, 2), (3, 12, 9))]
    assert versions_of(*common) == [(3, 10), (3, 10)]


def test_a_version_that_has_no_wheels_gives_way_to_the_next() -> None:
    one = site("pc1", (3, 10, 0), (3, 13, 1))
    assert versions_of(one, without=frozenset({("pc1", (3, 13))})) == [(3, 10)]
    assert versions_of(one, without=frozenset({("pc1", (3, 13)), ("pc1", (3, 10))})) == []


def test_an_environment_that_is_there_is_stayed_with() -> None:
    plain = site("pc1", (3, 10, 0), (3, 13, 1))
    name = plain.folder.name
    assert versions_of(site("pc1", (3, 10, 0), (3, 13, 1), built=(name,))) == [(3, 10)]


def test_wheels_are_asked_for_the_host_and_not_for_this_computer() -> None:
    kind = Platform(version=(3, 12, 4), machine="aarch64", glibc=(2, 28), has_gpu=True)
    argv = download_argv(Path("/w/in.txt"), kind, Path("/w/wheels"))
    assert kind.tag == "cp312-aarch64-gpu"
    assert argv[argv.index("--python-version") + 1] == "3.12.4"
    platforms = [argv[place + 1] for place, word in enumerate(argv) if word == "--platform"]
    assert platforms[0] == "manylinux_2_28_aarch64"
    assert {"manylinux2014_aarch64", "manylinux_2_17_aarch64", "linux_aarch64"} <= set(platforms)
    assert "manylinux_2_29_aarch64" not in platforms
    assert "--only-binary=:all:" in argv


# --- environments that are there already


def test_a_conda_environment_needs_no_activation(tmp_path: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    host = wrapped(
        Host(name="pc1", workdir="/w", python="", environment=Environment(kind="conda", path=str(tmp_path / "env")))
    )
    code = (
        "import os; print(os.environ['CONDA_PREFIX'], os.environ['PATH'].split(':')[0], os.environ['LD_LIBRARY_PATH'])"
    )
    done = subprocess.run(host.argv("-c", code), capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "env"), str(tmp_path / "env" / "bin"), str(tmp_path / "env" / "lib")]


HOSTILE = "x; touch canary $(touch canary) `touch canary` ' \" && touch canary"


def modules_host(*names: str) -> Host:
    environment = Environment(kind="modules", modules=names)
    return wrapped(Host(name="pc1", workdir="/w", python=sys.executable, environment=environment))


def login(tmp_path: Path, script: str) -> dict[str, str]:
    (tmp_path / ".bash_profile").write_text(script)
    return {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}


def test_modules_are_loaded_by_name_and_no_name_is_run(tmp_path: Path) -> None:
    env = login(
        tmp_path, 'module() { for one in "$@"; do echo "$one" >> "$HOME/loaded"; done; echo hello; export LOADED=1; }\n'
    )
    argv = modules_host("cuda/12.8", HOSTILE).argv("-c", "import os; print(os.environ['LOADED'])", "a b")
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert (tmp_path / "loaded").read_text() == f"load\ncuda/12.8\n{HOSTILE}\n"
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("profile", "code", "said"),
    [
        ("", 90, "there is no module system"),
        ('module() { echo "no such module: $2" >&2; return 1; }\n', 91, "no such module"),
    ],
)
def test_modules_that_cannot_be_loaded_are_told(tmp_path: Path, profile: str, code: int, said: str) -> None:
    argv = modules_host("cuda/99").argv("-c", "print('went on')")
    done = subprocess.run(argv, env=login(tmp_path, profile), cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr


def test_an_image_sees_the_work_folder_the_gpus_and_a_model_elsewhere() -> None:
    environment = Environment(kind="apptainer", path="/images/train.sif")
    host = Host(name="pc1", workdir="/w", python="", environment=environment)
    assert wrapped(host).argv("-m", "x") == (
        "apptainer",
        "exec",
        "--bind",
        "/w",
        "/images/train.sif",
        "python3",
        "-m",
        "x",
    )
    with_gpu = wrapped(host, has_gpu=True)
    assert with_gpu.prefix == ("apptainer", "exec", "--nv", "--bind", "/w", "/images/train.sif")
    assert seeing(with_gpu, ["/w/models/m", "/data/m"]).prefix[:4] == ("apptainer", "exec", "--bind", "/data/m")
    assert seeing(with_gpu, ["/w/models/m"]) == with_gpu


def test_a_python_of_the_users_own_is_left_as_it_is(tmp_path: Path) -> None:
    cluster, transports = kennel(tmp_path, "pc1", python="/opt/train/bin/python")
    assert place(cluster, transports, tmp_path) == cluster
    named = dataclasses.replace(cluster.head, environment=Environment(path="/opt/other/bin/python"))
    assert wrapped(named).python == "/opt/other/bin/python"


def test_an_environment_without_its_path_is_refused() -> None:
    with pytest.raises(UsageError, match="pc1: environment conda without a path"):
        wrapped(Host(name="pc1", workdir="/w", python="", environment=Environment(kind="conda")))


# --- the same everywhere


def own(tmp_path: Path, name: str, **versions: str) -> Host:
    """A host whose environment is a venv with these packages."""
    folder = tmp_path / name / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for package, words in versions.items():
        version, _, content = words.partition(" ")
        info = site_packages / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "RECORD").write_text(
            f"{package}/__init__.py,sha256={content or 'x'},10\n../../../bin/{package},sha256={name},9\n"
            f"{package}/__pycache__/x.pyc,,\n{info.name}/INSTALLER,sha256={name},4\n{info.name}/RECORD,,\n"
        )
    return Host(name=name, workdir=str(tmp_path / name), python=str(folder / "bin" / "python"), transport="ssh")


def differences(*hosts: Host) -> tuple[Difference, ...]:
    cluster = Cluster(name="kennel", hosts=hosts)
    return compare_environments(cluster, {host.name: HostTransport(host) for host in hosts})


def test_environments_with_the_same_packages_in_other_folders_are_the_same(tmp_path: Path) -> None:
    packages = {"torch": "2.13.0", "Some_Package": "1.0"}
    assert differences(own(tmp_path, "pc1", **packages), own(tmp_path, "pc2", **packages)) == ()


def test_what_differs_is_named_with_hosts_the_worst_first(tmp_path: Path) -> None:
    one = own(tmp_path, "pc1", torch="2.12.0", jupyter="1.0", numpy="2.4.6", peft="1.0")
    two = own(tmp_path, "pc2", torch="2.13.0", numpy="2.4.6 patched")
    found = differences(one, two)
    assert [(difference.line, difference.severity) for difference in found] == [
        ("torch: 2.12.0 on pc1; 2.13.0 on pc2", "fail"),
        ("jupyter: 1.0 on pc1; none on pc2", "warn"),
        ("numpy 2.4.6: other files", "warn"),
        ("peft: 1.0 on pc1; none on pc2", "warn"),
    ]
    with pytest.raises(CheckFailed, match="the environments of the hosts differ: torch") as caught:
        require_equal(found)
    assert "2.12.0 on pc1" in caught.value.seen
    require_equal(found[1:])


def test_builds_of_one_version_may_differ(tmp_path: Path) -> None:
    found = differences(own(tmp_path, "pc1", torch="2.13.0+cpu"), own(tmp_path, "pc2", torch="2.13.0+cu128"))
    assert [difference.severity for difference in found] == ["warn"]


def test_a_python_that_is_not_there_is_told_with_its_host(tmp_path: Path) -> None:
    host = Host(name="pc1", workdir=str(tmp_path), python=str(tmp_path / "none"), transport="ssh")
    with pytest.raises(Exception, match=r"pc1: .*No such file or directory"):
        differences(host)
