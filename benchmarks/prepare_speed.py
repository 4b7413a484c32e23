"""MB/s of `gptmill prepare` against the raw speed of GPT-2's tokenizer on the same text with as many processes.

    python benchmarks/prepare_speed.py books.txt.xz --separator "\\n<|endoftext|>\\n" --processes 2

Raw speed: tiktoken in processes that hold their share of the documents in memory and only encode; process start and
tokenizer loading are not counted. Prepare: the whole command, with reading, decompression, splitting, encoding, writing
and checksums. `--without_fast` hides gigatoken, the library of the fast extra, from prepare. The two
are measured interleaved, since machines drift; the result is the median of each. Memory is the peak of all processes of
the command together (PSS, from /proc).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import tiktoken

from gptmill.config.requests import ReadingOptions
from gptmill.data.sources import open_documents, resolve_source
from gptmill.data.tokenizers import build_tokenizer
from gptmill.data.tokenizers.gpt2_bpe import WORD_PATTERN, Gpt2Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--separator")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without_fast", action="store_true")
    options = parser.parse_args()
    documents = read_all(options.source, ReadingOptions(separator=options.separator))
    megabytes = sum(len(text.encode("utf-8")) for text in documents) / 1e6
    encoder = "tiktoken" if options.without_fast else Gpt2Tokenizer().encoder
    print(f"{options.source}: {len(documents):,} documents, {megabytes:,.1f} MB of text; encoder: {encoder}")
    raw, prepared, memory = [], [], []
    for _ in range(options.repeats):
        raw.append(megabytes / measure_raw(documents, options.processes))
        seconds, peak = measure_prepare(options)
        prepared.append(megabytes / seconds)
        memory.append(peak)
        print(f"  raw {raw[-1]:6.2f} MB/s   prepare {prepared[-1]:6.2f} MB/s   {peak / 1e6:,.0f} MB of memory")
    ratio = statistics.median(prepared) / statistics.median(raw)
    print(
        f"raw {statistics.median(raw):.2f} MB/s, prepare {statistics.median(prepared):.2f} MB/s, ratio {ratio:.2f}, ",
        end="",
    )
    print(f"peak memory {max(memory) / 1e6:,.0f} MB, {options.processes} processes")


def read_all(source: str, reading: ReadingOptions) -> list[str]:
    texts: list[str] = []
    for file in resolve_source([source], reading).files:
        with open_documents(file, reading) as documents:
            texts += documents
    return texts


def measure_raw(documents: list[str], processes: int) -> float:
    """Returns the seconds from the first start of encoding to the last end."""
    shares = [documents[first::processes] for first in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        spans = pool.map(encode_share, shares, chunksize=1)
    return max(end for _, end in spans) - min(start for start, _ in spans)


def encode_share(texts: list[str]) -> tuple[float, float]:
    gpt2 = build_tokenizer("gpt2", [])
    ranks = {gpt2.decode_bytes([token]): token for token in range(gpt2.end_of_text)}
    encoding = tiktoken.Encoding("gpt2", pat_str=WORD_PATTERN, mergeable_ranks=ranks, special_tokens={})
    encoding.encode_to_numpy("warm-up")
    start = time.time()
    for text in texts:
        encoding.encode_to_numpy(text)
    return start, time.time()


def measure_prepare(options: argparse.Namespace) -> tuple[float, int]:
    """Returns (seconds, peak memory in bytes)."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--processes", str(options.processes), "--out", f"{folder}/corpus"]
        flags += ["--separator", options.separator] if options.separator else []
        environment = dict(os.environ)
        if options.without_fast:
            (Path(folder) / "gigatoken.py").write_text("raise ImportError")
            environment["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "gptmill", "prepare", options.source, *flags],
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        peaks = [0]
        watcher = threading.Thread(target=watch_memory, args=(process, peaks))
        watcher.start()
        if process.wait():
            raise SystemExit(process.returncode)
        seconds = time.perf_counter() - start
        watcher.join()
        return seconds, max(peaks)


def watch_memory(process: subprocess.Popen[bytes], peaks: list[int]) -> None:
    while process.poll() is None:
        peaks.append(sum(read_pss(number) for number in [process.pid, *list_children(process.pid)]))
        time.sleep(0.5)


def list_children(parent: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            found += [int(number) for number in path.read_text().split()]
        except OSError:
            continue
    return found + [number for child in found for number in list_children(child)]


def read_pss(number: int) -> int:
    try:
        rollup = Path(f"/proc/{number}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
