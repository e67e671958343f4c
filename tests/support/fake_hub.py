"""A Hugging Face hub on loopback: one repository, whose files are those of a folder, and its moods.

Speaks the routes that `snapshot_download` uses: repository info, tree, resolve with ranges.
"""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = "someone/tiny"
TOKEN = "hf_averysecrettoken"


class FakeHub(ThreadingHTTPServer):
    """Change its attributes at any time; `seen` has (method, path, range, authorization) of each request."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.commit = "a" * 40
        self.branch = "main"
        self.status = 0  # answer everything with this one
        self.gated = False
        self.needs_token = False
        self.break_after: dict[str, list[int]] = {}  # file: bytes after which a connection breaks, once each
        self.hold: dict[str, int] = {}  # file: bytes after which an answer waits for `go_on`
        self.holding = threading.Event()
        self.go_on = threading.Event()
        self.seen: list[tuple[str, str, str | None, str | None]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def bodies(self, name: str) -> list[str | None]:
        """Ranges of the GETs of one file, in order; None for a whole one."""
        return [span for method, path, span, _ in self.seen if method == "GET" and path.endswith("/" + name)]


@contextlib.contextmanager
def fake_hub(folder: Path) -> Iterator[FakeHub]:
    hub = FakeHub(folder)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        hub.shutdown()
        hub.server_close()
        thread.join(30)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def answer(self) -> None:
        hub = self.server
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization")
        hub.seen.append((self.command, path, self.headers.get("Range"), authorization))
        if hub.status:
            self.send_json(hub.status, {"error": "so it is"})
            return
        if hub.gated:
            self.send_json(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
            return
        if hub.needs_token and authorization != f"Bearer {TOKEN}":
            message = (
                "Invalid credentials in Authorization header" if authorization else "Repository not found"
            )
            code = {} if authorization else {"X-Error-Code": "RepoNotFound"}
            self.send_json(401, {"error": message}, {**code, "X-Error-Message": message})
            return
        if found := re.fullmatch(r"/api/models/(.+?)/(revision|tree)/([^/]+)/?", path):
            self.describe(*found.groups())
            return
        if found := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            self.resolve(*found.groups())
            return
        self.send_json(404, {"error": "no such route"})

    def describe(self, repository: str, what: str, revision: str) -> None:
        hub = self.server
        if repository != REPOSITORY:
            self.send_json(404, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
            return
        if revision not in (hub.branch, hub.commit):
            self.send_json(404, {"error": "no"}, {"X-Error-Code": "RevisionNotFound"})
            return
        files = sorted(path for path in hub.folder.rglob("*") if path.is_file())
        names = [str(path.relative_to(hub.folder)) for path in files]
        if what == "revision":
            siblings = [{"rfilename": name} for name in names]
            self.send_json(200, {"id": repository, "sha": hub.commit, "siblings": siblings})
            return
        self.send_json(
            200,
            [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": etag(path)}
                for name, path in zip(names, files, strict=True)
            ],
        )

    def resolve(self, repository: str, revision: str, name: str) -> None:
        hub = self.server
        path = hub.folder / name
        if repository != REPOSITORY or revision not in (hub.branch, hub.commit) or not path.is_file():
            self.send_json(404, {"error": "no"}, {"X-Error-Code": "EntryNotFound"})
            return
        content = path.read_bytes()
        start = int(span[6:-1]) if (span := self.headers.get("Range") or "").startswith("bytes=") else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", f'"{etag(path)}"')
        self.send_header("X-Repo-Commit", hub.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "HEAD":
            return
        if breaks := hub.break_after.get(name):
            self.wfile.write(content[start : start + breaks.pop(0)])
            self.close_connection = True
            return
        if (held := hub.hold.get(name)) is not None:
            self.wfile.write(content[start : start + held])
            self.wfile.flush()
            hub.holding.set()
            hub.go_on.wait(60)
            start += held
        with contextlib.suppress(OSError):  # a client that was killed
            self.wfile.write(content[start:])

    def send_json(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
