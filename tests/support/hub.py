"""A hub on this machine: what of the Hugging Face Hub's HTTP interface it takes to push a model,
and to read a data set."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import yaml

TOKEN = "hf_of_the_tests"


class Repository:
    """A repository of models: its files, commit by commit."""

    def __init__(self, visibility: str) -> None:
        self.visibility = visibility
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []


class Hub:
    """The hub's state. Names that end with `refused` cannot be made."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.data_sets: dict[str, dict[str, bytes]] = {}
        """Files by path, by name."""
        self.objects: dict[str, bytes] = {}
        """Large files by SHA-256."""
        self.url = ""
        self.refuses_commits = False

    def commit(self, name: str, lines: list[dict[str, Any]]) -> str:
        """Applies a commit; returns its id."""
        repository = self.repositories[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.messages.append(value["summary"])
            elif line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del repository.files[value["path"]]
            else:
                raise ValueError(line["key"])
        return hashlib.sha1(str(len(repository.messages)).encode()).hexdigest()


@contextmanager
def local_hub() -> Iterator[Hub]:
    """A hub that is served while the block lasts."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        if found := re.fullmatch(r"/api/models/(.+?)/tree/main(\?.*)?", self.path):
            files = self.hub.repositories[found[1]].files
            self._tell([_entry(path, data) for path, data in files.items()])
        elif found := re.fullmatch(r"/api/datasets/(\w+/\w+)", self._page):
            self._tell_data_set(found[1])
        elif found := re.fullmatch(r"/api/datasets/(\w+/\w+)/tree/main/?(.*)", self._page):
            self._tell(_below(self.hub.data_sets[found[1]], found[2], self.path))
        elif found := re.fullmatch(r"/datasets/(\w+/\w+)/resolve/main/(.+)", self._page):
            self._send(self.hub.data_sets[found[1]][found[2]])
        else:
            self._tell({"error": f"no such page: {self.path}"}, 404)

    def do_PUT(self) -> None:
        data = self._body()
        oid = self.path.removeprefix("/objects/")
        if hashlib.sha256(data).hexdigest() != oid:
            self._tell({"error": "not the bytes that were announced"}, 400)
            return
        self.hub.objects[oid] = data
        self._tell({})

    def do_POST(self) -> None:
        data = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._tell({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self._create(json.loads(data))
        elif self.path == "/api/validate-yaml":
            yaml.safe_load(json.loads(data)["content"].split("---")[1])
            self._tell({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            self._tell({"files": [_mode(file) for file in json.loads(data)["files"]]})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            self._tell({"objects": [self._upload(one) for one in json.loads(data)["objects"]]})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            self._commit(found[1], data)
        else:
            self._tell({"error": f"no such page: {self.path}"}, 404)

    @property
    def _page(self) -> str:
        return self.path.partition("?")[0]

    def _tell_data_set(self, name: str) -> None:
        if name in self.hub.data_sets:
            self._tell({"id": name, "sha": "0" * 40, "siblings": []})
        else:
            self._tell({"error": "Repository not found"}, 404)

    def _send(self, data: bytes) -> None:
        """A file, or the bytes of it that are asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        part = data[int(asked[1]) : int(asked[2]) + 1] if asked else data
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(part)))
        if asked:
            self.send_header("Content-Range", f"bytes {asked[1]}-{asked[2]}/{len(data)}")
        self.end_headers()
        self.wfile.write(part)

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        url = f"{self.hub.url}/{name}"
        if name.endswith("refused"):
            self._tell({"error": "You don't have the rights to create a model here."}, 403)
        elif name in self.hub.repositories:
            self._tell({"error": "You already created this model repo", "url": url}, 409)
        else:
            self.hub.repositories[name] = Repository(wanted["visibility"])
            self._tell({"url": url, "name": name})

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.hub.objects:
            return wanted
        return {
            **wanted,
            "actions": {"upload": {"href": f"{self.hub.url}/objects/{wanted['oid']}"}},
        }

    def _commit(self, name: str, data: bytes) -> None:
        if self.hub.refuses_commits:
            self._tell({"error": "This account has no room left."}, 403)
            return
        oid = self.hub.commit(name, [json.loads(line) for line in data.splitlines()])
        url = f"{self.hub.url}/{name}/commit/{oid}"
        self._tell({"success": True, "commitOid": oid, "commitUrl": url})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _tell(self, answer: Any, status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _entry(path: str, data: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"type": "file", "path": path, "oid": oid, "size": len(data)}


def _below(files: dict[str, bytes], folder: str, asked: str) -> list[dict[str, Any]]:
    """What lies in a folder, or anywhere below it."""
    prefix = f"{folder}/" if folder else ""
    inside = {path: data for path, data in files.items() if path.startswith(prefix)}
    if "recursive=true" in asked:
        return [_entry(path, data) for path, data in inside.items()]
    rests = {path: path[len(prefix) :] for path in inside}
    folders = {rest.partition("/")[0] for rest in rests.values() if "/" in rest}
    return [
        *({"type": "directory", "path": prefix + name, "oid": "0" * 40} for name in folders),
        *(_entry(path, inside[path]) for path, rest in rests.items() if "/" not in rest),
    ]


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    is_large = file["path"].endswith(".safetensors")
    return {
        "path": file["path"],
        "uploadMode": "lfs" if is_large else "regular",
        "shouldIgnore": False,
        "oid": None,
    }
