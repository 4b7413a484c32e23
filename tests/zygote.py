"""Starts `gptmill` commands as forks of a process that has imported everything: in a tenth of a second, not in three.

Such a command is a process of its own, which signals reach and end as they would any other. The mother reads a JSON
object per line, and gets the child's output and error with it. A second fork waits for the child, and tells what
becomes of it: its process number, then its exit status.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

IMPORTED = ("gptmill.__main__", "gptmill.cli.main", "gptmill.cli.train", "gptmill.training.loop", "torch._dynamo")


class Child:
    """A command that runs."""

    def __init__(self, words: tuple[str, ...], news: IO[str]) -> None:
        self._words, self._news = words, news
        self.pid = int(news.readline())

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code; negative for the signal that ended it. Raises TimeoutExpired for one that takes minutes."""
        try:
            return os.waitstatus_to_exitcode(int(self._news.readline()))
        except TimeoutError:
            self.kill()
            raise subprocess.TimeoutExpired(self._words, Zygote.LONGEST_SECONDS) from None
        finally:
            self._news.close()


class Zygote:
    """The mother process, as the tests see it."""

    LONGEST_SECONDS = 300

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def start(
        self, words: tuple[str, ...], folder: Path, environment: Mapping[str, str], output: IO[str], error: IO[str]
    ) -> Child:
        """Runs the command in a folder."""
        ours, theirs = socket.socketpair()
        ours.settimeout(self.LONGEST_SECONDS)
        request = json.dumps({"words": words, "folder": str(folder), "environment": dict(environment)})
        socket.send_fds(self._socket, [b"\n"], [theirs.fileno(), output.fileno(), error.fileno()])
        self._socket.sendall(f"{request}\n".encode())
        theirs.close()
        with ours:
            return Child(words, ours.makefile())

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(requests: socket.socket) -> None:
    """Forks for every request."""
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # what a child does not touch need not be copied
    while True:
        _, descriptors, _, _ = socket.recv_fds(requests, 1, 3)
        if not descriptors:
            return
        line = b""
        while not line.endswith(b"\n"):
            line += requests.recv(65536)
        if os.fork() == 0:
            requests.close()
            attend(json.loads(line), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def attend(request: dict[str, object], news: int, output: int, error: int) -> NoReturn:
    """Forks once more: the child runs the command, its parent tells of it."""
    child = os.fork()
    if child:
        os.write(news, f"{child}\n".encode())
        os.write(news, f"{os.waitpid(child, 0)[1]}\n".encode())
        os._exit(0)
    os.close(news)
    for descriptor, stream in ((output, 1), (error, 2)):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    sys.argv = [sys.modules["gptmill.__main__"].__file__, *request["words"]]  # type: ignore[misc, list-item]
    vars(sys.modules["gptmill"])["STARTED"] = time.monotonic()
    code = sys.modules["gptmill.cli.main"].main()
    # As Python ends, but for freeing the memory of everything imported, which takes longer than most commands.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
