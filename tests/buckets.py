"""Buckets for tests: gcp-storage-emulator, behind a proxy that adds what it lacks, and moto.

The proxy refuses a write whose condition on the generation of an object is not met, as Google Cloud
Storage does, keeps newlines at the end of an upload, and answers with an error on demand. It takes
one request at a time to the emulator, which has one thread.
"""

import contextlib
import http.client
import importlib.util
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import fsspec
import pytest

BUCKET = "bucket"
_LIBRARIES = ("gcsfs", "gcp_storage_emulator")
needs_buckets = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, _LIBRARIES)),
        reason='pip install -e ".[gcs]" gcp-storage-emulator',
    ),
]
Fault = Callable[[str, str], int | None]
"""Takes the method and the path of a request; returns a status to answer with, or None."""


class Bucket:
    """A bucket `gs://bucket` that clients of this machine reach by `environment`."""

    url = f"gs://{BUCKET}"

    def __init__(self, port: int, upstream: int):
        self.port, self.upstream = port, upstream
        self.fault: Fault = lambda method, path: None
        self.lock = threading.RLock()

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which gcsfs, tensorstore and google-cloud-storage find the bucket."""
        address = f"http://127.0.0.1:{self.port}"
        return {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it asks by gRPC, which has no emulator
            "FSSPEC_GS_TOKEN": "anon",
            "FSSPEC_GCS_TOKEN": "anon",
        }

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request to the emulator; return status, headers and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        with self.lock, contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all objects that begin with a prefix."""
        _, _, body = self.ask("GET", f"/storage/v1/b/{BUCKET}/o?prefix={quote(prefix, safe='')}")
        return sorted(item["name"] for item in json.loads(body).get("items", []))

    def read(self, name: str) -> bytes:
        """Return the content of an object."""
        return self.ask("GET", f"{_object(name)}?alt=media")[2]

    def write(self, name: str, content: bytes) -> None:
        """Replace an object."""
        path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(name, safe='')}"
        status, _, _ = self.ask("POST", path, content, {"Content-Length": str(len(content))})
        assert status == 200

    def delete(self, name: str) -> None:
        """Delete an object."""
        self.ask("DELETE", _object(name))

    def generation(self, name: str) -> str:
        """Return the generation of an object; 0 without one, as conditions spell it."""
        status, _, body = self.ask("GET", _object(name))
        return str(json.loads(body)["generation"]) if status == 200 else "0"


@pytest.fixture(scope="session")
def _served() -> Iterator[Bucket]:
    with serve_bucket() as bucket:  # one per process, since clients keep its address
        yield bucket


@pytest.fixture
def google_bucket(
    _served: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """An empty bucket, which this process and its children use, with caches in `tmp_path`."""
    for name in _served.names():
        _served.delete(name)
    for name, value in {**_served.environment, "XDG_CACHE_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    yield _served
    _served.fault = lambda method, path: None


def _object(name: str) -> str:
    return f"/storage/v1/b/{BUCKET}/o/{quote(name, safe='')}"


@contextlib.contextmanager
def serve_bucket() -> Iterator[Bucket]:
    """Serve an empty bucket for the context."""
    from gcp_storage_emulator.server import create_server

    with socket.create_server(("127.0.0.1", 0)) as free:
        upstream = free.getsockname()[1]
    emulator = create_server("127.0.0.1", upstream, in_memory=True, default_bucket=BUCKET)
    emulator.start()
    server = _Server(("127.0.0.1", 0), _Proxy)
    server.bucket = Bucket(server.server_address[1], upstream)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, name="bucket", daemon=True)
    thread.start()
    try:
        yield server.bucket  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        emulator.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore clients that close their connection."""


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # one packet for an answer

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        bucket: Bucket = self.server.bucket  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if (status := bucket.fault(self.command, unquote(self.path))) is not None:
            self._answer(status, {}, b'{"error": {"message": "on demand"}}')
            return
        query = parse_qs(urlsplit(self.path).query)
        with bucket.lock:
            for wanted in query.get("ifGenerationMatch", []):
                if bucket.generation(self._name(query, body)) != wanted:
                    self._answer(412, {}, b'{"error": {"message": "condition not met"}}')
                    return
            is_multipart = query.get("uploadType") == ["multipart"]
            if is_multipart and (content := self._content(body)):
                name = quote(self._name(query, body), safe="")
                self.path = f"{urlsplit(self.path).path}?uploadType=media&name={name}"
                body = content
                self.headers.replace_header("Content-Length", str(len(body)))
                self.headers.replace_header("Content-Type", "application/octet-stream")
            keep = ("Content-Type", "Range", "Content-Range", "Content-Length")
            headers = {name: self.headers[name] for name in keep if name in self.headers}
            status, found, content = bucket.ask(self.command, self.path, body, headers)
        self._answer(status, found, content)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _handle

    def _name(self, query: dict[str, list[str]], body: bytes) -> str:
        """Return the name of the object that a request writes or deletes."""
        if "name" in query:
            return query["name"][0]
        if found := re.search(r"/o/([^?]+)", self.path):
            return unquote(found[1])
        part = re.search(rb"\r?\n\r?\n(\{.*?\})\r?\n--", body, re.DOTALL)
        assert part is not None, self.path
        return str(json.loads(part[1])["name"])

    def _content(self, body: bytes) -> bytes:
        """Return the content of an upload in parts, from which the emulator strips newlines."""
        found = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])
        assert found is not None
        newline = b"\r\n" if body.lstrip().partition(b"\n")[0].endswith(b"\r") else b"\n"
        end = body.rindex(newline + b"--" + found[1].strip("'").encode() + b"--")
        begin = body.index(newline * 2, body.index(newline * 2) + 1) + 2 * len(newline)
        return body[begin:end]

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        upstream = f":{self.server.bucket.upstream}"  # type: ignore[attr-defined]
        here = f":{self.server.bucket.port}"  # type: ignore[attr-defined]
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "server"):
                self.send_header(name, value.replace(upstream, here))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a client that gave up
            if self.command != "HEAD":
                self.wfile.write(content)


needs_s3 = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("s3fs", "moto"))),
        reason='pip install -e ".[s3]" "moto[server]"',
    ),
]
STORES = [
    pytest.param("gs", marks=needs_buckets, id="gs"),
    pytest.param("s3", marks=needs_s3, id="s3"),
]


class S3Bucket:
    """A bucket `s3://bucket` of a server of moto, with the methods of `Bucket` that runs need."""

    url = f"s3://{BUCKET}"

    def __init__(self) -> None:
        self.fault: Fault = lambda method, path: None
        self.credentials: set[str] = set()
        """Names of the keys that signed the requests; an empty one: a request was not signed."""
        moto = importlib.import_module("moto.moto_server.werkzeug_app")
        self._moto = moto.DomainDispatcherApplication(moto.create_backend_app)
        serving = importlib.import_module("werkzeug.serving")
        handler = type("Handler", (moto.MotoRequestHandler,), {"log": lambda *_: None})
        options = {"threaded": True, "request_handler": handler}
        self._server = serving.make_server("127.0.0.1", 0, self._answer, **options)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.port}"
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        options = {"endpoint_url": self.address, "region_name": "us-east-1", **keys}
        self._client = importlib.import_module("boto3").client("s3", **options)
        self._client.create_bucket(Bucket=BUCKET)

    def _answer(self, environ: dict[str, str], start: Callable[..., Any]) -> Any:
        found = re.search(r"Credential=([^/]+)", environ.get("HTTP_AUTHORIZATION", ""))
        if (name := found[1] if found else "") == "test":
            return self._moto(environ, start)
        self.credentials.add(name)
        status = self.fault(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if status is None:
            return self._moto(environ, start)
        code = {400: "ExpiredToken", 403: "AccessDenied", 503: "SlowDown"}[status]
        content = f"<Error><Code>{code}</Code><Message>on demand</Message></Error>".encode()
        start(f"{status} {code}", [("Content-Length", str(len(content)))])
        return [content]

    def stop(self) -> None:
        """Stop the server."""
        self._server.shutdown()

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all objects that begin with a prefix."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(item["Key"] for page in pages for item in page.get("Contents", []))

    def read(self, name: str) -> bytes:
        """Return the content of an object."""
        return bytes(self._client.get_object(Bucket=BUCKET, Key=name)["Body"].read())

    def write(self, name: str, content: bytes) -> None:
        """Replace an object."""
        self._client.put_object(Bucket=BUCKET, Key=name, Body=content)

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._client.delete_object(Bucket=BUCKET, Key=name)


AnyBucket = Bucket | S3Bucket


@pytest.fixture(scope="session")
def _served_by_moto() -> Iterator[S3Bucket]:
    found = S3Bucket()
    yield found
    found.stop()


@pytest.fixture
def amazon_bucket(
    _served_by_moto: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3Bucket]:
    """An empty bucket, which this process and its children use, with caches in `tmp_path`."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    for name in _served_by_moto.names():
        _served_by_moto.delete(name)
    values = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": _served_by_moto.address,
        "XDG_CACHE_HOME": str(tmp_path / "home"),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    _served_by_moto.credentials.clear()
    yield _served_by_moto
    _served_by_moto.fault = lambda method, path: None


@pytest.fixture(params=STORES)
def bucket(request: pytest.FixtureRequest) -> AnyBucket:
    """An empty bucket of each service."""
    name = "google_bucket" if request.param == "gs" else "amazon_bucket"
    found: AnyBucket = request.getfixturevalue(name)
    return found


@dataclass
class Place:
    """A bucket, by its URL."""

    url: str
    write: Callable[[str, bytes], None]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """A bucket of the service that the parameter names, without objects."""
    fsspec.get_filesystem_class(request.param).clear_instance_cache()
    name = "google_bucket" if request.param == "gs" else "amazon_bucket"
    found: AnyBucket = request.getfixturevalue(name)
    return Place(f"{found.url}/texts", lambda name, data: found.write(f"texts/{name}", data))
