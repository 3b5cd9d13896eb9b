"""`gangline ui` as it is typed, and asked as a browser asks, and as a page from elsewhere would."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.page_client import Page
from tests.recorded import install

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'gangline[ui]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'gangline[ui]'")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("page") / "home"


@pytest.fixture(scope="module")
def page(home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GANGLINE_HOME", str(home))
        install("ddp-stopped", home)
        install("ddp-failed", home)
        made = Page(home)
        yield made.log_in()
        with contextlib.suppress(ProcessLookupError):
            made.process.kill()
        made.process.communicate()


STOPPED, FAILED = "amber-vole-1", "silent-brook-8"


def test_all_runs_are_listed(page):
    rows = {row["id"]: row for row in page.json("/api/runs")["runs"]}
    row = rows[STOPPED]
    assert (row["phase"], row["step"], row["hosts"], row["can_resume"]) == ("stopped", 56, ["pc1", "pc2"], True)
    assert row["loss"] == pytest.approx(5.231, abs=1e-3)
    assert rows[FAILED]["error"]["what"]


def test_the_curves_are_the_lines_of_the_metrics(page, home):
    told = page.json(f"/api/runs/{STOPPED}/series")
    (metrics,) = home.glob(f"hosts/pc1/runs/{STOPPED}/metrics.jsonl")
    written = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in written if record["kind"] == "step"]
    assert told["step"] == [record["step"] for record in steps]
    assert told["figures"]["loss"]["mean"] == pytest.approx([record["loss"] for record in steps], rel=1e-5)
    assert [each["host"] for each in told["ranks"]["ranks"]] == ["pc1", "pc2"]


def test_a_run_that_goes_on_is_seen_to_go_on_and_only_what_is_new_is_sent(page, home):
    run = install("fsdp-finished", home)
    had = page.json(f"/api/runs/{run}/series")
    (metrics,) = home.glob(f"hosts/pc1/runs/{run}/metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])
    with metrics.open("a") as file:
        file.write(json.dumps({**last, "kind": "step", "step": 21, "loss": 1.25, "ranks": []}) + "\n")
    query = f"generation={had['generation']}&width={had['width']}&count={len(had['step'])}"
    deadline = time.monotonic() + 20
    while (told := page.json(f"/api/runs/{run}/series?{query}"))["step"][-1] != 21:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert (told["from"], told["figures"]["loss"]["mean"][-1]) == (len(had["step"]) - 1, 1.25)


def test_events_are_told_in_words(page):
    told = page.json(f"/api/runs/{FAILED}")
    assert any("checkpoint committed" in event["text"] for event in told["events"])
    assert told["error"]["what"]


def test_a_host_is_told_with_what_it_did(page, home):
    run = install("ddp-finished", home)
    rows = [
        '{"samples": "pc1", "interval_s": 2.0, "cards": [{"index": 0, "name": "A <b>card</b>", "simulated": true}]}',
        '{"columns": ["cpu_percent", "memory_bytes", "net/eth0/rx_bytes_per_s", "gpu/0/temperature_c"]}',
        *(f"[{1795777301 + 2 * at}, 1, [{at % 100}, 8e9, 1e6, 70]]" for at in range(500)),
    ]
    (home / f"hosts/pc1/runs/{run}/samples-pc1.jsonl").write_text("\n".join(rows) + "\n")
    told = page.json(f"/api/runs/{run}/hosts?host=pc1")
    host = told["hosts"][0]
    assert (host["host"], host["figures"]["cpu_percent"], host["simulated"]) == ("pc1", 99, True)
    assert (host["cards"][0]["name"], told["hosts"][1]["figures"]) == ("A <b>card</b>", {})
    drawn = told["drawn"]["figures"]
    assert set(drawn) == {"cpu_percent", "net/eth0/rx_bytes_per_s", "gpu/0/temperature_c"}
    assert len(told["drawn"]["time"]) == len(drawn["cpu_percent"]) <= 240
    assert page.json(f"/api/runs/{run}/hosts?host=none")["drawn"]["host"] == "pc1"


def test_logs_are_read_on_and_searched(page, home):
    told = page.json(f"/api/runs/{FAILED}/logs")
    assert told["logs"] == ["pc1 rank 0", "pc2 rank 1", "pc1 console", "pc2 console"]
    had = page.json(f"/api/runs/{FAILED}/log?name=pc1%20rank%200")
    assert (had["first"], len(had["lines"])) == (1, had["count"])
    log = home / f"hosts/pc1/runs/{FAILED}/attempts/1/rank-0.log"
    with log.open("a") as file:
        file.write("\x1b[31mred\x1b[0m <script>alert(1)</script>\n")
    news = page.json(f"/api/runs/{FAILED}/log?name=pc1%20rank%200&after={had['count']}")
    assert news["lines"] == ["red <script>alert(1)</script>"]
    found = page.json(f"/api/runs/{FAILED}/search?words=%3CSCRIPT%3E")["found"]
    assert [(row["log"], row["line"]) for row in found] == [("pc1 rank 0", had["count"] + 1)]


@pytest.mark.parametrize(
    "query",
    [
        "log?name=../../state.json",
        "log?name=pc1%20rank%2099",
        "log",
        "log?name=pc1%20rank%200&attempt=../1",
        "logs?attempt=2",
        "logs?attempt=-1",
        "search?words=",
        "search",
        "stop",
        "resume",
    ],
)
def test_logs_and_attempts_that_are_none_are_refused(page, query):
    assert page.ask(f"/api/runs/{FAILED}/{query}")[0] == 404


def test_the_job_is_told_and_two_runs_are_compared(page, home):
    other = install("fsdp-stopped", home)
    rows = dict(page.json(f"/api/runs/{STOPPED}/job")["parts"]["job"])
    assert (rows["name"], rows["batch"]) == ("fox-ddp", "4")
    told = page.json(f"/api/diff?one={STOPPED}&other={other}")
    strategies = [row["values"] for row in told["differences"]["division"] if row["key"] == "strategy"]
    assert (strategies, told["losses"]["common_steps"] > 40) == ([["ddp", "fsdp"]], True)
    assert page.ask(f"/api/diff?one={STOPPED}&other=none-such-1")[0] == 404


def test_a_run_of_a_command_has_no_curves_but_all_the_rest(page, home):
    run = install("command-finished", home)
    assert page.json(f"/api/runs/{run}/series")["step"] == []
    assert page.json(f"/api/runs/{run}/job")["parts"]["job"][0][0] == "command"
    assert page.json(f"/api/runs/{run}/logs")["logs"]


def test_sweeps_are_listed(page):
    assert page.json("/api/sweeps")["sweeps"] == []
    assert page.ask("/api/sweeps/none-such-1")[0] == 404


# Orders.


def orders_of(page, run):
    return [order for order in page.json("/api/orders")["orders"] if order["run"] == run]


def test_stop_of_a_run_that_has_ended_says_so(page):
    status, _, content = page.order(f"/api/runs/{STOPPED}/stop", {"now": False})
    told = json.loads(content)
    assert (status, told["is_done"], told["lines"]) == (202, True, [f"{STOPPED} has ended already"])


def test_a_run_that_cannot_go_on_says_why_and_stays_as_it_is(page, home):
    run = install("pipeline-stopped", home)
    for host in ("pc1", "pc2"):
        shutil.rmtree(home / "hosts" / host / "runs" / run / "checkpoints", ignore_errors=True)
    assert page.order(f"/api/runs/{run}/resume")[0] == 202
    deadline = time.monotonic() + 100
    while not (order := orders_of(page, run)[0])["is_done"]:
        assert time.monotonic() < deadline, order
        time.sleep(0.2)
    assert order["error"]["what"] == "data.train: /home/alice/fox.txt", order
    assert f"resuming {run} from the beginning: no checkpoint was saved" in order["lines"]
    state = json.loads((home / "runs" / run / "state.json").read_text())
    assert (state["phase"], state["attempt"]) == ("stopped", 1)


@pytest.mark.parametrize(
    "path", ["/api/runs/none-such-1/stop", f"/api/runs/{STOPPED}", f"/api/runs/{STOPPED}/series", "/"]
)
def test_an_order_for_what_is_none_is_refused(page, path):
    assert page.order(path)[0] == 404


# Who may ask.


@pytest.mark.parametrize("path", ["/", "/page.js", "/api/runs", f"/api/runs/{STOPPED}/series", "/none"])
def test_without_the_cookie_nothing_is_shown(page, path):
    name = page.cookie.partition("=")[0]
    for cookie in (None, f"{name}=wrong", f"{name}={page.token}", f"{name}=\u00fc".encode().decode("latin-1")):
        status, headers, content = page.ask(path, Cookie=cookie)
        assert (status, STOPPED.encode() in content) == (401, False), cookie
        assert "set-cookie" not in headers


@pytest.mark.parametrize("token", ["", "wrong", "x" * 5000, "%00", "%C3%BC"])
def test_a_wrong_token_opens_nothing(page, token):
    status, headers, _ = page.ask(f"/?token={token}", Cookie=None)
    assert (status, "set-cookie" in headers) == (401, False)


def test_the_cookie_is_for_this_browser_and_no_script(page):
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(page.flags.split("; "))


def test_two_servers_leave_each_other_their_cookies(page, home, monkeypatch):
    monkeypatch.setenv("GANGLINE_HOME", str(home))
    other = Page(home).log_in()
    kept = dict(each.split("=", 1) for each in (page.cookie, other.cookie))  # as a browser: one of each name
    both = "; ".join(f"{name}={value}" for name, value in kept.items())
    try:
        assert [each.ask("/api/runs", Cookie=both)[0] for each in (page, other)] == [200, 200]
        assert other.ask("/api/runs", Cookie=page.cookie)[0] == 401
    finally:
        other.end()


@pytest.mark.parametrize(
    "host", [None, "evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.5", "127.0.0.1:1x"]
)
def test_a_name_that_was_pointed_here_is_refused(page, host):
    for path in ("/", "/api/runs", f"/?token={page.token}"):
        status, _, content = page.ask(path, Host=host)
        assert status in {400, 421}, (host, path)
        assert STOPPED.encode() not in content


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:9000"])
def test_a_port_that_ssh_forwards_is_welcome(page, host):
    assert page.ask("/api/runs", Host=host)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_a_page_from_elsewhere_reads_and_orders_nothing(page, headers):
    status, told, content = page.ask("/api/runs", **headers)
    assert (status, STOPPED.encode() in content) == (403, False)
    assert "access-control-allow-origin" not in told
    assert page.order(f"/api/runs/{STOPPED}/resume", **headers)[0] == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": None}, 403),
        ({"X_Gangline_Key": None}, 403),
        ({"X_Gangline_Key": "wrong"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Cookie": None}, 401),
    ],
)
def test_an_order_needs_cookie_origin_and_key(page, headers, status):
    assert page.order(f"/api/runs/{STOPPED}/resume", **headers)[0] == status


def test_an_order_is_small(page):
    assert page.order(f"/api/runs/{STOPPED}/resume", {"words": "x" * 20_000})[0] == 413


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/assets/../web.py",
        "/page.js/..%2f..%2fweb.py",
        f"/api/runs/..%2f..%2fruns%2f{STOPPED}",
        f"/api/runs/../runs/{STOPPED}",
        "/api/runs/none-such-1",
        f"/api/runs/{STOPPED[:5]}",
        f"/api/runs/{STOPPED}/none",
        f"/api/runs/{STOPPED}/series?first=x",
        "/web.py",
        "/api",
    ],
)
def test_paths_and_runs_that_are_none_are_refused(page, path):
    status, _, content = page.ask(path)
    assert (status, b"root:" in content, b"import" in content) == (404, False, False)
    assert json.loads(content)["error"]["what"]


@pytest.mark.parametrize("path", ["/", "/page.js", "/charts.js", "/page.css", "/icon.svg", "/api/runs", "/none"])
def test_every_answer_says_what_may_run_and_who_may_have_it(page, path):
    _, headers, content = page.ask(path)
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert headers["cross-origin-resource-policy"] == "same-origin"
    text = content.decode()
    if path != "/icon.svg":  # the namespace of SVG is a name
        assert not re.search(r"(?<!127\.0\.0\.1)https?://(?!127\.0\.0\.1)", text), "nothing comes from elsewhere"
    if path == "/":
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", text), "no inline script or style"


def test_the_page_writes_text_as_text():
    folder = Path(__file__).parents[3] / "src/gangline/page/assets"
    scripts = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.js"))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", scripts
    )


def test_it_listens_on_loopback_only(page):
    tables = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    places = [row.split()[1] for row in tables[1:] if row.split()[3] == "0A"]
    assert [place for place in places if place.endswith(f":{page.port:04X}")] == [f"0100007F:{page.port:04X}"]


def test_a_port_that_is_taken_is_told(page, home):
    argv = [sys.executable, "-m", "gangline.cli.main", "ui", "--port", str(page.port)]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (said.returncode, "  fix   " in said.stderr) == (2, True), said.stderr


def test_the_screen_says_how_to_reach_it_and_ctrl_c_ends_it(page, home):
    other = Page(home).log_in()  # it answers, so the screen is complete
    code, said = other.end()
    assert f"ssh -N -L {other.port}:127.0.0.1:{other.port} " in said
    assert code == 130
    assert "Traceback" not in said
