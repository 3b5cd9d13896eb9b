"""The families of known failures: every row is well made, knows a log that it was not written from, and nothing alike."""

from __future__ import annotations

import random
import re

import pytest

from gangline.checks.judge import FAMILIES
from gangline.diagnose.corpus import ERRORS, RANKS, families, known_failures
from gangline.diagnose.log_search import LogSearch, Sighting, whole_words
from gangline.diagnose.signatures import LEVELS, Signature, matches
from tests.unit.diagnose.excerpts import FOLDER, MADE_UP, excerpts
from tests.unit.test_house_rules import BANNED_TEXT

ROWS = {family: tuple(rows) for family, rows in families().items() if family != RANKS}
"""Names by family. A test takes a family at a time: one for each of 900 rows took pytest longer than the rows."""
BLAMED = {
    "this rank", "another rank", "network", "host", "script", "data", "software", "outside", "nobody",
}  # fmt: skip
HARMFUL = (
    *BANNED_TEXT, r"systemctl (stop|disable) (firewalld|ufw)", r"iptables -F", r"setenforce 0", r"SELINUX=disabled",
    r"--break-system-packages", r"sudo pip", r"pkill -9", r"killall", r"kill -9 -1", r"rm -rf /(?!\S)", r"verify ?= ?False",
    r"CURL_CA_BUNDLE=[\"']?[\"' ]", r"GIT_SSL_NO_VERIFY", r"http\.sslVerify", r"--trusted-host", r"--privileged", r"NCCL_TIMEOUT",
    r"PYTHONHTTPSVERIFY", r"PermitRootLogin yes", r"PasswordAuthentication yes", r"dd if=", r"mkfs", r"hdparm",
    r"overcommit_memory ?= ?1", r"drop_caches", r"KMP_DUPLICATE_LIB_OK", r"nvidia-smi --gpu-reset", r"swapoff -a", r"ALLOW_UNSAFE",
    r"--force-reinstall --no-deps", r"ignore_mismatched_sizes ?= ?True", r"trust_remote_code ?= ?True(?!.{0,80}revision)",
    r"NVIDIA-Linux\S*\.run", r"chown -R \S+ /(?!\S)",
)  # fmt: skip
"""Advice that does harm: no `fix` may give it."""
SOURCE = re.compile(r"https?://\S+|made here: (?=[^\n]*\d)[\w.+ -]{5,60}")
"""Where words were seen: an address, or a program that was made to fail here, with its version."""
UNBOUNDED = re.compile(r"(?<!\\)(?:\.|\]|\))(?:[*+](?!\d)|\{\d*,\})")
"""A repetition of anything, of a class or of a group, without an upper bound."""


def row(name: str) -> Signature:
    return known_failures()[name]


def found_in(text: str) -> list[Sighting]:
    search = LogSearch()
    search.feed(text.encode())
    return search.finish()


def test_ids_are_unique_and_written_alike() -> None:
    names = [name for rows in families().values() for name in rows]
    assert sorted(names) == sorted(set(names))
    assert [name for name in names if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []


def test_every_family_has_its_excerpts_and_every_excerpt_its_row() -> None:
    assert {family: {*rows} for family, rows in excerpts().items()} == {name: {*rows} for name, rows in ROWS.items()}


def faults_of(family: str, signature: Signature) -> list[str]:
    """What is not well made in a row."""
    first = re.compile(signature.patterns[0])
    texts = (signature.means, signature.fix, signature.confirm)
    faults = {
        "its level": signature.level not in LEVELS,
        "whom it blames": signature.blames not in BLAMED,
        "its sources": not signature.sources or not all(SOURCE.fullmatch(each) for each in signature.sources),
        "patterns with unlike groups": len({re.compile(pattern).groups for pattern in signature.patterns}) != 1,
        "a pattern that begins with no whole word of four letters": family != ERRORS
        and not all(whole_words(pattern) for pattern in signature.patterns),
        "a pattern that repeats without a bound": any(UNBOUNDED.search(pattern) for pattern in signature.patterns),
        "a group that no text has": any("{" in text.format(*["x"] * first.groups, host="pc1") for text in texts),
        "no meaning or no fix": not signature.means or not signature.fix,
        "a full stop after its meaning": signature.means.endswith("."),
    }
    return [fault for fault, is_there in faults.items() if is_there]


@pytest.mark.parametrize("family", ROWS)
def test_rows_are_well_made(family: str) -> None:
    faults = {name: faults_of(family, row(name)) for name in ROWS[family]}
    assert {name: found for name, found in faults.items() if found} == {}


def test_what_is_not_well_made_is_named() -> None:
    bad = Signature(patterns=("of .*", "of (x)"), means="it broke.", fix="", blames="you")
    assert len(faults_of("cuda", bad)) == 7


@pytest.mark.parametrize("family", ROWS)
def test_a_real_excerpt_is_explained_by_its_row_first(family: str) -> None:
    first = {name: [each.id for each in found_in(excerpts()[family][name]["seen"])][:1] for name in ROWS[family]}
    assert {name: found for name, found in first.items() if found != [name]} == {}


@pytest.mark.parametrize("family", ROWS)
def test_an_excerpt_says_where_it_was_seen(family: str) -> None:
    seen_at = {name: excerpts()[family][name]["seen_at"] for name in ROWS[family]}
    lists = r"https://github\.com/[^/]+/[^/]+/(issues|pulls|discussions)/?"
    wrong = {
        name: where
        for name, where in seen_at.items()
        if (not SOURCE.fullmatch(where) or re.fullmatch(lists, where))
        and not (where == MADE_UP and family in {"general", "exits", ERRORS})
    }
    assert wrong == {}


@pytest.mark.parametrize("family", ROWS)
def test_what_looks_alike_is_not_taken_for_it(family: str) -> None:
    near = {name: [each.id for each in found_in(excerpts()[family][name]["near"])] for name in ROWS[family]}
    assert [name for name, found in near.items() if name in found] == []


def test_no_row_gives_harmful_advice() -> None:
    advice = {name: f"{each.fix}\n{each.confirm}" for name, each in known_failures().items()}
    found = {name: [each for each in HARMFUL if re.search(each, text)] for name, text in advice.items()}
    assert {name: each for name, each in found.items() if each} == {}


def test_harmful_advice_would_be_found() -> None:
    assert len(HARMFUL) >= 40
    assert any(re.search(each, "chmod -R " + "777 folder") for each in HARMFUL)
    assert any(re.search(each, "weights_only" + "=False") for each in HARMFUL)


def test_findings_that_rows_name_exist() -> None:
    rules = {rule.id for family in FAMILIES.built_in.values() for rule in family}
    for name, signature in known_failures().items():
        named = set(re.findall(r"E-[A-Z]+-\d+", signature.means + signature.fix + signature.confirm))
        assert named <= rules, name


def test_what_the_search_by_words_finds_is_what_all_patterns_find() -> None:
    known = {name: each for name, each in known_failures().items() if name not in families()[ERRORS]}
    for rows in excerpts().values():
        for excerpt in rows.values():
            for text in (excerpt["seen"], excerpt["near"]):
                plainly = {name for name, each in known.items() if any(True for _ in matches(each, text))}
                found = {each.id for each in found_in(text)} - set(families()[ERRORS])
                assert found <= plainly
                assert bool(found) == bool(plainly), text


def test_logs_with_random_damage_are_read() -> None:
    """Cut, doubled and mixed excerpts with bytes that are no text: whatever is found is a known failure."""
    dice = random.Random(0)
    texts = [excerpt["seen"].encode() for rows in excerpts().values() for excerpt in rows.values()]
    for _ in range(300):
        first, second = dice.choice(texts), dice.choice(texts)
        log = bytearray(
            first[: dice.randrange(len(first) + 1)] + second[dice.randrange(len(second)) :] * dice.randrange(3)
        )
        for _ in range(dice.randrange(4) if log else 0):
            log[dice.randrange(len(log))] = dice.randrange(256)
        search = LogSearch()
        search.feed(bytes(log))
        assert {each.id for each in search.finish()} <= set(known_failures())


def test_a_healthy_log_with_many_warnings_accuses_nobody() -> None:
    """Its lines are those of programs that go on: warnings, what was caught or is ignored, measures named error."""
    text = (FOLDER.parent / "healthy.log").read_text(encoding="utf-8")
    told = [each for each in found_in(text) if each.level not in {"echo", "noise"}]
    assert [(each.id, each.line) for each in told if each.level == "cause" or not each.is_warned] == []
    assert len(text.splitlines()) > 40


def test_an_exception_is_told_with_the_call_that_raised_it() -> None:
    """Of the same rank, where the lines of two are mixed; its package where it is installed."""
    (told,) = found_in(
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/srv/env/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py", line 296, in __init__\n'
        '[rank1]:   File "/srv/project/other.py", line 7, in <module>\n'
        "[rank0]:     self.num_iterations = args.num_iterations\n"
        "[rank0]: AttributeError: 'GRPOConfig' object has no attribute 'num_iterations'\n"
    )
    assert told.id == "class-lacks-attribute"
    assert told.means.endswith(
        "; raised in trl/trainer/grpo_trainer.py, line 296: self.num_iterations = args.num_iterations"
    )
    (told,) = found_in("Traceback (most recent call last):\nAttributeError: 'A' object has no attribute 'b'\n")
    assert "raised in" not in told.means


WAITED = "[E ProcessGroupNCCL.cpp:458] [Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=ALLREDUCE, Timeout(ms)=1) ran\n"  # fmt: skip


def test_of_ranks_that_waited_in_vain_the_one_far_behind_is_named() -> None:
    """As in https://github.com/pytorch/pytorch/issues/118369; numbers that are near to each other tell nothing."""
    (told,) = found_in(WAITED.format(0, 96120) + WAITED.format(0, 96125) + WAITED.format(7, 64088))
    assert told.means.startswith(
        "rank 7 waited in its collective number 64088, others in 96120 to 96125: if they are of"
    )
    assert told.times == 3
    (told,) = found_in(WAITED.format(0, 96120) + WAITED.format(7, 96117))
    assert told.means.startswith("this rank waited in its collective number 96120")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["Found NaN, decreased lg_loss_scale to -16199.3", "| loss | nan |", "lg_loss_scale to -16200.3"], "to -16200.3"),
        (["Cost 314.0 : gNorm 20126.2", "Cost nan : gNorm 41172.8"], "a gradient norm of 20126.2, then 41172.8"),
        (["| loss          | nan       |"], "training has diverged: the loss became nan;"),
        (["loss  1.386393", "accuracy   0.249471", "acc 0.249 and loss 1.386"] * 2, "1.386 = ln 4 and the accuracy at 1/4"),
        (["loss  0.6931", "accuracy   0.61"] * 4, ""),
        (["loss  1.2", "accuracy   0.25"] * 4, ""),
        (["loss_q0 1.2", "nan_count: 0", "loss: 1.31 gNorm: 2"], ""),
    ],
)  # fmt: skip
def test_training_that_learns_nothing_is_told_from_its_own_figures(lines: list[str], told: str) -> None:
    """As in threads 50 of guided-diffusion, 699 of marian-dev and 43 of r2c; what looks alike is not accused."""
    found = found_in("\n".join(lines))
    assert [told in each.means for each in found] == [True] * bool(told)
