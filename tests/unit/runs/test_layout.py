"""Names of a run's files stand in runs/layout.py; the agent, which imports nothing of gangline, has a copy."""

from __future__ import annotations

import ast
from pathlib import Path

from gangline.agent import host_files
from gangline.agent.supervise import script_hooks
from gangline.runs.layout import AGENT_NAMES, PHASES, SCHEMA_VERSION, RunLayout
from tests.source_trees import SOURCE, source_trees

NAMES = {
    *("job.json", "cluster.json", "inventory.json", "plan.json", "findings.json", "inputs.json", "command.json"),
    "typed.json",
    *("supervision.json", "order.json", "leave.json", "last.json", "comparison.json", "metrics.jsonl", "events.jsonl"),
    *("request.json", "gang.json", "networks.json", "base.json", "again.json", "board.json", "outcome.json"),
    *("times.json", "result.json", "supervisor.log", "supervisor.lock", "prepare.lock", "agent.json", "status.json"),
    *("resting.json", "next.json", "handed.json", "console.log"),
}
"""Not among them: state.json, which a checkpoint has, too, and exit.json, the end of rank-<r>.exit.json."""
HOMES = {"runs/layout.py", "runs/old_format.py", "agent/host_files.py", "agent/supervise/script_hooks.py"}


def test_the_names_of_the_agent_are_those_of_the_layout() -> None:
    assert {name: getattr(host_files, name) for name in AGENT_NAMES} == AGENT_NAMES
    assert host_files.PHASES == PHASES
    assert RunLayout(Path(), "calm-otter-7").metrics.name == script_hooks.METRICS
    assert "{}.{}".format(*SCHEMA_VERSION) == host_files.SCHEMA_VERSION


def test_no_other_module_types_the_name_of_a_file_of_a_run() -> None:
    found = []
    for path, tree in source_trees():
        name = path.relative_to(SOURCE).as_posix()
        if name not in HOMES:
            values = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
            found += [f"{name}:{node.lineno}: {node.value}" for node in values if node.value in NAMES]
    assert found == []
