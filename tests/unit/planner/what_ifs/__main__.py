"""Says which answers are wrong, and why. IDs: only these.

`--write` writes the screens of those that are right, and takes them off not_yet.yaml; read the difference.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.unit.planner.test_what_ifs import wrong
from tests.unit.planner.what_ifs import GOLDEN, HERE, NOT_YET, QUESTIONS, USUAL, ask, golden

writes = "--write" in sys.argv
wanted = [word for word in sys.argv[1:] if not word.startswith("--")]
missing, regressed = dict(NOT_YET), False
for question in QUESTIONS:
    if wanted and question.id not in wanted:
        continue
    with tempfile.TemporaryDirectory() as folder:
        answer = ask(question.on(USUAL), question.plan, Path(folder) / question.id)
    if found := list(wrong(question, answer)):
        regressed = regressed or question.id not in missing
        sys.stdout.write(f"{question.id}{'' if question.id in missing else ' (was right)'}: {'; '.join(found)[:600]}\n")
    else:
        missing.pop(question.id, None)
        if writes:
            GOLDEN.mkdir(parents=True, exist_ok=True)
            (GOLDEN / f"{question.id}.txt").write_text(golden(question, answer), encoding="utf-8")
if writes:
    lines = [f"{name}: {why}\n" for name, why in missing.items()] or ["{}\n"]
    (HERE / "not_yet.yaml").write_text("".join(lines), encoding="utf-8")
sys.exit(regressed)
