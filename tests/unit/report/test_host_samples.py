"""What a summary says of the samples of hosts."""

import json

import pytest

from gangline.report.host_samples import card_events, card_rows, host_rows, parse_samples, reason_at
from gangline.report.run_summary import summary_json, summary_page, with_samples
from gangline.runs.layout import RunLayout
from tests.unit.report.stories import HERE, Past
from tests.unit.report.test_run_summary import read, step, texts

HEAD = {
    "samples": "pc2",
    "interval_s": 2.0,
    "cards": [{"index": 0, "name": "RTX 4070", "uuid": "GPU-1", "simulated": True}],
}
COLUMNS = ["cpu_percent", "memory_bytes", "net/eth0/rx_bytes_per_s", "net/eth0/tx_bytes_per_s", "gpu/0/temperature_c"]
HOT = {"time": 1100.0, "gpu": 0, "simulated": True, "temperature_c": 91.0, "reasons": ["temperature (driver)"]}
LINES = [
    HEAD,
    {"columns": COLUMNS},
    [1000.0, 2, [40.0, 1 << 30, 1.25e6, 0, 60], [50.0, 2 << 30, 2.5e6, 0, 61]],
    [1004.0, 1, [100.0, 4 << 30, 0, 0, 91]],
    {"event": "throttled", **HOT},
    {"event": "throttled-over", "time": 1220.0, "gpu": 0, "simulated": True},
]


def samples(lines=LINES):
    return parse_samples("pc2", [json.dumps(line).encode() for line in lines])


def test_a_host_and_its_card_are_a_row_each():
    assert host_rows([samples()]) == [
        (
            "pc2",
            "60 %, at most 100 %",
            "2 GiB, at most 4 GiB",
            "eth0 receives 6.7 Mbit/s (at most 20.0 Mbit/s), sends 0.0 Mbit/s (at most 0.0 Mbit/s)",
            "reads -, writes -",
            "-",
        )
    ]
    (row,) = card_rows([samples()])
    assert row[:2] == ("pc2", "0: RTX 4070 (simulated)")
    assert row[6] == "70 C, at most 91 C"


def test_the_step_is_named_from_which_a_card_throttled():
    steps = [(1000.0 + second, second) for second in range(300)]
    said = "pc2 GPU 0 (simulated) throttled from step 100 for 2 min 00 s: 91 C, temperature (driver)"
    assert card_events([samples()], steps) == [(1100.0, said)]


@pytest.mark.parametrize(("time", "is_reason"), [(1099.0, False), (1150.0, True), (1221.0, False)])
def test_a_card_explains_a_slow_host_only_while_it_throttles(time, is_reason):
    assert (reason_at(samples(), time) is not None) == is_reason


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"[1]", b'["a", 1, []]', b"3", b'{"event": "throttled"}', b'{"columns": 1}', b"\xff"]
)
def test_lines_of_no_use_are_passed_over(line):
    found = parse_samples("pc2", [*(json.dumps(each).encode() for each in LINES[:3]), line])
    assert (len(found.rows), found.events) == (1, [])


def test_the_summary_names_the_heat_beside_the_straggler(tmp_path):
    past = Past(tmp_path)
    past.state("running")
    past.line(past.head.metrics, step(812, time="1970-01-01T00:18:20Z"))
    slow = {"step": 813, "host": "pc2", "rank": 1, "cause": "compute", "factor": 1.5, "what": "pc2 is slow"}
    past.event("straggler", source="worker", **{**slow, "time": "1970-01-01T00:18:30Z"})
    layout = RunLayout(tmp_path / "there", "calm-otter-7")
    layout.folder.mkdir(parents=True)
    layout.samples("pc2").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    run = with_samples(read(past), [("pc2", HERE, layout)])
    page = summary_page(run)
    assert "pc2 GPU 0 (simulated) throttled from step 812" in texts(page, "What the machines did")
    assert "are simulated: these figures are of no real card" in texts(page, "What the machines did")
    assert "; at that time GPU 0 (simulated) throttled: 91 C" in texts(page, "Faults, and what was done")
    assert summary_json(run)["hosts"]["pc2"]["most"]["gpu/0/temperature_c"] == 91
