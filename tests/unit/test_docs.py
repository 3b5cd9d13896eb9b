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

LONGEST_LINE, LONGEST_CELL = 110, 200
WRAPPED = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # whose entries are one line each
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
"""What people read; decisions are records of their day, and keep its words."""
# Made-up identifiers and phrases -> the term to use. Patterns for prose: code and screens are left out.
PHRASES = {
    r"stand(s|ing)?[ -]by|stood by": "prefork process, warm pool",
    r"\bguards?\b": "host agent",
    r"\b(gets?|got|getting) on\b(?! with\b)": "makes progress, responds",
    r"\b(is|are|was|were) told\b": "name the one that says it: the run reports ..., gangline prints ...",
    r"\bwhoever\b": "anyone who",
    r"\blaid over\b": "overrides",
    r"\blook(s|ed|ing)? after\b": "supervises",
    r"\bdealers?\b": "load balancer",
    r"\bdealt\b": "assigned, split",
    r"\bhollow\b": "on the meta device",
    r"\bforet(ell|ells|old)\b|\bforesee[ns]?\b|\bforesaw\b": "forecast, plan",
    r"\bgone without a word\b|\bwent without a word\b": "died",
    r"\b(waited for )?in vain\b": "without an answer",
    r"\blast words?\b": "error file, last message",
    r"\bcrews?\b": "replica group",
}


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


def prose(path: Path) -> list[tuple[int, str]]:
    """The lines of a page that are no code, with their numbers."""
    found, inside = [], False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            found.append((number, line))
    return found


def too_long(path: Path) -> list[str]:
    """Prose lines and table cells that are too long; the target of a link does not count."""
    found = []
    for number, line in prose(path):
        shown = re.sub(r"\]\([^)]*\)", "]", line)
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", shown.strip().strip("|"))
            found += [f"{number}: a cell of {len(cell.strip())}" for cell in cells if len(cell.strip()) > LONGEST_CELL]
        elif len(shown) > LONGEST_LINE:
            found.append(f"{number}: a line of {len(shown)}")
    return found


def made_up(path: Path) -> list[str]:
    """Phrases of `PHRASES` in the prose of a page, each with the term to use."""
    text = "\n".join(line for _, line in prose(path))
    text = re.sub(r"`[^`]*`", "``", text)
    return [
        f"{' '.join(match.group().split())} -> {instead}"
        for phrase, instead in PHRASES.items()
        for match in re.finditer(phrase.replace(" ", r"\s+"), text, re.IGNORECASE)
    ]


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


PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if PYTHON.search(path.read_text(encoding="utf-8"))])
def test_examples_in_python_can_be_pasted(path):
    for block in PYTHON.findall(path.read_text(encoding="utf-8")):
        ast.parse(block)


@pytest.mark.parametrize("path", WRAPPED, ids=names(WRAPPED))
def test_lines_of_prose_are_short(path):
    assert too_long(path) == []


@pytest.mark.parametrize("path", PAGES, ids=names(PAGES))
def test_pages_use_the_terms_of_the_field(path):
    assert made_up(path) == []


def test_the_readme_fits_on_two_screens():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_page_is_listed_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")]
    assert [page for page in pages if f"]({page}" not in text] == []


def test_lines_of_the_demo_in_the_readme_are_of_the_whole_screen():
    blocks = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    screen = (ROOT / "docs" / "demo.txt").read_text(encoding="utf-8").splitlines()
    (quoted,) = [block.splitlines()[1:-1] for block in blocks if "gangline train /tmp/" in block]
    places = [screen.index(line) for line in quoted]
    assert len(quoted) > 5
    assert places == sorted(places)


@pytest.mark.parametrize("path", PAGES, ids=names(PAGES))
def test_source_files_that_a_page_names_are_there(path):
    named = re.findall(r"`((?:src|tests|benchmarks|examples)/[\w./]+\.\w+)`", path.read_text(encoding="utf-8"))
    named += [f"tests/{name}" for name in re.findall(r"`((?:unit|process|lab|train)/[\w/]+\.py)`", path.read_text())]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_long_line_a_long_cell_and_a_made_up_phrase_are_noticed(tmp_path):
    document = tmp_path / "page.md"
    word = "word " * 25
    document.write_text(
        f"{word}\n```\n{word} whoever\n```\n| {word * 2} | a |\n[{'a' * 50}](http://{'b' * 99})\n"
        "The run gets\non, and `stand-by/` stays.\n"
    )
    assert too_long(document) == ["1: a line of 125", "5: a cell of 249"]
    assert made_up(document) == ["gets on -> makes progress, responds"]


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
