"""A Hub on this machine, for the real client: it keeps repositories, and every request it got.

It has the endpoints that creating, uploading, listing and downloading use, and the answers of the
real one to missing, private and foreign repositories. It proves our side of the talk, not its.
Names of data sets begin with `datasets/`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345"  # of user `me`; any other is refused
Files = dict[str, bytes]


@dataclass
class Repository:
    """Branches point at commits; a commit is a whole tree of files."""

    private: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: Files) -> str:
        """Add a commit and move the branch to it; returns its id."""
        text = f"{len(self.commits)}{sorted(files)}"
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def files(self, revision: str = "main") -> Files:
        """The files at a branch or commit."""
        return self.commits[self.branches.get(revision, revision)]


@dataclass(frozen=True)
class Request:
    """What the client sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Hub(ThreadingHTTPServer):
    """Serves `repositories`; `requests` is the log."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: Files = {}  # uploaded, by sha256
        self.requests: list[Request] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, files: Files, private: bool = False) -> Repository:
        """A repository with one commit on main."""
        repository = self.repositories[name] = Repository(private)
        repository.commit("main", files)
        return repository


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub that runs while the block does."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = ""):
        self.status, self.code, self.message = status, code, message


_NAME = r"/(?P<id>(?:datasets/)?[^/]+/[^/]+)"
_API = rf"/api(?:/models)?{_NAME}"
_ROUTES = [
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", rf"{_API}/branch/(?P<revision>[^/]+)", "branch"),
    ("POST", rf"{_API}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"{_NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/objects/(?P<oid>\w+)", "put"),
    ("POST", rf"{_API}/commit/(?P<revision>[^/]+)", "commit"),
    ("GET", rf"{_API}(/revision/(?P<revision>[^/]+))?", "info"),
    ("GET", rf"{_API}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", "tree"),
    ("POST", rf"{_API}/paths-info/(?P<revision>[^/]+)", "paths"),
    ("HEAD|GET", rf"{_NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", "resolve"),
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        assert isinstance(self.server, Hub)
        return self.server

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing goes to stderr: what the client printed is looked at there."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        request = Request(self.command, self.path, dict(self.headers.items()), body)
        try:
            with self.hub.lock:
                self.hub.requests.append(request)
                for methods, pattern, name in _ROUTES:
                    match = re.fullmatch(pattern, path)
                    if match and self.command in methods.split("|"):
                        self._answer(*getattr(self, name)(body, **match.groupdict()))
                        return
            raise _Refused(404, "", "no such route")
        except _Refused as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            answer = json.dumps({"error": refusal.message}).encode()
            self._answer(answer, refusal.status, {k: v for k, v in headers.items() if v})

    do_HEAD = do_POST = do_PUT = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(
        self, body: bytes | dict | list, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _known(self) -> bool:
        """Whether the client is `me`; a wrong token is refused at once."""
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {TOKEN}"):
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        return given is not None

    def _may_write(self, name: str) -> None:
        if not self._known():
            raise _Refused(401, "", "Access to this resource requires authentication")
        if not name.startswith("me/"):
            raise _Refused(403, "", "You don't have the rights to do this")

    def _repository(self, name: str) -> Repository:
        known, repository = self._known(), self.hub.repositories.get(name)
        if repository is None or (repository.private and not known):
            raise _Refused(404 if known else 401, "RepoNotFound", "Repository not found")
        return repository

    def _at(self, name: str, revision: str | None) -> tuple[Repository, str]:
        repository, revision = self._repository(name), revision or "main"
        oid = repository.branches.get(revision, revision)
        if oid not in repository.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, oid

    def create(self, body: bytes) -> tuple:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        self._may_write(name)
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repositories:
            return {"url": url, "error": "You already created this model repo"}, 409
        self.hub.add(name, {".gitattributes": b""}, asked.get("visibility") == "private")
        return {"url": url}, 200

    def validate(self, body: bytes) -> tuple:
        """The card's front matter is YAML, and what the Hub reads of it has the right types."""
        text = json.loads(body)["content"]
        match = re.match(r"---\n(.*?\n)---\n", text, re.DOTALL)
        data = yaml.safe_load(match.group(1)) if match else {}
        kinds: dict[str, type | tuple[type, ...]] = {
            "library_name": str, "tags": list, "base_model": (str, list), "license": str,
        }  # fmt: skip
        wrong = [key for key, kind in kinds.items() if not isinstance(data.get(key, kind), kind)]
        wrong = [key for key in wrong if key in data]
        errors = [{"message": f'"{key}" has the wrong type'} for key in wrong]
        return {"errors": errors, "warnings": []}, 400 if errors else 200

    def branch(self, body: bytes, id: str, revision: str) -> tuple:
        self._may_write(id)
        repository = self._repository(id)
        if revision in repository.branches:
            raise _Refused(409, "", "Reference already exists")
        repository.branches[revision] = repository.branches["main"]
        return {}, 201

    def preupload(self, body: bytes, id: str, revision: str) -> tuple:
        self._may_write(id)
        repository, oid = self._at(id, revision)
        answers = []
        for file in json.loads(body)["files"]:
            lfs = file["path"].endswith(".safetensors")
            there = repository.commits[oid].get(file["path"])
            answers.append({
                "path": file["path"],
                "uploadMode": "lfs" if lfs else "regular",
                "shouldIgnore": False,
                "oid": None if there is None else _oids(there)[1 if lfs else 0],
            })  # fmt: skip
        return {"files": answers}, 200

    def batch(self, body: bytes, id: str) -> tuple:
        self._may_write(id)
        objects = []
        for wanted in json.loads(body)["objects"]:
            if wanted["oid"] not in self.hub.objects:
                href = f"{self.hub.url}/objects/{wanted['oid']}"
                wanted["actions"] = {"upload": {"href": href}}
            objects.append(wanted)
        return {"transfer": "basic", "objects": objects}, 200

    def put(self, body: bytes, oid: str) -> tuple:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, "", "not what was announced")
        self.hub.objects[oid] = body
        return b"", 200

    def commit(self, body: bytes, id: str, revision: str) -> tuple:
        self._may_write(id)
        repository, oid = self._at(id, revision)
        files = dict(repository.commits[oid])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        new = repository.commit(revision, files)
        return {"commitUrl": f"{self.hub.url}/{id}/commit/{new}", "commitOid": new}, 200

    def info(self, body: bytes, id: str, revision: str | None) -> tuple:
        repository, oid = self._at(id, revision)
        siblings = [{"rfilename": name} for name in repository.commits[oid]]
        return {"id": id, "sha": oid, "private": repository.private, "siblings": siblings}, 200

    def tree(self, body: bytes, id: str, revision: str, folder: str | None) -> tuple:
        repository, oid = self._at(id, revision)
        entries = _entries(repository.commits[oid])
        within = f"{folder}/" if folder else ""
        below = [entry for entry in entries if entry["path"].startswith(within)]
        if "recursive=True" not in self.path and "recursive=true" not in self.path:
            below = [e for e in below if "/" not in e["path"].removeprefix(within)]
        return below, 200

    def paths(self, body: bytes, id: str, revision: str) -> tuple:
        """What is at some paths; those that do not exist are left out."""
        repository, oid = self._at(id, revision)
        form = parse_qs(body.decode())
        asked = form.get("paths") or json.loads(body)["paths"]
        return [e for e in _entries(repository.commits[oid]) if e["path"] in asked], 200

    def resolve(self, body: bytes, id: str, revision: str, file: str) -> tuple:
        repository, oid = self._at(id, revision)
        if file not in repository.commits[oid]:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        data = repository.commits[oid][file]
        etag = _oids(data)[1 if file.endswith(".safetensors") else 0]
        headers = {"X-Repo-Commit": oid, "ETag": f'"{etag}"'}
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is None:
            return data, 200, headers
        first, last = int(part[1]), min(int(part[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return data[first : last + 1], 206, headers


def _entries(files: Files) -> list[dict[str, Any]]:
    """Files and folders as the Hub lists them."""
    folders = {path[:at] for path in files for at, sign in enumerate(path) if sign == "/"}
    entries: list[dict[str, Any]] = [
        {"type": "directory", "path": path, "oid": _oids(path.encode())[0]} for path in folders
    ]
    for name, data in files.items():
        git, sha = _oids(data)
        entry = {"type": "file", "path": name, "size": len(data), "oid": git}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"oid": sha, "size": len(data), "pointerSize": 100}
        entries.append(entry)
    return entries


def _oids(data: bytes) -> tuple[str, str]:
    """A file's id in git, and its sha256."""
    git = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    return git, hashlib.sha256(data).hexdigest()
