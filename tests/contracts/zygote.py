"""Starts `gptmill` commands by forking a process that has imported everything: a kill a second instead of one in five.

Reads a JSON list of words per line; answers with the child's process number, and with its exit status at its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import make_environment


class Zygote:
    """The mother process, as the tests see it: one child at a time."""

    def __init__(self, folder: Path) -> None:
        environment = make_environment(PYTHONPATH=os.pathsep.join([str(Path(__file__).parent.parent), *sys.path]))
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *words: str) -> int:
        """The process number of a new child."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def wait(self) -> int:
        """The exit code of the child; negative for the signal that ended it."""
        assert self._process.stdout is not None
        return os.waitstatus_to_exitcode(int(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def serve() -> None:
    import torch

    import gptmill.training.loop
    from gptmill.cli.main import run_guarded

    torch.set_num_threads(1)
    assert gptmill.training.loop.train
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = run_guarded(json.loads(line))
            sys.stdout.flush()
            os._exit(code)
        os.write(1, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(1, f"{status}\n".encode())


if __name__ == "__main__":
    serve()
