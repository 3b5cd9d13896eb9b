"""Which chat templates does `data.chat_template` know by name? One file each; their text becomes a part of the job.

The forms are those that the models of these names were tuned on; the text of every template is our own. None of them
has rules for tool calls or images: a model that was tuned on those has a template of its own.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent

CHAT_TEMPLATES: dict[str, str] = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.jinja"))
}
"""Name -> text of the template."""
