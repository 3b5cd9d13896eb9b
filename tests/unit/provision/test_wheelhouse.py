"""Wheels that nobody used for a while are deleted; those in use never."""

import os
import threading
import time

import pytest

from gangline.provision.wheelhouse import KEPT_S, WHOLE, delete_unused, locked, mark_used
from tests.unit.provision.hosts import Lines


@pytest.fixture
def house(tmp_path):
    return tmp_path / "home" / "wheelhouse"


def fill(house, name, *, age_s=0.0, whole=True):
    folder = house / name
    folder.mkdir(parents=True)
    (folder / "torch.whl").write_bytes(b"w" * 2048)
    for path in ((folder / WHOLE), folder) if whole else (folder,):
        if path != folder:
            path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def names(house):
    return sorted(path.name for path in house.iterdir())


def test_what_was_used_lately_stays_and_the_rest_goes(house):
    fill(house, "new", age_s=KEPT_S - 60)
    fill(house, "old", age_s=KEPT_S + 60)
    fill(house, ".interrupted.4711", age_s=KEPT_S + 60, whole=False)
    fill(house, ".under-way.4712", whole=False)
    lines = Lines()
    delete_unused(house, console=lines)
    assert names(house) == [".under-way.4712", "new"]
    assert lines.said == [f"wheels that were not used for 30 days deleted: 4 KiB in {house}"]
    delete_unused(house, console=lines)
    assert len(lines.said) == 1


def test_what_is_used_again_is_kept_for_another_while(house):
    folder = fill(house, "old", age_s=KEPT_S + 60)
    assert mark_used(folder)
    delete_unused(house)
    assert names(house) == ["old"]


def test_what_is_not_whole_cannot_be_used(house):
    assert not mark_used(house / "new")
    fill(house, "half", whole=False)
    assert not mark_used(house / "half")
    assert names(house) == ["half"]


def test_nothing_is_deleted_while_somebody_looks_whether_it_is_there(house):
    folder = fill(house, "old", age_s=KEPT_S + 60)
    with locked(house):
        deleting = threading.Thread(target=delete_unused, args=(house,), daemon=True)
        deleting.start()
        os.utime(folder / WHOLE)  # by the one who looks
    deleting.join(20)
    assert not deleting.is_alive()
    assert names(house) == ["old"]
