"""What a host does, from recorded trees of /proc and /sys; and the bounded file of it."""

import json

import pytest

from gangline.agent.host_facts import samples
from gangline.agent.host_facts.samples import CardReader, HostReader, amd_figures
from gangline.agent.supervise import sampler
from gangline.agent.supervise.sampler import CardEvents, SampleSeries

NET = "Inter-| Receive | Transmit\n face |bytes packets\n    lo: 10 1 0 0 0 0 0 0 10 1\n  eth0: {} 1 0 0 0 0 0 0 {} 1\n  eth1: 0 0 0 0 0 0 0 0 0 0\n"


def lay(root, *, busy, idle, received, sent, read, psi):
    """A tree of /proc written after proc(5): not recorded on a host."""
    files = {
        "proc/stat": f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1\n",
        "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 750 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
        "proc/pressure/cpu": f"some avg10=0.00 avg60=0.00 avg300=0.00 total={psi}\n",
        "proc/diskstats": f" 8 0 sda 1 0 {read} 1 1 0 4 0 0 0\n 8 1 sda1 1 0 {read} 1 1 0 4 0 0 0\n 7 0 loop0 1 0 9 1 1 0 9 0\n",
        "proc/net/dev": NET.format(received, sent),
        "sys/block/sda/size": "1",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_rates_are_those_since_the_last_look(tmp_path, monkeypatch):
    lay(tmp_path, busy=100, idle=100, received=1000, sent=500, read=10, psi=1_000_000)
    moments = iter([10.0, 12.0])
    monkeypatch.setattr(samples.time, "monotonic", lambda: next(moments))
    host = HostReader(tmp_path)
    assert host.figures() == {"memory_bytes": 250 * 1024, "memory_percent": 25.0}
    lay(tmp_path, busy=150, idle=150, received=3000, sent=400, read=30, psi=1_500_000)
    assert host.figures() == {
        "memory_bytes": 250 * 1024,
        "memory_percent": 25.0,
        "cpu_percent": 50.0,
        "pressure/cpu_percent": 25.0,
        "disk/read_bytes_per_s": 20 * 512 / 2,
        "disk/write_bytes_per_s": 0.0,
        "net/lo/rx_bytes_per_s": 0.0,
        "net/lo/tx_bytes_per_s": 0.0,
        "net/eth0/rx_bytes_per_s": 1000.0,
    }  # a counter that fell, as where an interface was made anew, gives no rate


def test_a_host_that_tells_nothing_has_no_figures(tmp_path):
    host = HostReader(tmp_path)
    assert (host.figures(), host.figures()) == ({}, {})


def test_an_amd_card_is_read_from_the_kernel(tmp_path):
    """Written after the documentation of amdgpu: not recorded on a card."""
    rows = {
        "vendor": "0x1002",
        "gpu_busy_percent": "97",
        "mem_info_vram_used": str(6 << 30),
        "mem_info_vram_total": str(24 << 30),
        "hwmon/hwmon3/power1_average": "301000000",
        "hwmon/hwmon3/temp1_input": "71000",
        "hwmon/hwmon3/freq1_input": "2400000000",
    }
    place = tmp_path / "sys/class/drm/card1/device"
    for name, text in rows.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text + "\n")
    figures = {"utilization_percent": 97, "memory_bytes": 6 << 30, "memory_percent": 25.0}
    assert amd_figures(place) == pytest.approx({**figures, "power_w": 301, "temperature_c": 71, "clock_mhz": 2400})
    cards = CardReader(root=tmp_path)
    assert [(card["index"], card["name"]) for card in cards.cards if card["name"] == "AMD GPU"] == [(0, "AMD GPU")]
    assert cards.figures()["gpu/0/power_w"] == pytest.approx(301)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows(path):
    return [line for line in lines(path) if isinstance(line, list)]


def test_old_parts_of_a_series_lose_half_their_resolution_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "LEVEL_ROWS", 4)
    path = tmp_path / "samples-pc1.jsonl"
    series = SampleSeries(path, head={"samples": "pc1"})
    for second in range(200):
        series.add(float(second), {"cpu_percent": float(second)})
    series._write_whole()
    found = rows(path)
    counts = [row[1] for row in found]
    assert sum(counts) == 200
    assert counts == sorted(counts, reverse=True)
    assert len(counts) < 40
    assert all(row[2] == [pytest.approx(row[0] + (row[1] - 1) / 2)] for row in found)  # means, whole and in order
    assert all(row[3] == [row[0] + row[1] - 1] for row in found if row[1] > 1)


def test_a_later_attempt_goes_on_with_the_file_and_with_other_columns(tmp_path):
    path = tmp_path / "samples-pc1.jsonl"
    SampleSeries(path, head={"samples": "pc1"}).add(1.0, {"a": 1.0, "b": 2.0}, [{"event": "lost", "time": 1.0}])
    with path.open("a") as stream:
        stream.write('{"cut of')
    second = SampleSeries(path, head={"samples": "pc1"})
    second.add(3.0, {"c": 5.0, "b": 4.0})
    second.add(5.0, {"c": 6.0})
    assert lines(path)[0] == {"samples": "pc1"}
    assert [line for line in lines(path) if "event" in line] == [{"event": "lost", "time": 1.0}]
    assert [line["columns"] for line in lines(path) if "columns" in line] == [["a", "b", "c"]]
    assert rows(path) == [[1.0, 1, [1, 2]], [3.0, 1, [None, 4, 5]], [5.0, 1, [None, None, 6]]]


def test_a_file_that_cannot_be_written_for_a_while_has_all_rows_afterwards(tmp_path):
    path = tmp_path / "away" / "samples-pc1.jsonl"
    series = SampleSeries(path, head={"samples": "pc1"})
    with pytest.raises(FileNotFoundError):
        series.add(1.0, {"a": 1.0})
    path.parent.mkdir()
    series.add(3.0, {"a": 2.0})
    assert rows(path) == [[1.0, 1, [1]], [3.0, 1, [2]]]


class Cards:
    """A card whose state the test sets."""

    def __init__(self):
        self.cards = [{"index": 0, "name": "GPU", "uuid": "GPU-1", "simulated": True}]
        self.throttle, self.processes = {}, {}


def test_a_card_that_is_hot_for_some_looks_is_told_once_and_once_when_it_is_over():
    events, cards, told = CardEvents(list), Cards(), []
    for look in range(60):
        is_hot = 10 <= look < 30 or look == 3
        cards.throttle = {0: ["temperature (driver)"] if is_hot else []}
        told += events.look(2.0 * look, cards, {"gpu/0/temperature_c": 91.0 if is_hot else 60.0})
    about = {"gpu": 0, "simulated": True}
    assert told == [
        {"event": "throttled", "time": 24.0, "reasons": ["temperature (driver)"], "temperature_c": 91.0, **about},
        {"event": "throttled-over", "time": 88.0, "seconds": 64.0, **about},
    ]


def test_only_processes_that_are_not_of_the_run_are_foreign(monkeypatch):
    cards = Cards()
    names = {11: "python", 22: "game"}
    monkeypatch.setattr(sampler, "_name_of", names.get)
    cards.processes = {0: [11, 22, 33]}  # 33: of another container, which nobody here sees
    events = CardEvents(lambda: [11])
    told = [event for look in range(5) for event in events.look(float(look), cards, {})]
    assert [(event["event"], event["processes"]) for event in told] == [("foreign", [{"pid": 22, "name": "game"}])]


def test_errors_of_the_memory_count_from_the_first_look_on():
    events = CardEvents(list)
    told = [e for count in (7, 7, 9) for e in events.look(1.0, Cards(), {"gpu/0/ecc_uncorrected": float(count)})]
    assert [(event["event"], event["uncorrected"]) for event in told] == [("ecc", 2)]
