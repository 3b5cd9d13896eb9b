"""The page of `gangline ui` over a long run: time to its curves, bytes, frames while it is used, cost of the server.

    make browser; python -m benchmarks.ui_page --steps 100000 --ranks 64

The run is SYNTHETIC: a recorded one whose metrics are made up here, so that only reading, sending and drawing count.
Chromium is Debian's, headless, over loopback; each visit is a new tab, and nothing is cached. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gangline.runs.state import iso
from tests.page_client import Page
from tests.recorded import install

BEGAN = 1795000000.0
USED = """async () => {
  const canvas = document.querySelector('figure canvas'), box = canvas.getBoundingClientRect(), frames = [];
  let last = performance.now();
  for (let at = 0; at < 200; at += 1) {
    canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + 60 + at * 2, clientY: box.top + 50 }));
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last);
    last = now;
  }
  return frames;
}"""
"""Move the crosshair over all charts, a place per frame; milliseconds of each frame."""


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--visits", type=int, default=10)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        os.environ["GANGLINE_HOME"] = str(home)
        run = install("ddp-finished", home)
        size = write_metrics(home / f"hosts/pc1/runs/{run}/metrics.jsonl", words.steps, words.ranks)
        page = Page(home)
        try:
            measured = measure(page, run, words.steps, words.visits)
        finally:
            page.process.kill()
            page.process.communicate()
    asked = {"synthetic": True, "steps": words.steps, "ranks": words.ranks, "metrics_bytes": size}
    print(json.dumps(asked | measured))


def write_metrics(path: Path, steps: int, ranks: int) -> int:
    """Metrics of that many steps on hosts of 8 ranks; their size in bytes."""
    dice = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            slow = 1 + 0.05 * dice.random()
            waits = {"wait_s": round(0.06 * slow, 6), "wait_others_s": 0.01}
            each = {"micro_batches": 4, "data_s": 0.0012, "compute_s": round(0.7 * slow, 6), **waits}
            rows = [
                {"rank": rank, "host": f"node{rank // 8:02d}", **each, "memory_bytes": 60_000_000_000 + 1000 * rank}
                for rank in range(ranks)
            ]
            record = {"kind": "step", "time": iso(BEGAN + step), "attempt": 1, "step": step, "steps": steps}
            record |= {
                "loss": 2 + 8 / math.sqrt(step) + 0.1 * dice.random(),
                "learning_rate": 3e-4 * (1 - step / steps),
            }
            record |= {"grad_norm": slow, "tokens": 524288, "label_tokens": 524288, "step_s": 0.85, "mfu": 0.41}
            record |= {"tokens_per_s": 616809.4 / slow, "skipped": False, "exposed_s": 0.01}
            file.write(json.dumps({**record, "ranks": rows}) + "\n")
    return path.stat().st_size


def measure(page: Page, run: str, steps: int, visits: int) -> dict[str, Any]:
    """The figures of one server."""
    from playwright.sync_api import sync_playwright

    label = "document.querySelector('figure canvas')?.getAttribute('aria-label')"
    all_drawn = f"() => {label}?.includes('last at step {steps:,}:'.replaceAll(',', ' '))"
    some_drawn = f"() => /, [1-9][0-9]* points/.test({label})"
    with sync_playwright() as driver:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.new_page().goto(page.address)
        visit = f"{page.origin}/#/run/{run}"
        cold = context.new_page()
        begun = time.monotonic()
        cold.goto(visit)
        cold.wait_for_function(some_drawn, timeout=120_000)
        first_s = time.monotonic() - begun
        cold.wait_for_function(all_drawn, timeout=120_000)
        found = {"first_look_some_curves_s": first_s, "first_look_all_steps_s": time.monotonic() - begun}
        cold.close()
        paints, curves = [], []
        for _ in range(visits):
            tab = context.new_page()
            begun = time.monotonic()
            tab.goto(visit)
            tab.wait_for_function(all_drawn, timeout=60_000)
            curves.append(time.monotonic() - begun)
            paints.append(tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000)
            loaded = tab.evaluate(
                "performance.getEntriesByType('resource').map((each) => [each.transferSize, each.decodedBodySize])"
            )
            frames = sorted(tab.evaluate(USED)[20:])
            tab.close()
        browser.close()
    page.log_in()
    told = page.json(f"/api/runs/{run}/series")
    first_bytes, first_sent = len(json.dumps(told)), page.sent_bytes
    page.json(f"/api/runs/{run}/series?generation={told['generation']}&width={told['width']}&count={len(told['step'])}")
    found |= {
        "visit_first_paint_s": statistics.median(paints),
        "visit_all_curves_s": statistics.median(curves),
        "visit_all_curves_most_s": max(curves),
        "loaded_bytes": sum(sent for sent, _ in loaded),
        "loaded_bytes_uncompressed": sum(size for _, size in loaded),
        "series_bytes": first_bytes,
        "series_bytes_sent": first_sent,
        "series_again_bytes_sent": page.sent_bytes,
        "frame_ms_p50": frames[len(frames) // 2],
        "frame_ms_p95": frames[int(len(frames) * 0.95)],
        "server_memory_bytes": _resident(page.process.pid),
    }
    return {name: round(value, 4) for name, value in found.items()}


def _resident(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) << 10


if __name__ == "__main__":
    main()
