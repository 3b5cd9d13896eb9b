"""Known words are recognised in real lines, a line tells one thing, and echoes are told from causes."""

from __future__ import annotations

import re

import pytest

from gangline.checks.judge import FAMILIES
from gangline.diagnose.log_search import LINE_CHARS, LogSearch, recognise
from gangline.diagnose.signatures import SIGNATURES, Signature, head_of, is_witness, matches, verdict
from tests.unit.diagnose.lines import LINES


def test_every_signature_has_its_line_and_there_are_many() -> None:
    assert sorted(LINES) == sorted(SIGNATURES)
    assert len(SIGNATURES) >= 25


@pytest.mark.parametrize("name", LINES)
def test_a_real_line_is_recognised_as_what_it_is(name: str) -> None:
    (sighting,) = recognise(f"before\n{LINES[name]}\nafter\n")
    assert (sighting.id, sighting.number, sighting.times) == (name, 2, 1)
    assert sighting.line == LINES[name].strip()
    assert sighting.means
    assert sighting.fix
    assert "{" not in sighting.means + sighting.fix


def test_of_two_that_match_the_same_words_the_one_with_more_plain_characters_counts() -> None:
    line = b"ModuleNotFoundError: No module named 'pkg_resources'"
    any_module = Signature(
        patterns=(r"ModuleNotFoundError: No module named '(\w{1,80})'",), means="any", fix="install it"
    )
    this_one = Signature(
        patterns=("ModuleNotFoundError: No module named 'pkg_resources'",), means="this", fix="older tools"
    )
    for known in ({"any": any_module, "this": this_one}, {"this": this_one, "any": any_module}):
        search = LogSearch(known=known)
        search.feed(line)
        assert [each.id for each in search.finish()] == ["this"]


def test_all_words_of_a_signature_have_the_groups_that_its_texts_need() -> None:
    for name, signature in SIGNATURES.items():
        counts = {re.compile(pattern).groups for pattern in signature.patterns}
        assert len(counts) == 1, name
        filled = (signature.means + signature.fix).format(*["x"] * counts.pop(), host="pc1")
        assert "{" not in filled


def test_findings_that_texts_name_exist() -> None:
    named = {name for each in SIGNATURES.values() for name in re.findall(r"E-[A-Z]+-\d+", each.means + each.fix)}
    assert named
    assert named <= {rule.id for family in FAMILIES.built_in.values() for rule in family}


def test_what_was_asked_for_and_where_is_in_the_words() -> None:
    (memory,) = recognise(LINES["gpu-memory"])
    assert memory.means == "a GPU had no room for 2.00 GiB more"
    (port,) = recognise(LINES["port-taken"], host="pc1")
    assert port.means == "another program took port 29500 of pc1, where the ranks were to meet"


def test_words_are_told_in_the_order_of_the_file_with_how_often_they_stand_there() -> None:
    text = "\n".join([LINES["reset"], LINES["no-space"], LINES["reset"], LINES["reset"]])
    assert [(each.id, each.number, each.times) for each in recognise(text)] == [("reset", 1, 3), ("no-space", 2, 1)]


def test_a_mesh_over_several_lines_is_one_cause_and_no_echo_beside_it() -> None:
    text = "Gloo connectFullMesh failed with\n  Connection refused,\n  remote=[10.0.0.1]:4711$0\nthe end"
    assert [each.id for each in recognise(text)] == ["mesh"]


def test_a_healthy_log_tells_nothing() -> None:
    text = (
        "step 1/400  loss 6.25\n[c10d] The hostname of the client socket cannot be retrieved. err=-3\nsaved step 100\n"
    )
    assert recognise(text) == []


def test_a_long_line_is_cut() -> None:
    (sighting,) = recognise(f"No space left on device {'x' * 10_000}")
    assert len(sighting.line) == LINE_CHARS


NEAR = "connectFullMesh failed remote  Killed by nobody  exitcode: 1  failed to listen on any local network address. "
APART = [f"connectFullMesh failed{'x' * gap}remote=[10.0.0.1]" for gap in (0, 1999, 2000, 2001, 5000)]
TEXTS = {
    **LINES,
    "all lines": "\n".join(LINES.values()),
    "all lines in one": " ".join(LINES.values()),
    "nearly known": f"{NEAR * 20}\n{LINES['mesh']}\n{NEAR * 20}",
    "apart": "\n".join([*APART, *reversed(APART)]),
    "heads without an end": "connectFullMesh failed " * 200 + "remote=[127.0.0.1]",
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_search_for_plain_characters_first_finds_what_the_expressions_find(name: str) -> None:
    for signature in SIGNATURES.values():
        plainly = [found for pattern in signature.patterns for found in re.finditer(pattern, TEXTS[name], re.DOTALL)]
        assert [match.span() for match in matches(signature, TEXTS[name])] == [match.span() for match in plainly]


def test_every_expression_begins_with_plain_characters() -> None:
    heads = {pattern: head_of(pattern) for signature in SIGNATURES.values() for pattern in signature.patterns}
    assert {pattern: head for pattern, head in heads.items() if len(head) < 3} == {}
    assert head_of(r"exitcode *: -9 \(") == "exitcode"
    assert head_of(r"Signal 9 \(SIGKILL\) received") == "Signal 9 (SIGKILL) received"
    assert head_of(r"a(b|c)") == "a"


@pytest.mark.parametrize("name", LINES)
def test_witnesses_are_those_that_the_table_marks(name: str) -> None:
    marked = {name for name, signature in SIGNATURES.items() if signature.is_echo}
    # a cause that quotes a broken connection counts as a witness where nobody knows more: its verdict says what it means
    both = {"mesh-loopback", "port-taken", "ssh-closed"}
    assert is_witness(LINES[name]) == (name in marked | both)


def test_a_verdict_needs_words_that_are_the_whole_cause() -> None:
    assert verdict(LINES["gpu-memory"], host="pc1") is None
    what, fix = verdict(LINES["mesh-loopback"], host="pc1") or ("", "")
    assert what.startswith("another rank gave 127.0.1.1")
    assert "GLOO_SOCKET_IFNAME" in fix
