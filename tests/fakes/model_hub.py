"""A stand-in for the Hugging Face hub: the calls that huggingface_hub makes to publish and to load models.

The contract is taken from the library's source (2.4: hf_api.py, _commit_api.py, lfs.py, file_download.py): whoami-v2,
repos/create, models, validate-yaml, preupload, the LFS batch with basic and multipart transfers and their verification,
commit as JSON lines, resolve. Xet is not spoken: clients have HF_HUB_DISABLE_XET=1. SHA-256 of every object is checked.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin")


def git_hash(data: bytes) -> str:
    """The name of a blob in git."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repository:
    """The files of one model, at its only revision."""

    private: bool = False
    gated: str | bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[list[str]] = field(default_factory=list)
    """Names of the files in each commit."""

    @property
    def commit(self) -> str:
        """The hash of the newest commit."""
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()

    def license(self) -> str | None:
        """As the head of its card says."""
        found = re.search(rb'^license: "?([\w.-]+)"?$', self.files.get("README.md", b""), re.MULTILINE)
        return found[1].decode() if found else None


@dataclass
class Fault:
    """The next answers to requests whose method and path match, in place of the right ones."""

    match: str
    status: int = 0
    """0: the connection is cut, as a body is read."""
    times: int = 1
    skip: int = 0
    """So many are answered rightly first."""
    headers: dict[str, str] = field(default_factory=dict)
    body: str = '{"error": "told to fail"}'


class Hub:
    """The hub on a port of loopback, with one account: `tea`, a member of `kettles`. Use as a context."""

    def __init__(self, *, token: str = "hf_" + "t" * 34, role: str = "write", part_bytes: int = 0) -> None:
        self.token, self.role, self.part_bytes = token, role, part_bytes
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        """LFS objects by SHA-256."""
        self.received: list[str] = []
        """SHA-256 of each object that came, again if it came again."""
        self.requests: list[str] = []
        self.faults: deque[Fault] = deque()
        self.held = threading.Event()
        self.makes_private = False
        """As an organization may have it: a new repository of which nothing is said is private."""
        self.hold = ""
        """A request whose method and path match waits here until the test ends; `held` is set then."""
        self._parts: dict[str, dict[int, bytes]] = {}
        self._release = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Bound", (_Answers,), {"hub": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """HF_ENDPOINT of its clients."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def variables(self, home: Path) -> dict[str, str]:
        """The environment of a client, with caches of its own."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": self.token,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def fault_of(self, asked: str) -> Fault | None:
        """The fault that a request runs into."""
        for fault in self.faults:
            if re.search(fault.match, asked):
                if fault.skip:
                    fault.skip -= 1
                    return None
                fault.times -= 1
                if fault.times <= 0:
                    self.faults.remove(fault)
                return fault
        return None

    def wait_if_held(self, asked: str) -> None:
        """Keep a request without answer, where the test asked for it."""
        if self.hold and re.search(self.hold, asked):
            self.held.set()
            self._release.wait()

    def take_object(self, oid: str, data: bytes) -> bool:
        """Keep an LFS object; whether it is what its name says."""
        if hashlib.sha256(data).hexdigest() != oid:
            return False
        self.objects[oid] = data
        self.received.append(oid)
        return True

    def take_part(self, oid: str, number: int, data: bytes) -> None:
        """Keep a part of an object."""
        self._parts.setdefault(oid, {})[number] = data

    def join_parts(self, oid: str) -> bool:
        """Put an object together; whether it is what its name says."""
        parts = self._parts.pop(oid, {})
        return self.take_object(oid, b"".join(parts[number] for number in sorted(parts)))


class _Answers(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_words: object) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def _serve(self) -> None:
        asked = f"{self.command} {unquote(urlsplit(self.path).path)}"
        self.hub.requests.append(asked)
        fault = self.hub.fault_of(asked)
        if fault is not None and fault.status == 0:
            self.rfile.read(min(64, int(self.headers.get("Content-Length") or 0)))
            self.close_connection = True
            self.connection.close()
            return
        with suppress(ConnectionError):
            body = self._body()
            self.hub.wait_if_held(asked)
            if fault is not None:
                self._answer(fault.status, fault.body.encode(), headers=fault.headers)
            else:
                self._route(asked, body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _route(self, asked: str, body: bytes) -> None:
        for pattern, name in _ROUTES.items():
            if found := re.fullmatch(pattern, asked):
                needs = not name.startswith(("object", "part", "joined", "resolve", "model"))
                if needs and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
                    self._json({"error": "Invalid username or password."}, status=401)
                    return
                getattr(self, f"_{name}")(*found.groups(), body)
                return
        self._json({"error": f"no such call: {asked}"}, status=404)

    def _answer(self, status: int, body: bytes, *, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._answer(
            status, json.dumps(value).encode(), headers={"Content-Type": "application/json", **(headers or {})}
        )

    def _unknown(self, code: str) -> None:
        self._json({"error": code}, status=404, headers={"X-Error-Code": code})

    def _repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        mine = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        return None if found is not None and found.private and not mine else found

    def _whoami(self, _body: bytes) -> None:
        access = {"accessToken": {"displayName": "test", "role": self.hub.role}}
        self._json({"type": "user", "name": "tea", "orgs": [{"name": "kettles"}], "auth": access})

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'tea'}/{asked['name']}"
        if asked.get("organization") not in {None, "tea", "kettles"}:
            self._json({"error": "You don't have the rights to create a model under this namespace"}, status=403)
            return
        if name in self.hub.repositories:
            self._json({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, status=409)
            return
        said = asked.get("visibility") or {True: "private", False: "public"}.get(asked.get("private"))
        private = said == "private" or (said is None and self.hub.makes_private)
        self.hub.repositories[name] = Repository(private=private, files={".gitattributes": b"*.bin filter=lfs\n"})
        self._json({"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def _model(self, name: str, _body: bytes) -> None:
        found = self._repository(name)
        if found is None:
            self._unknown("RepoNotFound")
            return
        card = {"license": found.license()} if found.license() else {}
        files = [{"rfilename": each} for each in sorted(found.files)]
        told = {"id": name, "modelId": name, "sha": found.commit, "private": found.private, "gated": found.gated}
        self._json({**told, "cardData": card, "siblings": files, "tags": [], "downloads": 0, "likes": 0})

    def _yaml(self, body: bytes) -> None:
        text = json.loads(body)["content"]
        head = text.removeprefix("---\n").partition("\n---\n")[0]
        bad = [line for line in head.splitlines() if not re.match(r"\w+: \S", line)]
        errors = [{"message": f"not YAML: {line}"} for line in bad]
        self._json({"errors": errors, "warnings": []}, status=400 if errors else 200)

    def _preupload(self, name: str, body: bytes) -> None:
        found = self.hub.repositories.get(name)
        if found is None:
            self._unknown("RepoNotFound")
            return
        files = []
        for each in json.loads(body)["files"]:
            large = each["path"].endswith(LARGE)
            there = found.files.get(each["path"])
            named = None if there is None else hashlib.sha256(there).hexdigest() if large else git_hash(there)
            mode = "lfs" if large else "regular"
            files.append({"path": each["path"], "uploadMode": mode, "shouldIgnore": False, "oid": named})
        self._json({"files": files})

    def _batch(self, name: str, body: bytes) -> None:
        if name not in self.hub.repositories:
            self._unknown("RepoNotFound")
            return
        objects = []
        for each in json.loads(body)["objects"]:
            told: dict[str, Any] = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.hub.objects:
                verify = {"href": f"{self.hub.url}/{name}.git/info/lfs/verify"}
                told["actions"] = {"upload": self._upload_of(each["oid"], each["size"]), "verify": verify}
            objects.append(told)
        self._json({"transfer": "multipart" if self.hub.part_bytes else "basic", "objects": objects})

    def _upload_of(self, oid: str, size: int) -> dict[str, Any]:
        part = self.hub.part_bytes
        if not part or size <= part:
            return {"href": f"{self.hub.url}/objects/{oid}?X-Amz-Signature=canary-signature"}
        count = -(-size // part)
        urls = {str(number): f"{self.hub.url}/parts/{oid}/{number}" for number in range(1, count + 1)}
        return {"href": f"{self.hub.url}/joined/{oid}", "header": {"chunk_size": str(part), **urls}}

    def _object(self, oid: str, body: bytes) -> None:
        self._answer(200 if self.hub.take_object(oid, body) else 400, b"")

    def _part(self, oid: str, number: str, body: bytes) -> None:
        self.hub.take_part(oid, int(number), body)
        self._answer(200, b"", headers={"ETag": hashlib.md5(body).hexdigest()})

    def _joined(self, oid: str, body: bytes) -> None:
        assert all(part["etag"] for part in json.loads(body)["parts"])
        self._answer(200 if self.hub.join_parts(oid) else 400, b"{}")

    def _verify(self, _name: str, body: bytes) -> None:
        asked = json.loads(body)
        right = len(self.hub.objects.get(asked["oid"], b"")) == asked["size"]
        self._json({} if right else {"error": "not there"}, status=200 if right else 404)

    def _commit(self, name: str, body: bytes) -> None:
        found = self.hub.repositories[name]
        lines = [json.loads(line) for line in body.splitlines()]
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        found.files |= files
        found.commits.append(sorted(files))
        url = f"{self.hub.url}/{name}/commit/{found.commit}"
        self._json({"success": True, "commitOid": found.commit, "commitUrl": url})

    def _resolve(self, name: str, path: str, _body: bytes) -> None:
        found = self._repository(name)
        if found is None:
            self._unknown("RepoNotFound")
            return
        if path not in found.files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": found.commit}
            self._json({"error": "Entry not found"}, status=404, headers=headers)
            return
        data = found.files[path]
        etag = hashlib.sha256(data).hexdigest() if path.endswith(LARGE) else git_hash(data)
        self._answer(200, data, headers={"ETag": f'"{etag}"', "X-Repo-Commit": found.commit})


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES = {
    r"GET /api/whoami-v2": "whoami",
    r"POST /api/repos/create": "create",
    r"POST /api/validate-yaml": "yaml",
    rf"GET /api/models/{_NAME}": "model",
    rf"GET /api/models/{_NAME}/revision/\w+": "model",
    rf"POST /api/models/{_NAME}/preupload/main": "preupload",
    rf"POST /{_NAME}\.git/info/lfs/objects/batch": "batch",
    rf"POST /{_NAME}\.git/info/lfs/verify": "verify",
    rf"POST /api/models/{_NAME}/commit/main": "commit",
    r"PUT /objects/(\w+)": "object",
    r"PUT /parts/(\w+)/(\d+)": "part",
    r"POST /joined/(\w+)": "joined",
    rf"(?:GET|HEAD) /{_NAME}/resolve/\w+/(.+)": "resolve",
}
