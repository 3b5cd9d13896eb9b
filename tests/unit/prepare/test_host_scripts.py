"""The script of a host: every word quoted, every content apart from the shell, nothing where nothing changes."""

import base64
import hashlib
import re

import pytest

from gangline.errors import UsageError
from gangline.prepare.export_folder import require_new_folder, write_files
from gangline.prepare.host_scripts import MACHINE_ID, host_script
from gangline.prepare.prepare_step import CommandChange, FileChange, FileRead, HostReading, StepPlan

READING = HostReading(
    user="alice",
    uid=1000,
    home="/home/alice",
    files={MACHINE_ID: FileRead(content=b"0123\n")},
    folders={},
    commands={},
    programs={},
)


def script(*changes, **options):
    return host_script("pc1", {"names": StepPlan(changes=changes, **options)}, READING)


def test_a_host_without_changes_has_no_script():
    assert host_script("pc1", {"names": StepPlan(remains=("do it by hand",))}, READING) == ""


def test_words_are_quoted_and_probes_have_their_answers():
    change = CommandChange(
        argv=("hostname", "a b; $(touch x)"), undo=("hostname", "it's"), probe=("uname", "-n"), before="one\ntwo"
    )
    text = script(change)
    assert "local probe=(uname -n) run=(hostname 'a b; $(touch x)') back=(hostname 'it'\"'\"'s')" in text
    assert "program \"$1\" names 1 $'one\\ntwo' '?'" in text
    assert "steps=(names:root:1:0)" in text
    assert "machine=0123" in text


def test_a_content_stands_apart_and_its_difference_in_comments():
    content = b"END\n$(touch x)\n\x1b[31mred\n"
    text = script(FileChange(path="/etc/a b", before=None, content=content, mode=0o600), reason="so that")
    digest = hashlib.sha256(content).hexdigest()
    assert f"content \"$1\" names 1 '/etc/a b' absent {digest} 600 755 <<'END'" in text
    assert base64.b64encode(content).decode() in text
    assert "# why: so that" in text
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if "touch x" in line] == ["#   +$(touch x)"]


def test_a_step_of_both_root_and_user_has_two_parts_and_its_timer():
    mine = CommandChange(argv=("true",), undo=(), scope="user")
    text = script(mine, CommandChange(argv=("true",), undo=()), revert_s=60.0)
    assert "steps=(names:user:1:60 names:root:1:60)" in text
    assert re.findall(r"^(change_\w+)\(\)", text, re.MULTILINE) == ["change_user_names_1", "change_root_names_1"]


def test_files_go_into_a_new_folder_only(tmp_path):
    folder = tmp_path / "scripts"
    require_new_folder(folder)
    write_files(folder, {"a.sh": "echo\n", "files/pc1/b": b"\xff"})
    assert (folder / "files/pc1/b").read_bytes() == b"\xff"
    assert (folder / "a.sh").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match=r"scripts is there already"):
        require_new_folder(folder)
