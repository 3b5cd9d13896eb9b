"""Redacted texts: no secret and no name is left, the same thing keeps its stand-in, and what is nobody's stays."""

from __future__ import annotations

import pytest

from gangline.report.redaction import Redaction

TOKEN = "hf_" + "AbCdEfGh" * 4


@pytest.mark.parametrize(
    "text",
    [
        f"login with {TOKEN} failed",
        f"HF_TOKEN={TOKEN}",
        "WANDB_API_KEY: 0123456789abcdef0123456789abcdef01234567",
        '{"wandb_api_key": "0123456789abcdef0123456789abcdef01234567"}',
        "export MY_PASSWORD='correct-horse-1'",
        "password: correct-horse-1",
        "Authorization: Bearer abcdef.ghijkl-mnop",
        "cloning https://alice:correct-horse-1@example.org/x.git",
        "AKIA" + "ABCDEFGHIJKLMNOP",
        "ghp_" + "a1" * 18,
        "-----BEGIN OPENSSH " + "PRIVATE KEY-----\ncorrect-horse-1\n-----END OPENSSH " + "PRIVATE KEY-----",
        "the value is my-very-own-value",
    ],
)
def test_a_secret_goes(text: str) -> None:
    redacted = Redaction(secrets=["my-very-own-value", "short"]).text(text)
    for canary in (
        TOKEN,
        "0123456789abcdef",
        "correct-horse",
        "abcdef.ghijkl",
        "ABCDEFGHIJKLMNOP",
        "a1a1a1",
        "my-very-own",
    ):
        assert canary not in redacted
    assert "<secret>" in redacted


@pytest.mark.parametrize(
    "text",
    [
        "tokens_per_s: 4510.25 added_tokens: 12345678",
        "tokenizer: meta-llama/Llama-3.2-1B",
        "step 12/400  loss 2.5  4 510 tok/s  2026-11-27T10:00:00.000Z",
        "torch 2.13.0, driver 570.124.06, PCI 0000:01:00.0",
        "listening on 127.0.0.1:29500 and [::1]:29500",
        'File "/usr/lib/python3.11/socket.py", line 7, in token',
        "nvidia-cublas-cu12==12.4.5.8",
        "short",
    ],
)
def test_what_is_nobodys_stays(text: str) -> None:
    assert Redaction(hosts=["localhost"], secrets=["short"]).text(text) == text


def test_names_and_addresses_get_stand_ins_that_stay_the_same() -> None:
    redaction = Redaction(hosts=["pc1", "pc1.home.lan", "pc2"], users=["alice"])
    assert redaction.text("pc1.home.lan reached pc2 from pc1") == "host-2 reached host-3 from host-1"
    assert redaction.text("pc10 and my-pc2 are others") == "pc10 and my-pc2 are others"
    first = redaction.text("192.168.1.11:22 fe80::1234 aa:bb:cc:dd:ee:ff alice@192.168.1.11")
    assert first == "10.0.0.2:22 fd00::1 02:00:00:00:00:01 user-1@10.0.0.2"
    assert redaction.text("to 192.168.1.11") == "to 10.0.0.2"
    assert redaction.text("/home/alice/run and /home/bob/run") == "/home/user-1/run and /home/user-2/run"
    assert redaction.text("write to bob.b@mail.example.com") == "write to person-1@example.org"
    assert redaction.counts == {"host": 3, "user": 2, "IPv4": 1, "IPv6": 1, "MAC": 1, "mail": 1}


def test_documents_keep_their_form() -> None:
    redaction = Redaction(hosts=["train", "pc2"], users=["alice"])
    document = {
        "hosts": {"pc2": {"ssh": "alice@pc2", "slots": 2}},
        "user": "alice",
        "api_key": "abcdefgh",
        "token": None,
    }
    assert redaction.document(document) == {
        "hosts": {"host-2": {"ssh": "user-1@host-2", "slots": 2}},
        "user": "user-1",
        "api_key": "<secret>",
        "token": None,
    }


def test_lines_of_records_stay_records_and_others_are_texts() -> None:
    redaction = Redaction(hosts=["pc1"])
    text = '{"event": "started", "host": "pc1"}\nnot json of pc1\n'
    assert redaction.lines(text) == '{"event": "started", "host": "host-1"}\nnot json of host-1\n'


def test_a_text_of_megabytes_is_read() -> None:
    text = "a" * 1_000_000 + " " + "token=" * 100_000 + "1." * 100_000 + ":a" * 100_000
    assert len(Redaction(hosts=["pc1"]).text(text)) > 1_000_000
