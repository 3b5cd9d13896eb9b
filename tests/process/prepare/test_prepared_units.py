"""Units that `gangline prepare` writes, read by systemd itself. Nothing is mounted: the facts are simulated."""

import shutil
import subprocess
from pathlib import Path

import pytest

from gangline.agent.prepare.revert_timer import AT_BOOT
from tests.unit.prepare.test_nfs_share import planned, texts

VERIFY = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no"]


def verified(*paths):
    """What systemd has to say against these units."""
    if shutil.which(VERIFY[0]) is None:
        pytest.skip("no systemd-analyze here")
    done = subprocess.run([*VERIFY, *map(str, paths)], capture_output=True, text=True, timeout=60)
    names = [Path(path).name for path in paths]
    said = [line for line in done.stderr.splitlines() if any(name in line for name in names)]
    return said or ([done.stderr] if done.returncode else [])


def test_the_units_of_a_shared_folder(tmp_path):
    units = [tmp_path / Path(path).name for path in texts(planned(2))]
    for unit, text in zip(units, texts(planned(2)).values(), strict=True):
        unit.write_text(text)
    assert verified(*units) == []
    units[0].write_text(units[0].read_text().replace("Where=/srv/my-models", "Where=/srv/other"))
    assert verified(*units) != []


def test_the_unit_that_takes_a_change_back_at_boot(tmp_path):
    unit = tmp_path / "gangline-revert-t1.service"
    words = {"after": "ssh.service", "python": "/bin/true", "program": "/x", "folder": "/y", "txn": "t1", "root": "/"}
    unit.write_text(AT_BOOT.format(**words))
    assert verified(unit) == []
