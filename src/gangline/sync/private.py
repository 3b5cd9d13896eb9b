"""What never leaves the user's computer by itself: files that may hold secrets, and what is no source at all."""

from __future__ import annotations

import fnmatch
import re

SECRET_NAMES = (
    ".env*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk", "*.kdbx", "*.gpg",
    ".ssh", ".netrc", "_netrc", ".aws", ".azure", ".gcloud", ".kube", ".docker", ".dockercfg", ".gnupg", ".pypirc",
    ".npmrc", ".pgpass", ".htpasswd", ".git-credentials", "credentials*", "client_secret*", "service_account*.json",
    ".huggingface", ".kaggle", ".bash_history", ".zsh_history", ".python_history",
)  # fmt: skip
"""Names of files and folders, whatever their case."""
SECRETS_OR_SOURCE = ("secret.*", "secrets.*")
"""Files of secrets; a file of source may be called so, too."""
KEYS_OR_DATA = "id_*"
"""Private keys of ssh; a file of source or data may be called so, too, and then its content tells."""
SOURCE = re.compile(r".*\.(py|pyi|pyx|c|cc|cpp|cu|cuh|h|hpp|rs|go|js|ts|md|rst|ipynb)", re.DOTALL)
DATA = re.compile(r".*\.(json|jsonl|txt|csv|tsv|yaml|yml|toml|parquet|npy)", re.DOTALL)
NOT_SOURCE_NAMES = (
    ".git", ".hg", ".svn", ".bzr", "__pycache__", "*.pyc", "*.pyo", ".mypy_cache", ".pytest_cache", ".ruff_cache",
    ".cache", ".tox", ".nox", ".eggs", ".ipynb_checkpoints", "node_modules", ".venv", "venv", ".DS_Store", ".idea",
    ".vscode", "*.swp",
)  # fmt: skip
"""Version control, caches, environments, and what editors leave."""
VENV_FILES = ("pyvenv.cfg", "conda-meta")
"""A folder that holds one of these is an environment, whatever it is called."""
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY( BLOCK)?-----|PuTTY-User-Key-File")
HEAD_BYTES = 4096
"""A private key says what it is at its beginning, whatever it is called."""


def is_secret(name: str) -> bool:
    """Whether a file or folder of this name may hold secrets."""
    low = name.lower()
    if fnmatch.fnmatchcase(low, KEYS_OR_DATA):
        return not (SOURCE.fullmatch(low) or DATA.fullmatch(low))
    if any(fnmatch.fnmatchcase(low, pattern) for pattern in SECRETS_OR_SOURCE):
        return SOURCE.fullmatch(low) is None
    return any(fnmatch.fnmatchcase(low, pattern) for pattern in SECRET_NAMES)


def is_no_source(name: str) -> bool:
    """Whether a file or folder of this name is version control, a cache or an environment."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in NOT_SOURCE_NAMES)


def is_private_key(beginning: bytes) -> bool:
    """Whether a file that begins so is a private key."""
    return PRIVATE_KEY.search(beginning[:HEAD_BYTES]) is not None
