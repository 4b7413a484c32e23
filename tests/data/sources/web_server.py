"""A real server of a few files on this machine, as patient or as unreliable as a test wants it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, tuple[str, str]] = {}  # path: where to, and the checksum told on the way
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, range
        self.hang_up_after: list[int] = []  # bytes that the next answers send before the connection breaks
        self.fail_with: list[int] = []  # codes of the next answers
        self.knows_ranges = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: WebServer

    def log_message(self, *arguments: object) -> None:
        """Tests are quiet."""

    def do_HEAD(self) -> None:
        self.answer(has_body=False)

    def do_GET(self) -> None:
        self.answer(has_body=True)

    def answer(self, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        wanted = self.headers.get("Range")
        self.server.requests.append((self.command, path, wanted))
        if self.server.fail_with:
            self.send_error(self.server.fail_with.pop(0))
        elif path in self.server.redirects:
            target, checksum = self.server.redirects[path]
            self.send_response(302)
            self.send_header("Location", target)
            self.send_header("X-Linked-ETag", f'"{checksum}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif path not in self.server.files:
            self.send_error(404)
        else:
            self.send_file(self.server.files[path], wanted if self.server.knows_ranges else None, has_body)

    def send_file(self, content: bytes, wanted: str | None, has_body: bool) -> None:
        start, stop = 0, len(content)
        if wanted is not None:
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
            assert match, wanted
            start = int(match[1])
            stop = min(stop, int(match[2]) + 1 if match[2] else stop)
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        self.send_response(200 if wanted is None else 206)
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        if self.server.knows_ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if has_body:
            sent = self.server.hang_up_after.pop(0) if self.server.hang_up_after else stop - start
            self.wfile.write(content[start:stop][:sent])
        self.close_connection = True


@contextmanager
def serve() -> Iterator[WebServer]:
    server = WebServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
