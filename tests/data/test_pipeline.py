"""Parallel preparation: the result depends on the corpus and the options alone."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptmill import __version__
from gptmill.config.errors import UserError
from gptmill.config.requests import CleaningOptions, PrepareRequest
from gptmill.data.files import hold_lock
from gptmill.data.pipeline import chunks, corpus_writer, encoding
from gptmill.data.pipeline.chunks import START, make_chunks
from gptmill.data.pipeline.executors import InlineExecutor
from gptmill.data.pipeline.prepare_progress import PrepareProgress
from gptmill.data.pipeline.shard_writer import GrowingArray, ShardWriter, WriterState
from gptmill.data.pipeline.splitting import write_chunk
from gptmill.data.prepare import prepare_corpus
from gptmill.data.shards.shard_manifest import Manifest, Split, read_manifest, read_names
from gptmill.data.sources import resolve_source

pytestmark = pytest.mark.slow

END_OF_TEXT = 256


def prepare(place: Path, out: Path, **options: object) -> Manifest:
    request = PrepareRequest(out=str(out), **{"tokenizer": "byte", **options})  # type: ignore[arg-type]
    return prepare_corpus([str(place)], request, lambda _: None)[1]


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_texts(folder: Path, split: Split) -> list[str]:
    tokens = np.concatenate([np.load(folder / shard.file) for shard in split.shards])
    pieces = np.split(tokens, np.flatnonzero(tokens == END_OF_TEXT))[1:]
    return [bytes(piece[1:].tolist()).decode("utf-8") for piece in pieces]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """400 documents, every fifth of which stood there before."""
    generator = random.Random(3)
    texts = [f"{number} " + "words and more words " * generator.randrange(1, 20) for number in range(320)]
    texts += generator.sample(texts, 80)
    generator.shuffle(texts)
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return path


@pytest.mark.parametrize("processes", [2, 3])
def test_the_number_of_processes_changes_nothing(
    lines: Path, tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 5000)
    cleaning = CleaningOptions(drop_duplicates=True, min_chars=60)
    prepare(lines, tmp_path / "one", processes=1, cleaning=cleaning)
    prepare(lines, tmp_path / "many", processes=processes, cleaning=cleaning)
    assert read_all(tmp_path / "one") == read_all(tmp_path / "many")


def test_a_dask_cluster_gives_the_same_bytes_also_after_it_lost_a_worker(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(corpus_writer, "JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr(chunks, "list_parts", lambda *_: None)  # many chunks of one file
    prepare(lines, tmp_path / "alone", processes=1)

    def die_late(chunk: chunks.Chunk, options: encoding.EncodingOptions) -> encoding.EncodedChunk:
        if chunk.next.chunk == 8:
            os._exit(1)
        return encoding.encode_chunk(chunk, options)

    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
        ) as cluster,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(corpus_writer, "encode_chunk", die_late)
            with pytest.raises(UserError, match=r"certain part died, the last one at tcp://.*more memory.* to resume$"):
                prepare(lines, tmp_path / "together", cluster=cluster.scheduler_address)
        assert (tmp_path / "together.partial/journal.json").exists()
        prepare(lines, tmp_path / "together", cluster=cluster.scheduler_address)
    assert read_all(tmp_path / "alone") == read_all(tmp_path / "together")


def test_failures_of_a_cluster_are_sentences_and_those_of_its_work_are_not(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")

    class Cluster(InlineExecutor):
        """Stands in for the client too."""

        def __init__(self, error: Exception | None = None, versions: object = __version__) -> None:
            self.error, self.versions = error, versions

        def nthreads(self) -> dict[str, int]:
            return {"tcp://a:1": 1}

        def run(self, *_: object) -> dict[str, object]:
            if isinstance(self.versions, Exception):
                raise self.versions
            return {"tcp://a:1": self.versions}

        def get_executor(self, **_: object) -> Cluster:
            return self

        def submit(self, *_: object, **__: object) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(self.error)
            return future

    closed = distributed.comm.CommClosedError("in <TCP>:\n stream is closed")
    for cluster, sentence in (
        (Cluster(closed), "cluster at tcp://b:1 failed: in <TCP>: stream is closed; see the logs"),
        (Cluster(CancelledError()), "failed: CancelledError; see"),
        (Cluster(versions=closed), "stream is closed; see the logs"),
        (Cluster(versions="0.0.1"), "worker tcp://a:1 has gptmill 0.0.1; install gptmill"),
        (Cluster(versions=ModuleNotFoundError("No module named 'gptmill'")), "No module named 'gptmill'); install"),
    ):
        monkeypatch.setattr(distributed, "Client", lambda *_, cluster=cluster, **__: cluster)
        with pytest.raises(UserError, match=re.escape(sentence)):
            prepare(lines, tmp_path / "out", cluster="tcp://b:1")
    monkeypatch.setattr(distributed, "Client", lambda *_, **__: Cluster(KeyError("a defect")))
    with pytest.raises(KeyError, match="a defect"):
        prepare(lines, tmp_path / "out", cluster="tcp://b:1")
    assert not (tmp_path / "out").exists()


def test_a_cluster_that_is_not_there_is_named(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    connect = distributed.Client
    monkeypatch.setattr(distributed, "Client", lambda place, **more: connect(place, **{**more, "timeout": "0.5s"}))
    with pytest.raises(UserError, match="no Dask scheduler answers at tcp://"):
        prepare(lines, tmp_path / "out", cluster="tcp://127.0.0.1:9")
    assert not (tmp_path / "out").exists()


def test_duplicates_are_dropped_and_reported(lines: Path, tmp_path: Path) -> None:
    manifest = prepare(lines, tmp_path / "out", cleaning=CleaningOptions(drop_duplicates=True))
    texts = read_texts(tmp_path / "out", manifest.train) + read_texts(tmp_path / "out", manifest.val)
    assert len(texts) == len(set(texts)) == 320
    assert manifest.cleaning["dropped"]["drop_duplicates"]["documents"] == 80
    assert read_manifest(tmp_path / "out").cleaning == manifest.cleaning


def test_validation_of_a_small_corpus_is_at_least_a_window(lines: Path, tmp_path: Path) -> None:
    """One document in a hundred would be too little text; those that draw the lowest numbers go first."""
    manifest = prepare(lines, tmp_path / "out", val_fraction=0.0001)
    assert 2049 <= manifest.val.tokens < 4000
    larger = prepare(lines, tmp_path / "larger", val_fraction=0.2)
    assert set(read_texts(tmp_path / "out", manifest.val)) < set(read_texts(tmp_path / "larger", larger.val))


def test_a_validation_source_of_its_own(lines: Path, text_file: Path, tmp_path: Path) -> None:
    manifest = prepare(lines, tmp_path / "out", val_source=str(text_file))
    assert manifest.train.documents == 400
    assert read_texts(tmp_path / "out", manifest.val) == [text_file.read_text(encoding="utf-8")]


LINE_BREAKS = "\n\x0b\x0c\r\x1c\x1d\x1e\x85\u2028\u2029"  # all at which str.splitlines splits


def test_every_document_knows_its_start_and_its_file(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    sources = {number: f"{number:02d} {LINE_BREAKS[number % 10]}'\"\\é \U0001f600.txt" for number in range(50)}
    for number, name in sources.items():
        (tmp_path / "source" / name).write_text(f"file {number}: " + "x" * number, encoding="utf-8")
    manifest = prepare(tmp_path / "source", tmp_path / "out", split="documents", val_fraction=0.2, shard_tokens=100)
    names = read_names(tmp_path / "out", "")
    assert {int(name[:2]): name for name in names} == sources
    for split in (manifest.train, manifest.val):
        files = [
            names[number] for shard in split.shards for number in np.load(tmp_path / "out" / "origins" / shard.file)
        ]
        assert [int(text.split()[1][:-1]) for text in read_texts(tmp_path / "out", split)] == [
            int(name[:2]) for name in files
        ]
        for shard in split.shards:
            tokens = np.load(tmp_path / "out" / shard.file)
            starts = np.load(tmp_path / "out" / "documents" / shard.file)
            np.testing.assert_array_equal(starts, np.flatnonzero(tokens == END_OF_TEXT))
            assert len(starts) == shard.documents
    # as earlier versions wrote them:
    origins = tmp_path / "out" / "origins"
    (origins / "names.json").unlink()
    escaped = "".join(json.dumps(name, ensure_ascii=False)[1:-1] + "\n" for name in names)
    (origins / "names.txt").write_text(escaped, encoding="utf-8")
    assert read_names(tmp_path / "out", "") == names


def test_chunks_from_any_position_on_are_the_chunks_that_were_left(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(
        chunks, "list_parts", lambda file, options: None if "long" in file.name else parts(file, options)
    )
    parts = sys.modules["gptmill.data.sources"].list_parts
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(9):
        shutil.copy(lines, folder / f"{number}-{'long' if number % 4 == 2 else 'short'}.jsonl")
    request = PrepareRequest()
    files = resolve_source([str(folder)], request.reading).files
    everything = list(make_chunks(files, request.reading, START))
    assert len(everything) > 20
    for number, chunk in enumerate(everything):
        assert list(make_chunks(files, request.reading, chunk.next)) == everything[number + 1 :]


def test_a_full_disk_is_noticed_before_anything_is_written(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10, 10, 1000))
    with pytest.raises(UserError, match=r"need about \d+ MB, but only 0 MB are free"):
        prepare(lines, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_two_preparations_of_one_folder_do_not_meet(lines: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "journal.json").write_text("{}")
    code = (
        "import sys; from pathlib import Path; from gptmill.data.files import hold_lock\n"
        "with hold_lock(Path(sys.argv[1]), ''): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(partial / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        (partial / "journal.json").unlink()  # as at the beginning: still nothing that the second may take away
        with pytest.raises(UserError, match="being prepared by another process"):
            prepare(lines, tmp_path / "out")
        assert (partial / ".lock").exists()
        other.send_signal(signal.SIGKILL)
    prepare(lines, tmp_path / "out")  # a killed process holds nothing


def test_a_worker_that_dies_is_reported_and_nothing_is_lost(lines: Path, tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(
        """
import os, sys
from gptmill.config.errors import UserError
from gptmill.config.requests import PrepareRequest
from gptmill.data.pipeline import chunks, corpus_writer
from gptmill.data.prepare import prepare_corpus
from gptmill.data.tokenizers.byte import ByteTokenizer

chunks.CHUNK_BYTES, corpus_writer.JOURNAL_SECONDS = 5000, 0.0
encode = ByteTokenizer.encode
def encode_or_die(self, text):
    if __name__ != "__main__" and text.startswith("77 ") and "die" in sys.argv:
        os.kill(os.getpid(), 9)
    return encode(self, text)
ByteTokenizer.encode = encode_or_die
if __name__ == "__main__":
    request = PrepareRequest(out=sys.argv[2], tokenizer="byte", processes=2)
    try:
        prepare_corpus([sys.argv[1]], request, lambda _: None)
    except UserError as error:
        sys.exit(str(error))
""",
        encoding="utf-8",
    )
    command = [sys.executable, str(driver), str(lines), str(tmp_path / "out")]
    died = subprocess.run([*command, "die"], capture_output=True, text=True, check=False)
    assert "a worker process was killed" in died.stderr
    assert died.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    subprocess.run(command, check=True)
    prepare(lines, tmp_path / "unbroken", processes=1)
    assert read_all(tmp_path / "out") == read_all(tmp_path / "unbroken")


def test_a_small_file_that_unpacks_to_a_large_one_is_taken_bit_by_bit(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "packed" / lines.name
    packed.parent.mkdir()
    shutil.copy2(lines, packed)
    prepare(lines, tmp_path / "at-once", processes=1)
    sizes: list[int] = []
    monkeypatch.setattr(encoding, "PIECE_CHARS", 3000)
    monkeypatch.setattr(
        corpus_writer, "write_chunk", lambda piece, *rest: (sizes.append(len(piece.tokens)), write_chunk(piece, *rest))
    )
    prepare(packed, tmp_path / "bit-by-bit", processes=1)
    assert len(sizes) > 10
    assert max(sizes) < 5000
    assert read_all(tmp_path / "at-once") == read_all(tmp_path / "bit-by-bit")


def test_many_tiny_files_are_gathered_but_not_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_FILES", 10)
    for number in range(35):
        (tmp_path / f"{number:02d}.txt").write_text("tiny")
    reading = PrepareRequest().reading
    made = make_chunks(resolve_source([str(tmp_path)], reading).files, reading, START)
    assert [len(chunk.extents) for chunk in made] == [10, 10, 10, 5]


def stop_after(chunks_done: int) -> Callable[[PrepareProgress], None]:
    left = iter(range(chunks_done))

    def report(_progress: PrepareProgress) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return report


@pytest.fixture
def interrupted(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A preparation that was stopped in the middle; its folder."""
    monkeypatch.setattr(corpus_writer, "JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(chunks, "list_parts", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus([str(lines)], PrepareRequest(out=str(tmp_path / "out"), tokenizer="byte"), stop_after(9))
    return tmp_path / "out.partial"


def test_a_truncated_shard_is_not_resumed(interrupted: Path, lines: Path, tmp_path: Path) -> None:
    path = interrupted / "train_000000.npy"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(UserError, match="is shorter than its journal says"):
        prepare(lines, tmp_path / "out")


def test_a_source_that_was_replaced_is_begun_anew(interrupted: Path, lines: Path, tmp_path: Path) -> None:
    """By a text of the same size, dated long ago."""
    lines.write_text(lines.read_text(encoding="utf-8").replace("words", "WORDS"), encoding="utf-8")
    os.utime(lines, ns=(10**9, 10**9))
    manifest = prepare(lines, tmp_path / "out")
    texts = read_texts(tmp_path / "out", manifest.train) + read_texts(tmp_path / "out", manifest.val)
    assert len(texts) == 400
    assert not any("words" in text for text in texts)
    assert not interrupted.exists()


def test_a_source_that_changes_meanwhile_is_noticed(lines: Path, tmp_path: Path) -> None:
    request = PrepareRequest(out=str(tmp_path / "out"), tokenizer="byte")
    with pytest.raises(UserError, match=r"lines.jsonl changed while it was being prepared"):
        prepare_corpus([str(lines)], request, lambda _: lines.write_text('{"text": "other"}'))
    assert not (tmp_path / "out").exists()


def test_an_array_that_grew_is_the_file_that_numpy_writes(tmp_path: Path) -> None:
    values = np.arange(1000, dtype=np.uint16)
    growing = GrowingArray(tmp_path / "grown.npy", values.dtype, 0)
    growing.append(values[:600])
    growing.flush()
    growing.append(values[:100])  # will be cut off
    growing.close()
    growing = GrowingArray(tmp_path / "grown.npy", values.dtype, 600)
    growing.append(values[600:])
    growing.flush()
    growing.close()
    np.save(tmp_path / "saved.npy", values)
    assert (tmp_path / "grown.npy").read_bytes() == (tmp_path / "saved.npy").read_bytes()


def test_a_document_longer_than_a_shard_runs_through_several(tmp_path: Path) -> None:
    for name in ("documents", "origins"):
        (tmp_path / name).mkdir()
    state = WriterState()
    writer = ShardWriter(tmp_path, "train", np.dtype(np.uint16), 10, state)
    writer.write(np.arange(25, dtype=np.uint16), 0)
    writer.write(np.arange(5, dtype=np.uint16), 1)
    writer.finish()
    assert [shard.tokens for shard in state.shards] == [10, 10, 10]
    assert [shard.documents for shard in state.shards] == [1, 0, 1]
    assert not (tmp_path / "train_000003.npy").exists()


def test_held_locks_end_with_their_block(tmp_path: Path) -> None:
    for _ in range(2):
        with hold_lock(tmp_path / "lock", "held"):
            assert os.path.exists(tmp_path / "lock")  # noqa: PTH110
