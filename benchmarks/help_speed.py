"""Wall time of `gptmill --help` and of every verb's help, as whole processes."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from gptmill.cli.main import VERBS

REPEATS = 10


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for words in ([], *([verb] for verb in VERBS)):
        seconds = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-m", "gptmill", *words, "--help"], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - started)
        command = " ".join(["gptmill", *words, "--help"])
        print(f"{command:<28} median {statistics.median(seconds):.3f} s, slowest {max(seconds):.3f} s")


if __name__ == "__main__":
    main()
