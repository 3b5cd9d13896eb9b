"""The environment that ranks run in, asked of its own Python; and the programs on this host."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, List

from gangline.agent.bounded import ask_python, stretched

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "datasets",
    "safetensors",
    "tokenizers",
    "numpy",
    "accelerate",
    "deepspeed",
    "bitsandbytes",
    "flash-attn",
    "wandb",
    "mlflow-skinny",
    "trackio",
    "triton",
    "tensorboard",
    "nvidia-nccl-cu11",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "gangline",
)
"""Packages whose versions matter to a run."""
PROGRAMS = ("rsync", "nvidia-smi", "ibstat", "module", "modulecmd", "apptainer", "singularity", "conda", "uv", "sbatch")
PYTHON_NAME = re.compile(r"python3(\.\d+)?")
MARK = "gangline-packages"
ENVIRONMENT_S = 10.0

# Runs in any Python of the last ten years. Nothing is imported but the standard library: importing torch takes seconds
# and can fail.
QUESTION = r"""
import json, os, platform, re, sys
def version(name):
    try:
        from importlib import metadata
        return metadata.version(name)
    except Exception:
        return None
def torch():
    from importlib.util import find_spec
    try:
        spec = find_spec("torch")
        with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as stream:
            text = stream.read(10000)
    except Exception:
        return None
    found = {}
    for key in ("cuda", "hip", "git_version"):
        value = re.search(r"^%s(?:\s*:[^=]*)?\s*=\s*['\"]([^'\"]*)['\"]" % key, text, re.M)
        found[key] = value.group(1) if value else None
    return found
names = sys.argv[1:]
print("gangline-packages" + json.dumps({
    "python": platform.python_version(),
    "implementation": platform.python_implementation(),
    "executable": sys.executable,
    "arch": platform.machine(),
    "packages": dict((name, version(name)) for name in names),
    "torch": torch(),
}))
"""


def packages(request: Dict[str, Any]) -> Dict[str, Any]:
    """Versions in the environment of `python_argv`; {} where nobody named one."""
    argv = [str(word) for word in request.get("python_argv") or []]
    if not argv:
        return {}
    env = {str(name): str(value) for name, value in (request.get("python_env") or {}).items()}
    return ask_python(argv, QUESTION, *PACKAGES, mark=MARK, timeout_s=stretched(ENVIRONMENT_S), env=env)


def programs(_request: Dict[str, Any]) -> Dict[str, Any]:
    """Where programs are that other parts of gangline may use; null for what is not there."""
    found = {name: shutil.which(name) for name in PROGRAMS}
    # `module` is a function of the shell; what tells of it is the variable that it works with
    found["module"] = found["module"] or os.environ.get("LMOD_CMD") or os.environ.get("MODULESHOME")
    return {"found": found, "pythons": pythons()}


def pythons() -> List[str]:
    """Every python3 on the path and where people install others, without running them."""
    folders = [*filter(None, os.environ.get("PATH", "").split(os.pathsep)), "/usr/local/bin", "/opt/conda/bin"]
    if home := os.environ.get("HOME"):
        folders += [f"{home}/{name}/bin" for name in ("miniconda3", "anaconda3", "miniforge3", ".local")]
    paths = [path for folder in folders for each in _behind(folder) for path in sorted(each.glob("python3*"))]
    found: Dict[str, str] = {}
    for path in [*paths, *([Path(sys.executable)] if sys.executable else [])]:
        if (PYTHON_NAME.fullmatch(path.name) or path not in paths) and os.access(path, os.X_OK):
            found.setdefault(os.path.realpath(path), str(path))
    return sorted(found.values())[:30]


def _behind(folder: str) -> List[Path]:
    """The folder; of pyenv's shims, which start dozens of shells each, those of the Pythons that they stand for."""
    path = Path(folder)
    versions = path.parent / "versions"
    return sorted(versions.glob("*/bin")) if path.name == "shims" and versions.is_dir() else [path]
