"""A model hub on the loopback interface: the routes that huggingface_hub asks for, real files behind them, and faults."""

import json
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """`repos`: id → folder of its files. `asked`: every request, as ("GET", path, range)."""

    url: str = ""
    repos: dict[str, Path] = field(default_factory=dict)
    gated: dict[str, str] = field(default_factory=dict)  # id → the token that opens it
    drop_once: dict[str, int] = field(default_factory=dict)  # file → break the connection behind so many bytes
    stall: dict[str, int] = field(default_factory=dict)  # file → stop sending there, and keep the connection
    answers: int | None = None  # a status to answer everything with
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    def commit(self, repo: str) -> str:
        return sha1(repo.encode()).hexdigest()

    def files_asked(self) -> set[str]:
        return {path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):  # noqa: PLR0911 (one for each kind of answer)
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo, kind, revision, rest = "/".join(parts[:2]), *(*parts[2:4], "", "")[:2], "/".join(parts[4:])
        folder = self.hub.repos.get(repo)
        if self.hub.answers:
            return self.refuse(self.hub.answers, "")
        if folder is None:
            return self.refuse(404, "RepoNotFound")
        token = self.hub.gated.get(repo)
        if token and (kind == "resolve" or not path.startswith("/api")):
            sent = self.headers.get("Authorization")
            if sent != f"Bearer {token}":
                return self.refuse(403 if sent else 401, "GatedRepo")
        if revision not in ("main", "v1", self.hub.commit(repo)):
            return self.refuse(404, "RevisionNotFound")
        if kind == "revision":
            siblings = [{"rfilename": file.name} for file in folder.iterdir()]
            return self.send_json({"_id": "0", "id": repo, "sha": self.hub.commit(repo), "siblings": siblings})
        if kind == "tree":
            return self.send_json(
                [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": etag(f)} for f in folder.iterdir()]
            )
        if not (folder / rest).is_file():
            return self.refuse(404, "EntryNotFound")
        return self.send_file(repo, folder / rest)

    def refuse(self, status, code):
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, data):
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, repo, file):
        body = file.read_bytes()
        first, last = 0, len(body) - 1
        if wanted := self.headers.get("Range"):
            low, _, high = wanted.removeprefix("bytes=").partition("-")
            first, last = int(low), min(int(high or last), last)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
        self.send_header("X-Repo-Commit", self.hub.commit(repo))
        self.send_header("ETag", f'"{etag(file)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if self.command == "HEAD":
            return
        part = body[first : last + 1]
        if file.name in self.hub.drop_once:
            self.wfile.write(part[: self.hub.drop_once.pop(file.name)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
        elif file.name in self.hub.stall:
            self.wfile.write(part[: self.hub.stall[file.name]])
            self.wfile.flush()
            while file.name in self.hub.stall:
                time.sleep(0.05)
            self.close_connection = True
        else:
            self.wfile.write(part)


def etag(file):
    return sha1(file.read_bytes()).hexdigest()


@contextmanager
def running():
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("ThisHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.stall.clear()
        server.shutdown()
        server.server_close()
