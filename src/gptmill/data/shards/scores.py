"""Document scores of a corpus, stored next to its shards: one number for each training document."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptmill.config.errors import UserError
from gptmill.config.json_text import read_json
from gptmill.config.validation import is_folder_name
from gptmill.data.files import flush_to_disk, hash_file, write_durably
from gptmill.data.shards.arrays import find_array
from gptmill.data.shards.opening import TokenShards
from gptmill.data.shards.shard_manifest import FILE_NAME as MANIFEST_NAME
from gptmill.data.shards.shard_manifest import SCORES_DIR, read_manifest

ScoreArray = NDArray[np.float32]


def write_scores(folder: Path, name: str, scores: ScoreArray) -> Path:
    """Writes FOLDER/scores/NAME.npy and, last, the JSON that identifies its corpus."""
    if not is_folder_name(name):
        raise UserError(f"{name!r} cannot be the name of a score; choose a plain name")
    if not (folder / MANIFEST_NAME).exists():
        raise UserError(f"{folder} has no document boundaries to score by; prepare its text with gptmill prepare")
    manifest = read_manifest(folder)
    if scores.shape != (manifest.train.documents,) or not np.isfinite(scores).all():
        raise UserError(
            f"scores for {folder} must be {manifest.train.documents:,} finite numbers, one for each training document; "
            f"these have shape {scores.shape}"
        )
    path = folder / SCORES_DIR / f"{name}.npy"
    try:
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, scores.astype(np.float32))
        flush_to_disk(partial)
        record = {"corpus_sha256": manifest.corpus_sha256, "documents": len(scores), "sha256": hash_file(partial)}
        write_durably(path.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
        partial.replace(path)  # last: it takes no space, so that a full disk spoils no earlier scores
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; free disk space") from None
    return path


def read_scores(shards: TokenShards, name: str) -> ScoreArray:
    """Reads the scores of that name; raises UserError if they are missing, damaged, or of another corpus."""
    path = shards.folder / SCORES_DIR / f"{name}.npy"
    flags = f"--by {name}" if name in ("length", "loss") else f"--by length --name {name}"
    advice = f"create them with: gptmill data score {shards.folder} {flags}"
    if not path.exists():
        raise UserError(f"{shards.folder} has no scores named {name}; {advice}")
    try:
        record = read_json(path.with_suffix(".json"))
        stored = find_array(path)
        if stored.dtype != np.float32:
            raise ValueError(f"its dtype is {stored.dtype}")
        scores: ScoreArray = stored.map()
        is_valid = record["sha256"] == hash_file(path) and len(scores) == shards.manifest.train.documents
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); {advice}") from None
    if not is_valid or record["corpus_sha256"] != shards.manifest.corpus_sha256:
        raise UserError(f"{path} does not belong to the documents now in {shards.folder}; {advice}")
    return scores


def hash_scores(shards: TokenShards, name: str) -> str:
    """Returns the SHA-256 of the scores, which may be recomputed under the same name."""
    read_scores(shards, name)
    return hash_file(shards.folder / SCORES_DIR / f"{name}.npy")


def score_by_length(shards: TokenShards) -> ScoreArray:
    """Returns the tokens in each training document, including the end_of_text that starts it."""
    sizes = np.array([shard.tokens for shard in shards.manifest.train.shards], dtype=np.int64)
    firsts = np.cumsum(sizes) - sizes
    starts = [first + shard_starts for first, shard_starts in zip(firsts, shards.train_starts, strict=True)]
    return np.diff(np.concatenate([*starts, [sizes.sum()]])).astype(np.float32)
