"""`python -m gangline.worker publish FOLDER --to owner/name [--look]`: an exported folder onto the hub.

huggingface_hub does the talking: HF_ENDPOINT says where the hub is; HF_TOKEN, or the file that `hf auth login` wrote,
who asks. Large files are sent one by one, then one commit makes all files visible together: until then the repository
shows nothing of them. What an interrupted call has sent stays with the hub, and is not sent again.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gangline.errors import GanglineError, HostUnreachable, RunFailed, UsageError
from gangline.runs.files import json_object
from gangline.runs.hub_names import is_hub_name
from gangline.runs.layout import EXPORT_NOTE, MODEL_CARD
from gangline.worker.json_lines import write_line

T = TypeVar("T")
OWN_FILES = frozenset({".gitattributes"})
"""Files that the hub puts into a new repository."""
TRIES, LONGEST_WAIT_S = 4, 60.0
"""Of calls that the library itself does not repeat."""
BUSY = frozenset({429, 500, 502, 503, 504})


def publish_main(argv: list[str]) -> int:
    """Read the command line, look or send, and report in JSON lines on stdout."""
    parser = argparse.ArgumentParser(prog="gangline.worker publish")
    parser.add_argument("folder", type=Path, nargs="?", help="the exported folder")
    parser.add_argument("--to", required=True, help="owner/name of the repository")
    parser.add_argument("--look", action="store_true", help="ask who we are and what is there, and change nothing")
    parser.add_argument("--base", default="", help="with --look: the base model on the hub")
    parser.add_argument("--license", default="", help="the base model's, for the card")
    parser.add_argument("--private", action="store_true", help="make the repository private where it is new")
    options = parser.parse_args(argv)
    with _in_words(options.to) as api:
        if options.look:
            write_line("result", **look(api, options.to, base=options.base))
            return 0

        def say(text: str) -> None:
            write_line("progress", text=text)

        write_line("result", **send(api, options.folder, options, say=say))
    return 0


def look(api: Any, name: str, *, base: str = "") -> dict[str, Any]:
    """Who asks, and what the repository holds. Raises UsageError where that account cannot write there.

    base: a model of the hub, whose license and terms are looked up.
    """
    who = _patiently(api.whoami)
    _refuse_reader(who, name)
    found: dict[str, Any] = {
        "user": who["name"],
        "endpoint": api.endpoint,
        "exists": False,
        "files": [],
        "run": None,
        "merged": False,
    }
    info = _info(api, name)
    if info is not None:
        files = sorted(each.rfilename for each in info.siblings or () if each.rfilename not in OWN_FILES)
        found |= {"exists": True, "private": bool(info.private), "files": files}
        if EXPORT_NOTE in files:
            note = _note_of(api, name)
            found |= {"run": note.get("run"), "merged": bool(note.get("merged"))}
    model = _info(api, base) if base else None
    card = model.card_data if model is not None else None
    license_name = card.get("license") if card is not None else None
    found["license"] = license_name if isinstance(license_name, str) else ""
    found["gated"] = bool(model.gated) if model is not None else False
    return found


def send(api: Any, folder: Path, options: argparse.Namespace, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Make the repository if it is new, send what it lacks, and commit all files at once."""
    from huggingface_hub import CommitOperationAdd

    name = options.to
    # None, not False: an organization may have new repositories private unless it is told otherwise
    _patiently(lambda: api.create_repo(name, private=options.private or None, exist_ok=True))
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    adds = []
    for path in paths:
        inside = path.relative_to(folder).as_posix()
        changed = _changed(path, inside, license_name=options.license)
        adds.append(CommitOperationAdd(inside, str(path) if changed is None else changed))
    for number, add in enumerate(adds, 1):
        say(f"sending {number} of {len(adds)}: {add.path_in_repo}")
        api.preupload_lfs_files(name, additions=[add], free_memory=False)
    say("committing")
    # a commit whose answer was lost has happened: the next try finds nothing that changed, and sends none
    commit = _patiently(lambda: api.create_commit(name, adds, commit_message=f"Add {_title(folder)}"))
    return {
        "repository": name,
        "url": f"{api.endpoint}/{name}",
        "commit": commit.oid,
        "files": [add.path_in_repo for add in adds],
        "num_bytes": sum(add.upload_info.size for add in adds),
    }


def _title(folder: Path) -> str:
    note = json_object((folder / EXPORT_NOTE).read_text(encoding="utf-8")) or {}
    return f"step {note['step']} of {note['run']}" if "step" in note else str(note.get("run", "a model"))


def _changed(path: Path, inside: str, *, license_name: str) -> bytes | None:
    """What is sent in place of a file: nobody else's disk has our folders, and the card names the base's license."""
    if inside == EXPORT_NOTE:
        note = json_object(path.read_text(encoding="utf-8")) or {}
        base = str(note.get("base_model", ""))
        return None if is_hub_name(base) else (json.dumps({**note, "base_model": Path(base).name}) + "\n").encode()
    if inside == MODEL_CARD and license_name:
        text = path.read_text(encoding="utf-8")
        return with_license(text, license_name).encode()
    return None


def with_license(card: str, license_name: str) -> str:
    """A card with this license in its YAML head, unless it names one."""
    head, mark, rest = card.removeprefix("---\n").partition("\n---\n")
    if not card.startswith("---\n") or not mark or re.search(r"^license:", head, re.MULTILINE):
        return card
    return f"---\n{head}\nlicense: {json.dumps(license_name)}{mark}{rest}"


def _info(api: Any, name: str) -> Any:
    """What the hub says of a model; None where it shows none of this name."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return _patiently(lambda: api.model_info(name))
    except RepositoryNotFoundError:  # of gated ones it shows the description
        return None


def _note_of(api: Any, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = _patiently(lambda: api.hf_hub_download(name, EXPORT_NOTE, local_dir=folder))
        return json_object(Path(path).read_text(encoding="utf-8")) or {}


def _refuse_reader(who: dict[str, Any], name: str) -> None:
    """Raise UsageError for a token that may only read, and for the name of somebody else."""
    role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise UsageError(
            f"the token of {who['name']} may only read",
            seen="expected one that may write",
            fix="make a token that may write in the settings of the hub, and set HF_TOKEN to it",
        )
    owners = [who["name"], *(each["name"] for each in who.get("orgs") or ())]
    owner = name.partition("/")[0]
    if owner.lower() not in {each.lower() for each in owners}:
        raise UsageError(
            f"--push {name}: {owner} is not yours",
            seen=f"the token is of {who['name']}; expected one of {', '.join(owners)}",
            fix=f"--push {who['name']}/{name.partition('/')[2]}, or the token of a member of {owner}",
        )


# Failures of the hub, in words.


def _patiently(call: Callable[[], T]) -> T:
    """The call, again where the hub is busy: it says for how long in Retry-After, else 1, 2 and 4 seconds."""
    from huggingface_hub.errors import HfHubHTTPError

    for tried in range(TRIES - 1):
        try:
            return call()
        except HfHubHTTPError as error:
            if _status(error) not in BUSY:
                raise
            time.sleep(wait_s(error.response.headers.get("Retry-After"), tried))
    return call()


def wait_s(said: str | None, tried: int) -> float:
    """How long to wait after a busy answer: what the hub said, at most a minute."""
    asked = float(said) if said is not None and re.fullmatch(r"\d+(\.\d+)?", said) else 2.0**tried
    return min(asked, LONGEST_WAIT_S)


def _status(error: Any) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


@contextmanager
def _in_words(name: str) -> Iterator[Any]:
    """The hub's calls; whatever they raise becomes an error in three parts, without the token."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    hub_logging.set_verbosity_error()
    token = get_token()
    if not token:
        raise UsageError(
            f"--push {name}: there is no token for the hub",
            seen="neither HF_TOKEN nor the file of `hf auth login`",
            fix="hf auth login, or set HF_TOKEN to a token that may write",
        )
    try:
        yield HfApi(token=token, library_name="gangline")
    except GanglineError:
        raise
    except Exception as error:  # of httpx, requests and the library's own kinds, which change between its versions
        raise _told(error, name, token) from error


def _told(error: BaseException, name: str, token: str) -> GanglineError:
    while _status(error) is None and error.__cause__ is not None:
        error = error.__cause__
    said = re.sub(r"\?[^\s'\"<>]+", "?...", str(error).replace(token, "<token>"))
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [type(error).__name__]
    seen = " ".join(dict.fromkeys((lines[0], lines[-1])))[:300]
    again = "run the same command again: what the hub already has is not sent twice"
    status = _status(error)
    if status is None and isinstance(error, ValueError):
        return RunFailed(
            f"--push {name}: the hub answers otherwise than huggingface_hub expects",
            seen=seen,
            fix="check HF_ENDPOINT, and whether a proxy or a login page is in between",
        )
    if status == 401:
        return UsageError(
            f"--push {name}: the hub does not take the token",
            seen=f"401: {seen}",
            fix="set HF_TOKEN to a valid token, or hf auth login; HF_TOKEN goes before the file",
        )
    if status == 403:
        return UsageError(
            f"--push {name}: the hub refuses it",
            seen=f"403: {seen}",
            fix="use a token that may write there; it may also be a full or locked account",
        )
    if status in (413, 507):
        return RunFailed(
            f"--push {name}: the hub has no room for it", seen=f"{status}: {seen}", fix=f"make room there, then {again}"
        )
    if status is None or status in BUSY:
        what = "could not be reached" if status is None else "is busy or broken"
        code = "" if status is None else f"{status}: "
        return HostUnreachable(f"--push {name}: the hub {what}", seen=f"{code}{seen}", fix=again)
    return RunFailed(
        f"--push {name}: the hub refused a call", seen=f"{status}: {seen}", fix=f"see what it says; then {again}"
    )
