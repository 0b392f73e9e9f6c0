"""An imitation of the Hugging Face hub with one dataset, for tests that have no network."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

DATASET = "someone/stories"


class Hub:
    """The files of `someone/stories`; `commit` names their state."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.url = ""
        self.older: dict[str, dict[str, bytes]] = {}

    @property
    def commit(self) -> str:
        """Id of the present state, which stays readable under it."""
        digest = hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()
        self.older[digest] = dict(self.files)
        return digest

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return commit and files of a revision."""
        if revision == "main":
            return self.commit, self.files
        return (revision, self.older[revision]) if revision in self.older else None


@contextlib.contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve an empty dataset for the context."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub()  # type: ignore[attr-defined]
    server.hub.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, name="hub", daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        api, files = f"/api/datasets/{DATASET}", f"/datasets/{DATASET}/resolve/"
        if path.startswith(files):
            revision, _, name = path.removeprefix(files).partition("/")
            self._file(hub.at(revision), name)
        elif path == api or path.startswith(f"{api}/revision/"):
            self._json(
                self._info(hub.at(path.removeprefix(api).removeprefix("/revision/") or "main"))
            )
        elif path.startswith(f"{api}/tree/"):
            revision, _, folder = path.removeprefix(f"{api}/tree/").partition("/")
            self._json(self._tree(hub.at(revision), folder))
        elif path.startswith(f"{api}/paths-info/"):
            wanted = json.loads(body or b"{}").get("paths", [])
            self._json(self._paths(hub.at(path.rpartition("/")[2]), wanted))
        else:
            self._json(None)

    do_GET = do_HEAD = do_POST = _handle

    def _info(self, found: tuple[str, dict[str, bytes]] | None) -> object:
        if found is None:
            return None
        commit, files = found
        return {
            "id": DATASET,
            "sha": commit,
            "private": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "lastModified": "2026-01-01T00:00:00.000Z",
            "siblings": [{"rfilename": name} for name in sorted(files)],
        }

    def _entry(self, name: str, content: bytes) -> dict[str, object]:
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": oid}

    def _tree(self, found: tuple[str, dict[str, bytes]] | None, folder: str) -> object:
        if found is None:
            return None
        prefix = f"{folder}/" if folder else ""
        inside = {n: x for n, x in found[1].items() if n.startswith(prefix)}
        if "recursive=true" in self.path.lower():
            folders = {n.rpartition("/")[0] for n in inside} - {"", folder}
            files = list(inside)
        else:
            folders = {
                prefix + n.removeprefix(prefix).partition("/")[0]
                for n in inside
                if "/" in n.removeprefix(prefix)
            }
            files = [n for n in inside if "/" not in n.removeprefix(prefix)]
        if not inside:
            return None
        return [
            *(
                {"type": "directory", "path": n, "oid": "0" * 40, "size": 0}
                for n in sorted(folders)
            ),
            *(self._entry(n, inside[n]) for n in sorted(files)),
        ]

    def _paths(self, found: tuple[str, dict[str, bytes]] | None, wanted: list[str]) -> object:
        if found is None:
            return None
        entries: list[dict[str, object]] = []
        for name in wanted:
            if name in found[1]:
                entries.append(self._entry(name, found[1][name]))
            elif any(n.startswith(f"{name}/") for n in found[1]):
                entries.append({"type": "directory", "path": name, "oid": "0" * 40, "size": 0})
        return entries

    def _file(self, found: tuple[str, dict[str, bytes]] | None, name: str) -> None:
        if found is None or name not in found[1]:
            self._json(None)
            return
        commit, files = found
        content, status = files[name], 200
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if (asked := self.headers.get("Range")) is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
            content, status = content[int(first) : end], 206
        self._send(status, headers, content)

    def _json(self, value: object) -> None:
        if value is None:
            headers = {"X-Error-Code": "EntryNotFound", "Content-Type": "application/json"}
            self._send(404, headers, b'{"error": "not found"}')
        else:
            self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if self.command != "HEAD":
                self.wfile.write(content)
