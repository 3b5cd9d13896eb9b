"""The page of `gangline ui` in a headless Chromium: what is seen, clicked and typed, and whether everybody can use it.

`make browser` runs it. GANGLINE_SCREENSHOTS=FOLDER keeps the screenshots.
"""

import contextlib
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.page_client import Page
from tests.recorded import install

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make browser")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: make browser")
pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed: apt install chromium"),
]

STOPPED, FAILED, FINISHED = "amber-vole-1", "silent-brook-8", "light-elk-8"
SIZES = {"wide": (1280, 900), "phone": (390, 844)}
VIEWS = {
    "runs": "#/",
    "curves": f"#/run/{STOPPED}",
    "ranks": f"#/run/{STOPPED}/ranks",
    "hosts": f"#/run/{FAILED}/hosts",
    "events": f"#/run/{FAILED}/events",
    "logs": f"#/run/{FAILED}/logs",
    "job": f"#/run/{STOPPED}/job",
    "compare": f"#/compare/{STOPPED}/{FAILED}/{FINISHED}",
    "sweeps": "#/sweeps",
}
SCRIPT = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("browser") / "home"


@pytest.fixture(scope="module")
def page(home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GANGLINE_HOME", str(home))
        for kind in ("ddp-stopped", "ddp-failed", "fsdp-finished"):
            install(kind, home)
        state = home / "runs" / FAILED / "state.json"
        state.write_text(json.dumps({**json.loads(state.read_text()), "name": SCRIPT}))
        with (home / f"hosts/pc1/runs/{FAILED}/attempts/1/rank-0.log").open("a") as log:
            log.write(f"{SCRIPT}\n")
        write_samples(home / f"hosts/pc1/runs/{FAILED}/samples-pc1.jsonl")
        made = Page(home)
        yield made
        with contextlib.suppress(ProcessLookupError):
            made.process.kill()
        made.process.communicate()


def write_samples(path):
    rows = [
        {"samples": "pc1", "interval_s": 2.0, "cards": [{"index": 0, "name": f"Card {SCRIPT}", "simulated": True}]},
        {"columns": ["cpu_percent", "memory_percent", "net/eth0/rx_bytes_per_s", "gpu/0/temperature_c"]},
        *([1795777301 + 2 * at, 1, [40 + at % 30, 50, 1e6 * (at % 7), 60 + at % 20]] for at in range(300)),
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        yield browser
        browser.close()


class Tab:
    """A tab that keeps what went wrong in it, and to whom it spoke."""

    def __init__(self, context, page):
        self.page = page
        self.seen = context.new_page()
        self.wrong, self.asked = [], []
        self.seen.on(
            "console", lambda said: self.wrong.append(said.text) if said.type in {"error", "warning"} else None
        )
        self.seen.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.seen.on("request", lambda request: self.asked.append(request.url))
        self.seen.goto(page.address)
        self.seen.wait_for_selector(f"text={STOPPED}")

    def go(self, place):
        self.seen.evaluate("place => { location.hash = place }", place)
        self.seen.wait_for_function("() => document.querySelector('main h1')")

    def hold(self, pattern):
        """The requests whose addresses match, from now on: each waits for its `continue_`."""
        held = []

        def keep(route):
            held.append(route)

        self.seen.route(re.compile(pattern), keep)
        return held

    def until(self, script, *, timeout_s=15):
        self.seen.wait_for_function(script, timeout=timeout_s * 1000)


@pytest.fixture
def open_tab(chromium, page):
    contexts = []

    def opened(*, size="wide", scheme="light"):
        width, height = SIZES[size]
        contexts.append(chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme))
        return Tab(contexts[-1], page)

    yield opened
    for each in contexts:
        each.close()


DRAWN = """() => document.querySelector('figure:not([hidden])') && [...document.querySelectorAll('figure:not([hidden]) canvas')].every((canvas) => {
  if (!/ [1-9][0-9]* points/.test(canvas.getAttribute('aria-label'))) return false;
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height), seen = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200) seen.add(`${data[at] >> 4} ${data[at + 1] >> 4} ${data[at + 2] >> 4}`);
  return seen.size > 3;
})"""
"""Whether the page has canvases, and each of them points and lines: more colours than those of a grid and its labels."""
READY = {
    "runs": f"() => document.body.innerText.includes('{FINISHED}')",
    "hosts": "() => document.querySelectorAll('figure:not([hidden])').length >= 3",
    "logs": "() => document.querySelector('pre').textContent.includes('onerror')",
    "events": "() => document.querySelectorAll('tbody tr').length > 3",
    "job": "() => document.querySelectorAll('tbody tr').length > 30",
    "sweeps": "() => document.body.innerText.includes('No sweeps yet')",
}


@pytest.mark.parametrize(("size", "scheme"), [("wide", "light"), ("phone", "dark")])
def test_every_view_is_drawn_fits_and_can_be_used_by_everybody(open_tab, tmp_path, size, scheme):
    tab, folder = open_tab(size=size, scheme=scheme), Path(os.environ.get("GANGLINE_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    for name, place in VIEWS.items():
        tab.go(place)
        tab.until(READY.get(name, DRAWN))
        if "figure" in READY.get(name, "figure"):
            tab.until(DRAWN)
        tab.seen.screenshot(path=folder / f"{name}-{size}-{scheme}.png", full_page=True)
        found = axe.Axe().run(tab.seen, options={"resultTypes": ["violations"]})
        told = [(each["id"], each["nodes"][0]["html"][:200]) for each in found.response["violations"]]
        assert told == [], (name, size, scheme)
        assert tab.seen.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], f"{name} is too wide"
    ours = "willReadFrequently"  # Chromium's advice for DRAWN
    assert [said for said in tab.wrong if ours not in said] == []
    assert {url for url in tab.asked if not url.startswith(tab.page.origin + "/")} == set()


def test_scripts_in_names_and_logs_are_text(open_tab):
    tab = open_tab()
    for place in ("#/", f"#/run/{FAILED}", f"#/run/{FAILED}/hosts", f"#/run/{FAILED}/logs"):
        tab.go(place)
        tab.until("() => document.body.innerText.includes('<img src=x onerror=window.hacked=1>')")
    tab.seen.fill("input[type=search]", "<script>")
    tab.seen.keyboard.press("Enter")
    tab.until("() => document.querySelector('mark')?.textContent === '<script>'")
    assert tab.seen.evaluate("window.hacked") is None
    assert tab.seen.evaluate("document.querySelectorAll('main img, main script').length") == 0


def test_a_late_answer_of_another_log_is_not_mixed_in(open_tab, home):
    mine, other = (home / f"hosts/pc{at + 1}/runs/{FAILED}/attempts/1/rank-{at}.log" for at in (0, 1))
    for path, words in ((mine, "only in the log of rank 0"), (other, "only in the log of rank 1")):
        with path.open("a") as log:
            log.write(f"{words}\n")
    tab = open_tab()
    held = tab.hold(r"/log\?.*rank(\+|%20)0")
    tab.go(f"#/run/{FAILED}/logs")
    tab.until("() => document.querySelectorAll('select[aria-label=Log] option').length > 1")
    while not held:
        tab.seen.wait_for_timeout(50)
    tab.seen.select_option("select[aria-label=Log]", "pc2 rank 1")
    text = "document.querySelector('pre').textContent"
    tab.until(f"() => {text}.includes('only in the log of rank 1')")
    with tab.seen.expect_response(re.compile(r"/log\?.*rank(\+|%20)0")):
        held[0].continue_()
    with other.open("a") as log:
        log.write("and one more line\n")
    tab.until(f"() => {text}.includes('and one more line')")
    shown = tab.seen.evaluate(text)
    assert "only in the log of rank 0" not in shown
    assert shown.splitlines() == [line.rstrip() for line in other.read_text().splitlines()]


def test_a_late_answer_of_the_whole_run_leaves_the_zoom(open_tab):
    tab = open_tab()
    tab.go(f"#/run/{STOPPED}")
    tab.until(DRAWN)
    held = tab.hold(r"/series\?(?!first)")
    while not held:
        tab.seen.wait_for_timeout(50)
    tab.seen.focus("figure canvas")
    tab.seen.keyboard.press("Home")
    tab.seen.keyboard.press("ArrowRight")
    tab.seen.keyboard.press("+")
    last = "document.querySelector('figure canvas').getAttribute('aria-label')"
    tab.until(f"() => {last}.includes('last at step 16')")
    tab.seen.evaluate(
        f"window.labels = new Set(); setInterval(() => window.labels.add(/last at step \\d+/.exec({last})?.[0]), 10)"
    )
    with tab.seen.expect_response(re.compile(r"/series\?(?!first)")):
        held[0].continue_()
    with tab.seen.expect_response(re.compile(r"/series\?first")):
        pass
    assert tab.seen.evaluate("[...window.labels]") == ["last at step 16"]


def test_the_token_leaves_the_address(open_tab):
    tab = open_tab()
    assert tab.seen.url == f"{tab.page.origin}/#/"
    assert tab.seen.evaluate("document.cookie") == "", "no script reads the cookie"
    tab.seen.reload()
    tab.seen.wait_for_selector(f"text={STOPPED}")


def test_a_chart_is_read_and_zoomed_with_keys_and_mouse(open_tab):
    tab = open_tab()
    tab.go(f"#/run/{STOPPED}")
    tab.until(DRAWN)
    chart, readout, whole = "figure canvas", "figure figcaption span", "button:has-text('Whole run')"
    tab.seen.focus(chart)
    tab.seen.keyboard.press("Home")
    tab.until("() => document.querySelector('figure figcaption span').textContent.startsWith('step 1: ')")
    tab.seen.keyboard.press("ArrowRight")
    tab.until("() => document.querySelector('figure figcaption span').textContent.startsWith('step 2: ')")
    tab.seen.keyboard.press("+")
    tab.until("() => document.querySelector('figure canvas').getAttribute('aria-label')?.includes('last at step 16')")
    assert tab.seen.is_enabled(whole)
    tab.seen.keyboard.press("Escape")
    tab.until("() => document.querySelector('figure canvas').getAttribute('aria-label')?.includes('last at step 56')")
    box = tab.seen.locator(chart).first.bounding_box()
    tab.seen.mouse.move(box["x"] + 200, box["y"] + 60)
    tab.seen.mouse.down()
    tab.seen.mouse.move(box["x"] + 400, box["y"] + 60, steps=5)
    tab.seen.mouse.up()
    tab.until("() => /Arrow/.test(document.querySelector('figure canvas').getAttribute('aria-label')) && "
              "!document.querySelector('figure canvas').getAttribute('aria-label')?.includes('last at step 56')")  # fmt: skip
    tab.seen.click(whole)
    tab.until("() => document.querySelector('figure canvas').getAttribute('aria-label')?.includes('last at step 56')")
    assert re.search(r"[\d.]+", tab.seen.inner_text(readout))


def test_new_steps_come_by_themselves(open_tab, home):
    tab = open_tab()
    tab.go(f"#/run/{FINISHED}")
    tab.until("() => document.querySelector('figure canvas').getAttribute('aria-label')?.includes('last at step 20')")
    (metrics,) = home.glob(f"hosts/pc1/runs/{FINISHED}/metrics.jsonl")
    last = [json.loads(line) for line in metrics.read_text().splitlines() if '"step_s"' in line][-1]
    with metrics.open("a") as file:
        file.write(json.dumps({**last, "step": 21}) + "\n")
    tab.until("() => document.querySelector('figure canvas').getAttribute('aria-label')?.includes('last at step 21')")
    fresh = [url for url in tab.asked if "/series?" in url][-1]
    assert re.search(r"generation=\d+&width=1&count=20", fresh), "what is there already is named, so only news come"


def test_runs_are_chosen_and_compared(open_tab):
    tab = open_tab(size="phone")
    tab.seen.check(f"input[aria-label='Compare {STOPPED}']")
    tab.seen.check(f"input[aria-label='Compare {FINISHED}']")
    tab.seen.click("text=Compare 2 runs")
    tab.until("() => document.body.innerText.includes('Their losses part at step')")
    assert "strategy" in tab.seen.inner_text("main")


def test_a_button_asks_first_and_cancel_does_nothing(open_tab):
    tab = open_tab()
    tab.go(f"#/run/{STOPPED}")
    posts = []
    tab.seen.on("request", lambda request: posts.append(request.url) if request.method == "POST" else None)
    tab.seen.click("main button:has-text('Resume')")
    assert f"Resume: {STOPPED}?" in tab.seen.inner_text("dialog")
    assert tab.seen.evaluate("document.activeElement.textContent") == "Cancel", "Enter alone does no harm"
    tab.seen.keyboard.press("Escape")
    tab.until("() => !document.querySelector('dialog').open")
    assert posts == []
    tab.seen.click("main button:has-text('Resume')")
    tab.seen.click("dialog button:has-text('Resume')")
    # the data of this recorded run are on no computer any more
    tab.until("() => document.body.innerText.includes('resume: data.train: /home/alice/fox.txt')", timeout_s=60)
    assert posts == [f"{tab.page.origin}/api/runs/{STOPPED}/resume"]


def test_without_its_server_the_page_says_that_it_is_old(open_tab, home, monkeypatch):
    monkeypatch.setenv("GANGLINE_HOME", str(home))
    other = Page(home)
    tab = open_tab()
    tab.seen.goto(other.address)
    tab.seen.wait_for_selector(f"text={STOPPED}")
    other.end()
    begun = time.monotonic()
    tab.until("() => document.getElementById('link').innerText.includes('does not answer')")
    assert time.monotonic() - begun < 15
