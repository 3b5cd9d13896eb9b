"""`reach`: try the ports of other hosts, where `listen` runs, and measure the way there.

    gangline-agent reach < {"token", "tries", "timeout_s", "measure": [names below], "seconds", "targets": [
                            {"host", "instance", "ports": [{"kind", "address", "port"}], "udp": port, "brief": bool}]}

One JSON line per target, with the fields of `Pair` in gangline.inventory.pairs, but not the source. Connections to all
ports are tried at the same time; then what `measure` names:
    time         round trips and the difference of the clocks, one target after the other
    packets      loss, the largest packet that arrives, and whether a full TCP segment does; all targets at once, but
                 for those that are `brief`
    burst        the speed of 1 MiB, one target after the other: a hint, no measurement
    throughput   the speed of one connection in `seconds`, one target after the other

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gangline.agent.host_facts import interfaces
from gangline.agent.netprobe import path

SECONDS_LIMIT = 10.0
THREADS = 64
BURST_BYTES = 1 << 20
BURST_S = 1.0
RETRY_PAUSE_S = 0.2
NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


class Asker:
    """What is asked of every target."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.token = str(request["token"])
        self.timeout_s = min(float(request.get("timeout_s", 2.5)), SECONDS_LIMIT)
        self.tries = min(int(request.get("tries", 2)), 5)
        self.measures = set(request.get("measure", ()))
        self.seconds = min(float(request.get("seconds", 1.0)), SECONDS_LIMIT)

    def try_port(self, target: dict[str, Any], port: dict[str, Any]) -> dict[str, Any]:
        """Try one port until it answers, `tries` times at the most: a single lost packet is no verdict."""
        said: dict[str, Any] = {}
        for number in range(self.tries):
            if number:
                time.sleep(RETRY_PAUSE_S)
            # longer the second time: a host may be busy
            said = dict(port, tries=number + 1, **self._once(target, port, self.timeout_s * (1 + number / 2)))
            if said["outcome"] in ("ok", "other"):
                break
        return said

    def _once(self, target: dict[str, Any], port: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        begun = time.monotonic()
        try:
            with path.ProbeConnection(port["address"], port["port"], self.token, timeout_s) as way:
                answer = way.ask_time()
                said = {"source": way.source, "answered_by": answer["host"]}
                right = answer["instance"] == target["instance"]
                return dict(said, outcome="ok" if right else "other", seconds=time.monotonic() - begun)
        except OSError as error:
            return dict(_outcome(error), seconds=time.monotonic() - begun)

    def measure_alone(self, said: dict[str, Any], names: set[str]) -> None:
        """What is measured of one target at a time."""
        address, port = _open_port(said)
        for name in ("time", "burst", "throughput"):
            if name not in names & self.measures or (name != "time" and said.get("full_segment") is False):
                continue
            try:
                with path.ProbeConnection(address, port, self.token, self.timeout_s) as way:
                    if name == "time":
                        said.update(path.round_trips(way))
                    elif name == "burst":
                        burst = path.throughput(way, seconds=BURST_S, limit_bytes=BURST_BYTES)
                        said["burst_mbps"] = burst["throughput_mbps"]
                    else:
                        said.update(path.throughput(way, seconds=self.seconds))
            except OSError as error:
                said.setdefault("problems", []).append(name + ": " + str(error))

    def measure_packets(self, target: dict[str, Any], said: dict[str, Any]) -> None:
        """What may have to wait for what never comes."""
        address, port = _open_port(said)
        said["full_segment"] = path.full_segment(address, port, self.token)
        if target.get("udp"):
            mtu = interfaces.mtu_of(said["interface"]) if said.get("interface") else None
            said.update(path.largest_packet(address, target["udp"], self.token, mtu or 1500))
            if said["largest_packet"]:
                said.update(path.loss(address, target["udp"], self.token))


def _outcome(error: OSError) -> dict[str, Any]:
    """Why there was no connection, in one of a few words."""
    if isinstance(error, path.WrongGreeting):
        return {"outcome": "stranger", "detail": str(error)}
    if isinstance(error, socket.timeout) or error.errno == errno.ETIMEDOUT:
        return {"outcome": "timed out"}
    if error.errno == errno.ECONNREFUSED:
        return {"outcome": "refused"}
    if error.errno in NO_ROUTE:
        return {"outcome": "no route", "detail": error.strerror}
    return {"outcome": "error", "detail": str(error.strerror or error)}


def _open_port(said: dict[str, Any]) -> tuple[str, int]:
    """Where it answered; the data address before the other."""
    last = [each for each in said["tries"] if each["outcome"] == "ok"][-1]
    return last["address"], last["port"]


def _is_open(said: dict[str, Any]) -> bool:
    return any(each["outcome"] == "ok" for each in said["tries"])


def try_all_ports(asker: Asker, targets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every port of every target at the same time; what each target said."""
    own = interfaces.owners()
    jobs = [(target, port) for target in targets for port in target["ports"]]
    with ThreadPoolExecutor(max_workers=max(1, min(THREADS, len(jobs)))) as pool:
        answers = list(pool.map(lambda job: asker.try_port(*job), jobs))
    said = []
    for target in targets:
        tries, answers = answers[: len(target["ports"])], answers[len(target["ports"]) :]
        source = next((each["source"] for each in reversed(tries) if "source" in each), None)
        record = {
            "target": target["host"],
            "tries": tries,
            "source_address": source,
            "interface": own.get(source or ""),
        }
        addresses = dict.fromkeys(each["address"] for each in tries)
        record["neighbour"] = next(filter(None, map(interfaces.neighbour, addresses)), None)
        said.append(record)
    return said


def ask_all(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The verb: try and measure every target."""
    asker, targets = Asker(request), list(request["targets"])
    said = try_all_ports(asker, targets)
    reached = [(target, record) for target, record in zip(targets, said) if _is_open(record)]
    for _, record in reached:
        asker.measure_alone(record, {"time"})
    if "packets" in asker.measures:
        thorough = [pair for pair in reached if not pair[0].get("brief")]
        threads = [threading.Thread(target=asker.measure_packets, args=pair) for pair in thorough]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for _, record in reached:
        asker.measure_alone(record, {"burst", "throughput"})
    return said
