"""Hostfiles in the manner of DeepSpeed and MPI."""

import pytest

from gangline.config.document import looks_like_hostfile, name_of, parse_hostfile
from gangline.errors import SpecError


def parsed(text):
    document = parse_hostfile(text, "hostfile")
    document.mistakes.raise_if_any()
    return document.values["hosts"]


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("node1 slots=8", {"name": "node1", "slots": 8}),
        ("node1 slots=8 ib0", {"name": "node1", "slots": 8, "interface": "ib0"}),
        (
            "node1 slots=8 NCCL_SOCKET_IFNAME=ib0",
            {"name": "node1", "slots": 8, "env": {"NCCL_SOCKET_IFNAME": "ib0"}},
        ),
        (
            "10.0.0.7\tslots=8  ib0 A=1 B=x=y",
            {"name": "10.0.0.7", "slots": 8, "interface": "ib0", "env": {"A": "1", "B": "x=y"}},
        ),
        ("node1 slots = 8", {"name": "node1", "slots": 8}),
        ("node1", {"name": "node1"}),
        ("node1:8", {"name": "node1", "slots": 8}),
        ("alice@node1 slots=8", {"name": "node1", "ssh": "alice@node1", "slots": 8}),
        ("alice@10.0.0.7:2", {"name": "10.0.0.7", "ssh": "alice@10.0.0.7", "slots": 2}),
        ("fd00::1:2 slots=8", {"name": "fd00-1-2", "ssh": "fd00::1:2", "slots": 8}),
        ("  node1 slots=8   # the big one", {"name": "node1", "slots": 8}),
        ("node1 slots=8 http_proxy=http://p:1", {"name": "node1", "slots": 8, "env": {"http_proxy": "http://p:1"}}),
    ],
)
def test_a_line_is_a_host(line, host):
    assert parsed(line) == [host]


def test_comments_and_blank_lines_are_passed_over():
    text = "# gangs\n\nnode1 slots=8\r\n   \nnode2 slots=4 # half\n"
    assert parsed(text) == [{"name": "node1", "slots": 8}, {"name": "node2", "slots": 4}]


def test_words_know_their_place():
    document = parse_hostfile("# x\n  node1   slots=8 ib0 A=1", "hf")
    places = {key: str(document.position(("hosts", 0, key))) for key in ("name", "slots", "interface", "env")}
    assert places == {"name": "hf:2:3", "slots": "hf:2:11", "interface": "hf:2:19", "env": "hf:2:23"}


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("n slots=0", "slots=0"),
        ("n slots=-1", "slots=-1"),
        ("n slots=eight", "slots=eight"),
        ("n slots=", "slots="),
        ("n slots=²", "slots=²"),
        ("n slots=99999999999", "slots="),
        ("n slots=1 slots=2", "second time"),
        ("n:1 slots=2", "second time"),
        ("n:0", "slots=0"),
        ("n slots=1 max_slots=2", "max_slots"),
        ("n slot=1", "slot"),
        ("n slots=1 ib0 ib1", "second interface"),
        ("n slots=1 -x", "-x"),
        ("n slots=1 A=1 A=2", "A for the second time"),
        ("n slots=1 =3", '""'),
        ("n slots", "slots="),
    ],
)
def test_what_is_no_word_of_a_hostfile(line, seen):
    with pytest.raises(SpecError) as caught:
        parsed(line)
    assert seen in caught.value.seen
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "named_yaml", "expected"),
    [
        ("node1 slots=8", True, True),
        ("node1 slots = 8", True, True),
        ("node1\nnode2", False, True),
        ("", False, True),
        ("hosts:\n  - a", True, False),
        ("hosts:\n  - a", False, False),
        ("# x\n\nname: lab\nhosts: []", False, False),
        ('{"hosts": []}', False, False),
        ("node1", True, False),
        ("name: slots=3", True, False),
    ],
)
def test_hostfile_or_yaml(text, named_yaml, expected):
    assert looks_like_hostfile(text, named_yaml=named_yaml) is expected


@pytest.mark.parametrize(
    ("destination", "name"),
    [
        ("pc1", "pc1"),
        ("alice@pc1", "pc1"),
        ("fe80::1%eth0", "fe80-1"),
        ("::1", "1"),
        ("-x@y", "-x@y"),
        ("a@b@c", "a@b@c"),
    ],
)
def test_what_a_host_is_called_that_ssh_reaches_so(destination, name):
    assert name_of(destination) == name
