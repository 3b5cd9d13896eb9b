"""Locks: what a host needs of them, and what is no lock."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from gangline.errors import UsageError
from gangline.provision.requirements import load_lock, own_lock, read_lock


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        ('python_full_version >= "3.11.8"', False),
        ("python_version == '3.11'", True),
        ('sys_platform == "linux" and platform_machine == "x86_64"', True),
        ('sys_platform == "win32" or platform_system == "Linux"', True),
        ('(os_name == "nt" or os_name == "posix") and implementation_name == "cpython"', True),
        ('platform_machine in "x86_64 aarch64"', True),
        ('extra == "dev"', False),
    ],
)
def test_markers_are_answered_for_the_host_and_not_for_this_computer(marker: str, expected: bool) -> None:
    pins = read_lock(f"always==1\nsix==1.0 ; {marker}", "lock").pins_for((3, 11, 7), "x86_64")
    assert ("six" in {pin.name for pin in pins}) is expected


def test_each_python_gets_its_own_rows() -> None:
    lock = read_lock(
        'numpy==2.2.6 ; python_version < "3.11"\nnumpy==2.4.6 ; python_version >= "3.11"\nsix==1.0', "lock"
    )
    assert [pin.line for pin in lock.pins_for((3, 10, 2), "x86_64")] == ["numpy==2.2.6", "six==1.0"]
    assert [pin.line for pin in lock.pins_for((3, 13, 0), "x86_64")] == ["numpy==2.4.6", "six==1.0"]


def test_locks_of_the_usual_tools_are_understood() -> None:
    text = """\
# from uv
--extra-index-url https://example.org/whl/cpu
torch==2.13.0+cpu \\
    --hash=sha256:abc1 \\
    --hash=sha256:def2
    # via -r requirements.in
Typing_Extensions==4.16.0 ; python_version >= '3.10'  # via torch
httpx[http2]==0.28.1
"""
    lock = read_lock(text, "lock")
    assert [pin.line for pin in lock.pins] == ["torch==2.13.0+cpu", "typing-extensions==4.16.0", "httpx[http2]==0.28.1"]
    assert lock.pins[0].hashes == ("sha256:abc1", "sha256:def2")
    assert lock.options == ("--extra-index-url https://example.org/whl/cpu",)


def test_where_packages_come_from_does_not_change_the_hash_and_a_version_does() -> None:
    one = read_lock("a==1\nb==2", "lock")
    assert read_lock("--index-url https://me:secret@example.org\nb==2\n# a comment\na==1", "lock").hash == one.hash
    assert read_lock("a==1\nb==3", "lock").hash != one.hash


@pytest.mark.parametrize(
    "line",
    [
        "torch",
        "torch>=2.0",
        "-e .",
        "-r other.txt",
        "./wheel.whl",
        "git+https://x/y",
        "a==1 ; rm -rf",
        "a==1 ; me == 'x'",
        "a==1.*",
        "a==1,==2",
        "a @ https://x/y.whl",
        "-o=x",
        "a==1; b",
    ],
)
def test_a_line_without_a_version_is_named(line: str) -> None:
    with pytest.raises(UsageError, match=r"lock\.txt:2: ") as caught:
        read_lock(f"numpy==1.0\n{line}\n", "lock.txt")
    assert "torch==2.13.0" in caught.value.seen


def test_an_empty_or_absent_lock_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no packages"):
        read_lock("# nothing\n", "lock")
    with pytest.raises(UsageError, match="cannot be read"):
        load_lock(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "text",
    [
        "# platform: linux-64\n@EXPLICIT\nhttps://conda.anaconda.org/conda-forge/linux-64/zlib-1.3.1-hb9d3cd8_2.conda\n",
        "name: train\nchannels:\n  - conda-forge\ndependencies:\n  - python=3.11\n",
        "version: 1\npackage:\n- name: zlib\n  version: 1.3.1\n  manager: conda\n  platform: linux-64\n",
    ],
    ids=["explicit", "environment.yml", "conda-lock.yml"],
)
def test_a_file_of_conda_is_refused_with_what_to_do(text: str) -> None:
    with pytest.raises(UsageError, match=r"a\.lock is a file of conda") as caught:
        read_lock(text, "a.lock")
    assert "environment: {conda: /opt/train}" in caught.value.fix


def test_packages_that_belong_to_conda_by_name_are_packages() -> None:
    assert len(read_lock("conda-inject==1.3.2\n# dependencies: none\ntorch==2.13.0\n", "a.lock").pins) == 2


def test_ganglines_own_lock_is_made_from_its_constraints() -> None:
    root = Path(__file__).parents[3]
    if not (root / "constraints.txt").exists():
        pytest.skip("not a clone")
    lines = (root / "constraints.txt").read_text().splitlines()
    constrained = {}
    for line in lines:
        if line and not line.startswith("#"):
            constrained.setdefault(canonicalize_name(line.partition("==")[0]), set()).add(
                line.partition("==")[2].split()[0]
            )
    pinned = {}
    for pin in own_lock().pins:
        pinned.setdefault(pin.name, set()).add(pin.version)
    assert {name: versions for name, versions in pinned.items() if constrained.get(name, versions) != versions} == {}
    assert {"torch", "transformers", "peft", "datasets", "safetensors", "tensorboard"} <= set(pinned)
    assert not {"pytest", "ruff", "mypy"} & set(pinned)


@pytest.mark.parametrize("version", [(3, minor, 0) for minor in range(10, 15)])
def test_ganglines_own_lock_has_one_version_of_each_package_for_every_python(version: tuple[int, int, int]) -> None:
    names = [pin.name for pin in own_lock().pins_for(version, "x86_64")]
    assert len(names) == len(set(names))
    assert "torch" in names


def test_other_hashes_of_the_same_versions_are_another_environment() -> None:
    one = read_lock("a==1 --hash=sha256:abc1 --hash=sha256:def2", "lock")
    assert read_lock("a==1 --hash=sha256:def2 --hash=sha256:abc1", "lock").hash == one.hash
    assert read_lock("a==1 --hash=sha256:abc1", "lock").hash != one.hash
    assert read_lock("a==1", "lock").hash != one.hash
