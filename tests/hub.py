"""A small Hugging Face hub for the tests: it serves a folder, and takes uploads into it.

Below the folder lie `{models,datasets}/<owner>/<name>/<revision>/<files>`; a slash in a revision is written %2F. A
client finds it by HF_ENDPOINT, which must be set before huggingface_hub is imported. As on the real one, a short name
such as `gpt2` leads to the full one. Nothing goes by LFS or Xet.
"""

import base64
import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

SHORT_NAMES = {"gpt2": "openai-community/gpt2"}


def folder_of(root: Path, kind: str, name: str, revision: str = "main") -> Path:
    """Where the files of a revision lie. kind: models or datasets."""
    return root / kind / name / quote(revision, safe="")


def commit_of(folder: Path) -> str:
    """The commit that a revision stands for."""
    return hashlib.sha1("/".join(folder.parts[-4:]).encode()).hexdigest()


class Refused(Exception):
    """An answer that is an error: status and code."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Hub"

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        headers.setdefault("Content_Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer(self) -> None:
        self.server.asked_with.append(self.headers.get("Authorization", ""))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        address = urlsplit(self.path)
        parts = [unquote(part) for part in address.path.strip("/").split("/")]
        try:
            if parts == [""]:
                self.send(200)
            elif parts[0] != "api":
                kind = "datasets" if parts[0] == "datasets" else "models"
                self.file(kind, parts[1:] if kind == "datasets" else parts)
            elif parts[1] in ("models", "datasets"):
                result = self.repository(parts[1], parts[2:], parse_qs(address.query), body)
                self.send(200, json.dumps(result).encode(), Content_Type="application/json")
            elif parts[1:] == ["repos", "create"]:
                self.create(json.loads(body))
            elif parts[1:] == ["validate-yaml"]:
                has_metadata = json.loads(body)["content"].startswith("---\n")
                warnings = [] if has_metadata else [{"message": "empty or missing yaml metadata in repo card"}]
                result = json.dumps({"errors": [], "warnings": warnings})
                self.send(200, result.encode(), Content_Type="application/json")
            else:
                raise Refused(404, "NotFound")
        except Refused as refused:
            status, code = refused.args
            self.send(status, X_Error_Code=code, X_Error_Message=code)

    do_GET = do_HEAD = do_POST = answer

    def revision(self, kind: str, name: str, revision: str) -> Path:
        """The folder of a revision or commit."""
        folder = folder_of(self.server.root, kind, name, revision)
        if not folder.parent.is_dir():
            raise Refused(401, "RepoNotFound")
        commits = {commit_of(other): other for other in folder.parent.iterdir()}
        if not folder.is_dir() and revision not in commits:
            raise Refused(404, "RevisionNotFound")
        return commits.get(revision, folder)

    def file(self, kind: str, parts: list[str]) -> None:
        """[datasets/]<name>/resolve/<revision>/<path>"""
        if parts[0] in SHORT_NAMES and parts[1] == "resolve":
            path = self.path.replace(parts[0], SHORT_NAMES[parts[0]], 1)
            return self.send(307, Location=path)
        owner, name, _, revision, *path = parts
        folder = self.revision(kind, f"{owner}/{name}", revision)
        file, commit = folder.joinpath(*path), {"X_Repo_Commit": commit_of(folder)}
        if not file.is_file():
            return self.send(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", **commit)
        content = file.read_bytes()
        commit |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept_Ranges": "bytes"}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(len(content), int(last) + 1) if last else len(content)
            commit["Content_Range"] = f"bytes {first}-{end - 1}/{len(content)}"
            return self.send(206, content[int(first) : end], **commit)
        return self.send(200, content, **commit)

    def repository(self, kind: str, parts: list[str], query: dict[str, list[str]], body: bytes) -> Any:
        """/api/{models,datasets}/<name>[/<what>[/<revision>[/<path>]]]"""
        parts = SHORT_NAMES.get(parts[0], parts[0]).split("/") + parts[1:]
        name, (what, revision, *path) = "/".join(parts[:2]), [*parts[2:], *("revision", "main")[len(parts) - 2 :]]
        folder = self.revision(kind, name, revision)
        if what == "tree":
            below = folder.joinpath(*path)
            if not below.is_dir():
                raise Refused(404, "EntryNotFound")
            entries = below.rglob("*") if "rue" in query.get("recursive", [""])[0] else below.iterdir()
            return [self.entry(folder, entry) for entry in sorted(entries)]
        if what == "preupload":
            return {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                    for file in json.loads(body)["files"]
                ]
            }
        if what == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    target = folder / line["value"]["path"]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(base64.b64decode(line["value"]["content"]))
            commit = commit_of(folder)
            return {"success": True, "commitOid": commit, "commitUrl": f"/{name}/commit/{commit}"}
        files = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file()]
        return {"id": name, "sha": commit_of(folder), "siblings": [{"rfilename": file} for file in files]}

    @staticmethod
    def entry(folder: Path, path: Path) -> dict[str, Any]:
        kind = "directory" if path.is_dir() else "file"
        size = 0 if path.is_dir() else path.stat().st_size
        oid = hashlib.sha1(b"" if path.is_dir() else path.read_bytes()).hexdigest()
        return {"type": kind, "path": path.relative_to(folder).as_posix(), "size": size, "oid": oid}

    def create(self, asked: dict[str, Any]) -> None:
        """A new repository of the user that the token belongs to, or of an organisation."""
        if not self.headers.get("Authorization", "").startswith("Bearer"):
            raise Refused(401, "Unauthorized")
        name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
        folder = folder_of(self.server.root, "models", name)
        status = 409 if folder.is_dir() else 200
        folder.mkdir(parents=True, exist_ok=True)
        body = json.dumps({"url": f"{self.server.address}/{name}"}).encode()
        self.send(status, body, Content_Type="application/json")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Hub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.asked_with: list[str] = []  # what came with the requests to show who asks

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serve(root: Path) -> Iterator[Hub]:
    """A hub with what lies in a folder, for the time of the block."""
    with Hub(root) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()
