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
            entry = zipfile.ZipInfo(path)  # of no time: the same content is the same wheel
            entry.external_attr = 0o600 << 16
            wheel.writestr(entry, content)
