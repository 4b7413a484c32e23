"""gptmill tensorboard: serves TensorBoard until Ctrl-C."""

from __future__ import annotations

import time

from gptmill.cli.flags import Command
from gptmill.cli.output import print_line
from gptmill.config.schema import build_config
from gptmill.config.tensorboard_request import TensorBoardRequest

SUMMARY = """\
Serves TensorBoard for one run, or for all runs of logdir, until Ctrl-C; needs no network. A run that was trained
without --use_tensorboard is shown too: its charts are made from its events.jsonl. RUN is the name of a run or the path
of its folder."""


def run(arguments: list[str]) -> int:
    command = Command("tensorboard", "[RUN]", SUMMARY, (TensorBoardRequest,))
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 0, 1)
    request = build_config(TensorBoardRequest, parsed.values)
    from gptmill.api.tensorboard_server import open_tensorboard

    name = parsed.words[0] if parsed.words else None
    with open_tensorboard(name, logdir=request.logdir, port=request.port, host=request.host) as server:
        for rebuilt in server.rebuilt:
            print_line(f"{rebuilt}: as it is now, from its events.jsonl; --use_tensorboard keeps up")
        print_line(f"TensorBoard: {server.url} (Ctrl-C ends it)")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return 0
