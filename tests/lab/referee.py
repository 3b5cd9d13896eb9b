"""Who led a run, and whether anything was done twice: by the records of all hosts, for tests and benchmarks/lost_head.py."""

import json
from dataclasses import dataclass, field

from tests.lab.machine import LabHost
from tests.lab.user import processes_of_runs

COLLECT = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
wanted = ["lead/*/heartbeat-*.json", "lead/*/promise.json", "attempts/*/gang.json", "metrics.jsonl", "events.jsonl", "state.json"]
found = {str(p.relative_to(folder)): p.read_text(errors="replace") for each in wanted for p in folder.glob(each)}
print(json.dumps(found))
"""


@dataclass
class Records:
    """What the hosts of a run have written. wrong: what may not be."""

    files: dict = field(default_factory=dict)
    """Host -> path below the run's folder -> text."""
    wrong: list = field(default_factory=list)

    def take(self, hosts: list[LabHost], run: str) -> "Records":
        """Read them from hosts that are on; those of a host that is off stay as they were read before."""
        for host in hosts:
            said = host.check(["/usr/bin/python3", "-c", COLLECT, f"gangline/runs/{run}"])
            self.files[host.name] = json.loads(said)
        return self

    def lines(self, name: str) -> list[tuple[str, dict]]:
        """Host and record of every whole line of a file."""
        found = []
        for host, files in self.files.items():
            for line in files.get(name, "").splitlines():
                try:
                    found.append((host, json.loads(line)))
                except ValueError:
                    continue
        return found

    @property
    def leaders(self) -> dict[int, set[str]]:
        """Term -> the hosts that have led in it, as any host has heard."""
        found: dict[int, set[str]] = {}
        for files in self.files.values():
            for path, text in files.items():
                if "/heartbeat-" in path:
                    found.setdefault(int(path.rpartition("-")[2][:-5]), set()).add(json.loads(text)["leader"])
        return found

    def judge(self) -> list[str]:
        """What may not be: two leaders in a term, an attempt that two have begun, steps of two attempts at once, a
        step that an attempt has done twice.
        """
        wrong = [f"term {term} has leaders {sorted(names)}" for term, names in self.leaders.items() if len(names) > 1]
        gangs: dict[str, set[str]] = {}
        for files in self.files.values():
            for path, text in files.items():
                if path.endswith("/gang.json"):
                    gangs.setdefault(path, set()).add(json.dumps(json.loads(text), sort_keys=True))
        wrong += [f"{path} differs between hosts" for path, found in gangs.items() if len(found) > 1]
        steps: dict[int, dict[int, str]] = {}
        for _, record in self.lines("metrics.jsonl"):
            if record.get("kind") == "step":
                done = steps.setdefault(record["attempt"], {})
                if done.get(record["step"], record["time"]) != record["time"]:
                    wrong.append(f"attempt {record['attempt']} did step {record['step']} twice")
                done[record["step"]] = record["time"]
        for attempt, done in steps.items():
            later = [min(times.values()) for other, times in steps.items() if other > attempt and times]
            if later and done and max(done.values()) > min(later):
                wrong.append(f"attempt {attempt} did a step at {max(done.values())}, after {min(later)} of a later one")
        return wrong


def ranks_left(hosts: list[LabHost]) -> list[str]:
    """Processes of runs on these hosts."""
    return [f"{host.name}: {line}" for host in hosts for line in processes_of_runs(host)]
