"""Packages with entry points, made in a folder as `pip install --target` leaves them."""

import importlib
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from gangline import plugins
from gangline.config import validate

EXAMPLES = Path(__file__).parents[1] / "examples" / "plugins"


def install_examples(folder, *names):
    """Those packages of examples/plugins (all, if none is named), installed by pip from their sources without a
    network; the folder for Python's path.
    """
    sources, site = folder / "sources", folder / "site"
    shutil.copytree(EXAMPLES, sources)
    names = names or sorted(path.parent.name for path in EXAMPLES.glob("*/pyproject.toml"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*pip, "--target", site, *(sources / name for name in names)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return site


def make_package(folder, name, *, version="0.1", modules, entry_points):
    """Write modules ({path: text}) and the dist-info of a package; entry_points: {group: {name: module:object}}."""
    record = []
    for path, text in modules.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        record.append(f"{path},,")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    rows = []
    for group, entries in entry_points.items():
        rows += [f"[{group}]", *(f"{entry} = {value}" for entry, value in entries.items()), ""]
    info.joinpath("entry_points.txt").write_text("\n".join(rows))
    record += [f"{info.name}/{file},," for file in ("METADATA", "entry_points.txt", "RECORD")]
    info.joinpath("RECORD").write_text("\n".join(record) + "\n")
    return folder


@contextmanager
def installed(folder):
    """The packages of `folder` are installed for this process, and gone again afterwards with all their modules."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    _forget()
    try:
        yield folder
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        _forget()


def _forget():
    importlib.invalidate_caches()
    plugins.find_plugins.cache_clear()
    plugins.package_files.cache_clear()
    validate._schema.cache_clear()  # it lists the rows of the tables
