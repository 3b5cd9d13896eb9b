"""Wheels that nobody used for a while are deleted; those in use never."""

import fcntl
import os
import threading
import time

import pytest

from gangline.sync.unused import KEPT_S, delete_unused, lock_of, mark_used
from tests.unit.sync.hosts import Lines


@pytest.fixture
def house(tmp_path):
    return tmp_path / "home" / "wheelhouse"


def fill(house, name, *, age_s=0.0, whole=True):
    folder = house / name
    folder.mkdir(parents=True)
    (folder / "torch.whl").write_bytes(b"w" * 2048)
    for path in ((folder / "whole"), folder) if whole else (folder,):
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
    delete_unused(house, "whole", tell=lines)
    assert names(house) == [".under-way.4712", "new"]
    assert lines.said == [f"wheels that were not used for 30 days deleted: 4 KiB in {house}"]
    delete_unused(house, "whole", tell=lines)
    assert len(lines.said) == 1


def test_what_is_used_again_is_kept_for_another_while(house):
    folder = fill(house, "old", age_s=KEPT_S + 60)
    assert mark_used(folder / "whole")
    delete_unused(house, "whole")
    assert names(house) == ["old"]


def test_what_is_not_whole_cannot_be_used(house):
    assert not mark_used(house / "new" / "whole")
    fill(house, "half", whole=False)
    assert not mark_used(house / "half" / "whole")
    assert names(house) == ["half"]


def test_nothing_is_deleted_while_somebody_looks_whether_it_is_there(house):
    folder = fill(house, "old", age_s=KEPT_S + 60)
    descriptor = os.open(lock_of(house), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    deleting = threading.Thread(target=delete_unused, args=(house, "whole"), daemon=True)
    deleting.start()
    assert mark_used(folder / "whole")  # by the one who looks
    os.close(descriptor)
    deleting.join(20)
    assert not deleting.is_alive()
    assert names(house) == ["old"]
