"""What the documents point at is there: links, files, commands."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")})
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\s*(?:\$ )?gangline +([a-z][a-z-]*)", re.MULTILINE)
INLINE_COMMAND = re.compile(r"`gangline +([a-z][a-z-]*)[^`]*`")
MAKE = re.compile(r"(?:^\s*(?:\$ )?|`)make +([a-z]+)", re.MULTILINE)


def names(documents):
    return [path.relative_to(ROOT).as_posix() for path in documents]


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ +(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


def broken_links(path: Path) -> list[str]:
    prose = FENCE.sub("", path.read_text(encoding="utf-8"))
    broken = []
    for link in LINK.findall(prose):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


def commands(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    in_blocks = {verb for block in FENCE.findall(text) for verb in COMMAND.findall(block)}
    return in_blocks | set(INLINE_COMMAND.findall(FENCE.sub("", text)))


@pytest.mark.parametrize("path", DOCUMENTS, ids=names(DOCUMENTS))
def test_links_lead_somewhere(path):
    assert broken_links(path) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=names(DOCUMENTS))
def test_commands_name_existing_verbs(path):
    main = importlib.import_module("gangline.cli.main")
    assert commands(path) - set(main.VERBS) == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=names(DOCUMENTS))
def test_make_verbs_exist(path):
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(MAKE.findall(path.read_text(encoding="utf-8"))) - verbs == set()


def test_the_walk_to_the_loss_names_what_is_there_in_at_most_15_files():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| \[[^\]]*\]\(([^)]+)\) \| `(\w+)` \|", text, re.MULTILINE)
    assert 10 <= len(rows) <= 15
    for file, name in rows:
        found = [node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")]
        assert name in found, (file, name)


def test_a_broken_link_and_an_unknown_anchor_are_noticed(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("# A page\n[here](page.md#a-page) [gone](gone.md) [no such part](#nowhere)\n")
    assert broken_links(document) == ["gone.md", "#nowhere"]


def test_commands_are_found_in_blocks_and_in_prose(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("Type `gangline plan job.yaml`.\n```\n$ gangline train job.yaml\nsome output\n```\n")
    assert commands(document) == {"plan", "train"}
