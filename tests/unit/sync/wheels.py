"""Tiny wheels, made by hand: packages for tests that take no time and no network."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path


def marked(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def make_wheel(
    folder: Path, name: str, version: str, *, needs: str = "", tag: str = "py3-none-any", text: str = ""
) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": text or f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}=  {name}:main\n",
    }
    record = (
        "".join(f"{path},{marked(content)},{len(content)}\n" for path, content in files.items()) + f"{info}/RECORD,,\n"
    )
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        for path, content in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, content)


INSTALLER = """
import pathlib, sys, sysconfig, zipfile

words = sys.argv[1:]
assert words[0] == "install" and "--no-index" in words and "--no-compile" in words, words
shop = pathlib.Path(words[words.index("--find-links") + 1])
wanted = pathlib.Path(words[words.index("--requirement") + 1]).read_text().split()
site = pathlib.Path(sysconfig.get_path("purelib"))
for line in wanted:
    name, _, version = line.partition("==")
    (path,) = shop.glob(name.replace("-", "_") + "-" + version + "*.whl")
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(site)
    program = pathlib.Path(sysconfig.get_path("scripts")) / name.replace("-", "_")
    program.write_text("#!" + sys.executable + chr(10))
"""


def make_pip(folder: Path) -> None:
    """A pip of a few lines, for hosts: it unpacks what it is told to. The real one takes seconds."""
    with zipfile.ZipFile(folder / "pip-99.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pip/__init__.py", "")
        wheel.writestr("pip/__main__.py", INSTALLER)
        wheel.writestr("pip-99.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pip\nVersion: 99.0\n")
        wheel.writestr("pip-99.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("pip-99.0.dist-info/RECORD", "")
