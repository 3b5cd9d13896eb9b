"""What an environment holds: as the standard library names it, without reading what a package tells about itself."""

import re
import subprocess
import sys
from importlib import metadata

import pytest

from gangline.agent.provision.contents import known_as


class Played:
    """A distribution with the files that a test wants."""

    def __init__(self, **files):
        self.files = files

    def read_text(self, name):
        return self.files.get(name.replace("-", "_") or "alone")


def test_every_package_here_is_named_as_the_standard_library_names_it():
    found = list(metadata.distributions())
    assert len(found) > 5
    for one in found:
        assert known_as(one) == (one.metadata["Name"], one.version)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"METADATA": "Metadata-Version: 2.1\nName: a\nVersion: 1.0\n\nName: not this\n"}, ("a", "1.0")),
        ({"METADATA": "name:  a b \nVERSION:\t2\nSummary: Name: c\n"}, ("a b", "2")),
        ({"METADATA": "Name: first\nName: second\nVersion: 1\n"}, ("first", "1")),
        ({"PKG_INFO": "Name: egg\nVersion: 3\n"}, ("egg", "3")),
        ({"alone": "Name: old\nVersion: 4\n"}, ("old", "4")),
        ({"METADATA": "Version: 1\n"}, (None, "1")),
        ({}, (None, None)),
    ],
)
def test_odd_ones_are_read_as_far_as_they_go(files, expected):
    assert known_as(Played(**files)) == expected


def test_the_first_on_the_path_counts(tmp_path):
    """As a Python of its own prints it."""
    for folder, version in (("one", "1.0"), ("two", "2.0")):
        place = tmp_path / folder / f"some_thing-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Name: Some_Thing\nVersion: {version}\n")
    path = f"{tmp_path / 'one'}:{tmp_path / 'two'}"
    program = [sys.executable, "-S", "-m", "gangline.agent.provision.contents"]
    done = subprocess.run(program, capture_output=True, text=True, env={"PYTHONPATH": f"{path}:{_source()}"})
    assert re.search(r'"some-thing": \["1\.0", null\]', done.stdout), done.stderr


def _source():
    import gangline

    return gangline.__path__[0].rpartition("/")[0]
