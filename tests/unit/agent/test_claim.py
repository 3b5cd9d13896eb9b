"""A folder of ours is ours: whatever somebody else has put in its place, and whenever he does it (S11)."""

import json
import os
import random
import stat
import sys
from pathlib import Path

import pytest

from gangline.agent.host_facts.paths import strangers
from gangline.agent.provision import claim as verb
from gangline.agent.provision.claim import claim
from gangline.agent.verbs import VerbFailed, answer

STRANGER = 42043
as_root = pytest.mark.skipif(os.getuid() != 0, reason="takes root, to be two users")


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def square(tmp_path):
    """A folder in which everybody may make something and nobody remove what is not his, like /tmp."""
    path = tmp_path / "square"
    path.mkdir()
    path.chmod(0o1777)
    return path


def refusal(path):
    with pytest.raises(VerbFailed) as failed:
        claim(str(path))
    return failed.value.record


def belongs_to_a_stranger(path):
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    return path


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_is_missing_is_made_for_its_owner_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        claim(str(tmp_path / "a" / "b" / "work"))
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("a", "a/b", "a/b/work")] == [0o700] * 3
    claim(str(tmp_path / "a" / "b" / "work"))


def test_a_folder_that_others_may_read_stays_as_it_is(tmp_path):
    (tmp_path / "work").mkdir(mode=0o755)
    claim(str(tmp_path / "work"))
    assert mode(tmp_path / "work") == 0o755


def test_a_link_of_ones_own_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/../disk")
    claim(str(tmp_path / "link" / "work"))
    assert (tmp_path / "disk" / "work").is_dir()


def test_a_folder_that_everybody_may_write_is_refused(square):
    said = refusal(square)
    assert said["seen"] == f"anybody may write to {square}"
    assert "workdir" in said["fix"]


def test_a_file_in_its_place_and_links_in_a_ring_are_told(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "ring").symlink_to("ring")
    assert refusal(tmp_path / "file" / "work")["what"] == f"{tmp_path}/file/work cannot be made"
    refusal(tmp_path / "ring" / "work")


STRANGE = {
    "the folder": lambda square, own: (square / "work").mkdir() or belongs_to_a_stranger(square / "work"),
    "a link to a folder of ours": lambda square, own: (
        (square / "work").symlink_to(own) or belongs_to_a_stranger(square / "work")
    ),
    "a link to nowhere": lambda square, own: (
        (square / "work").symlink_to(own / "new") or belongs_to_a_stranger(square / "work")
    ),
    "a folder above it": lambda square, own: (
        (square / "up" / "work").mkdir(parents=True) or belongs_to_a_stranger(square / "up")
    ),
    "a link above it": lambda square, own: (square / "up").symlink_to(own) or belongs_to_a_stranger(square / "up"),
}


@as_root
@pytest.mark.parametrize("kind", STRANGE)
def test_what_a_stranger_has_put_there_is_refused_by_his_name(square, tmp_path, kind):
    own = tmp_path / "own"
    own.mkdir()
    STRANGE[kind](square, own)
    place = square / "up" / "work" if "above" in kind else square / "work"
    said = refusal(place)
    assert said["what"] == f"{place} is not yours alone"
    assert f"user {STRANGER}" in said["seen"]
    assert strangers(str(place)).owner == said["seen"]
    assert list(own.iterdir()) == []


@as_root
def test_the_owner_of_a_disk_is_pointed_out_and_trusted(tmp_path):
    belongs_to_a_stranger(tmp_path).chmod(0o755)
    claim(str(tmp_path / "work"))
    assert (
        strangers(str(tmp_path / "work")).may_replace
        == f"{tmp_path} belongs to user {STRANGER}, who may replace what is in it"
    )


@as_root
def test_in_a_container_root_outside_is_nobody_and_is_trusted(square, tmp_path, monkeypatch):
    (square / "work").mkdir()
    os.chown(square / "work", 65534, 65534)
    assert strangers(str(square / "work" / "own")).owner is not None
    monkeypatch.setattr("gangline.agent.host_facts.paths.UID_MAP", tmp_path / "uid_map")
    (tmp_path / "uid_map").write_text("  0  1000  1\n")
    assert strangers(str(square / "work" / "own")) == (None, None, False)
    (tmp_path / "uid_map").write_text("         0          0 4294967295\n")
    assert strangers(str(square / "work" / "own")).owner is not None


def test_a_folder_where_everybody_may_replace_everything_is_pointed_out(square):
    square.chmod(0o777)
    claim(str(square / "work"))
    assert strangers(str(square / "work")).may_replace == f"anybody may replace what is in {square}"


class Racer:
    """A stranger who does something at random before every system call of ours."""

    def __init__(self, square, victim, *, seed):
        self.square = os.open(square, os.O_RDONLY)
        self.victim = str(victim)
        self.chance = random.Random(seed)
        self.deeds = 0

    def act(self):
        """As that user, in the one folder where he may."""
        deed = self.chance.choice(
            [self.nothing, self.link, self.folder, self.unlink, self.rmdir, self.aside, self.back]
        )
        os.seteuid(STRANGER)
        try:
            deed()
            self.deeds += deed != self.nothing
        except OSError:
            pass
        finally:
            os.seteuid(0)

    def nothing(self):
        pass

    def link(self):
        os.symlink(self.victim, "work", dir_fd=self.square)

    def folder(self):
        os.mkdir("work", 0o777, dir_fd=self.square)

    def unlink(self):
        os.unlink("work", dir_fd=self.square)

    def rmdir(self):
        os.rmdir("work", dir_fd=self.square)

    def aside(self):
        os.rename("work", "aside", src_dir_fd=self.square, dst_dir_fd=self.square)

    def back(self):
        os.rename("aside", "work", src_dir_fd=self.square, dst_dir_fd=self.square)


@as_root
@pytest.mark.parametrize("name", ["work", "work/deep"])
def test_of_1000_races_a_stranger_wins_none(square, tmp_path, name, monkeypatch):
    """Between any two of our steps he puts a folder or a link of his own there, or takes it away."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    racer = Racer(square, victim, seed=name)

    def raced(real):
        return lambda *args, **options: racer.act() or real(*args, **options)

    for owner, step in ((Path, "lstat"), (Path, "mkdir"), (os.path, "lexists"), (os, "readlink")):
        monkeypatch.setattr(owner, step, raced(getattr(owner, step)))
    outcomes = [race(square / name, turn) for turn in range(500)]
    monkeypatch.undo()
    assert list(victim.iterdir()) == []
    assert racer.deeds > 1000
    assert set(outcomes) == {"claimed", "refused"}


def race(place, turn):
    """What came of it; what was claimed is ours, whatever he does from now on."""
    try:
        claim(str(place))
    except VerbFailed:
        clear(place)
        return "refused"
    (place / "token").write_text(str(turn))
    for each in (place, place / "token"):
        assert is_ours(each)
    clear(place)
    return "claimed"


def clear(place):
    """Take away what is ours, so that the stranger has his turn."""
    work = place if place.name == "work" else place.parent
    for path in (work / "deep" / "token", work / "token"):
        path.unlink(missing_ok=True) if is_ours(path) else None
    for path in (work / "deep", work):
        if is_ours(path):
            path.rmdir()


def is_ours(path):
    """Looked at without the calls before which the racer acts."""
    try:
        statuses = [os.stat(each, follow_symlinks=False) for each in (path.parent, path)]  # noqa: PTH116
    except OSError:
        return False
    return all(status.st_uid == 0 and not stat.S_ISLNK(status.st_mode) for status in statuses)


def test_the_verb_answers_for_all_folders(tmp_path, monkeypatch, capsys):
    for folders, code in (([tmp_path / "a", tmp_path / "b"], 0), ([tmp_path / "a", Path("/proc/1/work")], 1)):
        request = tmp_path / "request"
        request.write_text(json.dumps({"folders": list(map(str, folders))}))
        with request.open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert answer(verb.claim_folders) == code
        assert json.loads(capsys.readouterr().out)["kind"] == ("error" if code else "result")
