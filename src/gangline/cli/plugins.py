"""`gangline plugins`: which plug-ins are installed, and which of them cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.callbacks import CALLBACKS
from gangline.catalog.gpu_specs import GPU_TABLES
from gangline.checks.judge import FAMILIES
from gangline.cli.options import AsJson
from gangline.cli.output import Terminal, print_answer
from gangline.exporters import EXPORTERS
from gangline.formats import FORMATS
from gangline.launch.backends import BACKENDS
from gangline.plugins import GROUPS, SLOW_S, Plugin, Table, find_plugins, timed_load
from gangline.report.text_table import table
from gangline.strategies.table import STRATEGIES

TABLES: Mapping[str, Table[Any]] = {
    each.group: each for each in (BACKENDS, STRATEGIES, FAMILIES, FORMATS, EXPORTERS, CALLBACKS, GPU_TABLES)
}
"""Every table that plug-ins add rows to, by its group of entry points."""


def command(
    as_json: AsJson = False,
) -> None:
    """List the plug-ins of this Python. Imports each one to find the broken and the slow ones; changes nothing."""
    terminal = Terminal()
    rows = []
    for plugin in sorted(find_plugins(), key=lambda each: (list(GROUPS).index(each.group), each.name)):
        terminal.progress(f"importing {plugin.value} of {plugin.package}")
        rows.append((plugin, *timed_load(TABLES[plugin.group], plugin)))
    terminal.clear()
    cells = [(each.noun, each.name, f"{each.package} {each.version}", _state(s, why)) for each, s, why in rows]
    none = [f"no plug-ins installed; the groups of entry points are {', '.join(GROUPS)}"]
    lines = table(("kind", "name", "package", "state"), cells) if rows else none
    print_answer({"plugins": [_document(*row) for row in rows]}, lines, as_json=as_json)


def _state(seconds: float, fault: str) -> str:
    if fault:
        return f"cannot be used: {fault}"
    return f"slow: its import takes {seconds:.1f} s" if seconds > SLOW_S else "ok"


def _document(plugin: Plugin, seconds: float, fault: str) -> dict[str, str | float | bool]:
    return {
        "group": plugin.group,
        "name": plugin.name,
        "package": plugin.package,
        "version": plugin.version,
        "entry_point": plugin.value,
        "usable": not fault,
        "fault": fault,
        "import_s": round(seconds, 3),
    }
