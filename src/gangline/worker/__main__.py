"""`python -m gangline.worker VERB ...`: what runs on a host. Talks JSON lines on stdout where a controller listens."""

from __future__ import annotations

import importlib
import sys

from gangline.errors import GanglineError
from gangline.worker.json_lines import error_document, lacking, write_line
from gangline.worker.rank_files import early, hold

# verb -> module and function taking argv; imported on use, for each costs seconds
VERBS = {
    "train": ("gangline.worker.train", "train_main"),
    "launch": ("gangline.worker.launch", "launch_main"),
    "prefork": ("gangline.worker.prefork", "prefork_main"),
    "look-lengths": ("gangline.worker.data.look", "lengths_main"),
    "look-tables": ("gangline.worker.data.look", "tables_main"),
    "preview": ("gangline.worker.data.preview", "preview_main"),
    "inputs": ("gangline.worker.data.prepare", "inputs_main"),
    "export": ("gangline.worker.export", "export_main"),
    "gguf": ("gangline.worker.gguf", "gguf_main"),
    "publish": ("gangline.worker.publish", "publish_main"),
    "merge": ("gangline.worker.adapter_merge", "merge_main"),
    "generate": ("gangline.worker.generate", "generate_main"),
    "talk": ("gangline.worker.talk", "talk_main"),
    "evaluate": ("gangline.worker.harness", "evaluate_main"),
    "serve": ("gangline.worker.serving.endpoint", "serve_main"),
    "stage": ("gangline.worker.serving.stage_worker", "stage_main"),
    "scratch": ("gangline.worker.scratch", "scratch_main"),
    "bench-collective": ("gangline.worker.bench_collective", "bench_main"),
    "bench-scaling": ("gangline.worker.bench_scaling", "scaling_main"),
    "calibrate": ("gangline.worker.calibrate", "calibrate_main"),
}


def main(argv: list[str]) -> int:
    """Run one verb and return its exit code."""
    if not argv or argv[0] not in VERBS:
        sys.stderr.write(f"usage: python -m gangline.worker {{{','.join(VERBS)}}} ...\n")
        return 2
    module, function = VERBS[argv[0]]
    if argv[0] in {"train", "prefork"}:
        hold()
    if argv[0] == "train":
        early(argv[1:])
    try:
        return int(getattr(importlib.import_module(module), function)(argv[1:]) or 0)
    except ModuleNotFoundError as error:
        return _tell(lacking(error), argv[0])
    except GanglineError as error:
        return _tell(error, argv[0])


def _tell(error: GanglineError, verb: str) -> int:
    if verb not in {"generate", "talk"}:  # their stdout is for a person, not for a controller
        write_line(**error_document(error))
    sys.stderr.write(f"{error}\n")
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
