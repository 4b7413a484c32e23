"""OpenAI's encodings: their published definitions, and where their rank files are looked for."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from pathlib import Path

import pytest
import tiktoken.load
import tiktoken_ext.openai_public

from gptmill.config.errors import UserError
from gptmill.data.tokenizers import build_tokenizer, is_called, openai, restore_tokenizer
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer
from gptmill.data.tokenizers.openai import ENCODINGS, URL, find_cache_dir
from gptmill.data.tokenizers.protocol import decode, make_fingerprint

pytestmark = pytest.mark.slow

TEXT = "Hello, I am a language model <|endoftext|>\n  été 漢字 🙂 12345"


def make_rank_file() -> bytes:
    """GPT-2's table with a gap before the last thousand ranks, as p50k_base has gaps."""
    gpt2 = Gpt2Tokenizer()
    tokens = [gpt2.decode_bytes([rank]) for rank in range(gpt2.end_of_text)]
    ranks = {token: rank if rank < 49_256 else rank + 1_001 for rank, token in enumerate(tokens)}
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


@pytest.fixture
def rank_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The content that p50k_base is expected to have here; both caches are empty and there is no network."""
    content = make_rank_file()
    sha256 = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(ENCODINGS, "p50k_base", dataclasses.replace(ENCODINGS["p50k_base"], sha256=sha256))
    monkeypatch.setenv("GPTMILL_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    set_network(monkeypatch, None)
    return content


def set_network(monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    def read_file(blobpath: str) -> bytes:
        assert blobpath == f"{URL}/p50k_base.tiktoken"
        if content is None:
            raise ConnectionError("there is no network")
        return content

    monkeypatch.setattr(tiktoken.load, "read_file", read_file)


def put_in_cache(tmp_path: Path, content: bytes) -> Path:
    kept = tmp_path / "ours" / "tokenizers" / "p50k_base.tiktoken"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(content)
    return kept


@pytest.mark.parametrize("name", ENCODINGS)
def test_definitions_are_those_that_tiktoken_publishes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def load(url: str, expected_hash: str) -> dict[bytes, int]:
        asked["url"], asked["sha256"] = url, expected_hash
        return {}

    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", load)
    published = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]()
    encoding = ENCODINGS[name]
    assert asked == {"url": f"{URL}/{name}.tiktoken", "sha256": encoding.sha256}
    assert encoding.pattern == published["pat_str"]
    assert encoding.special_tokens == published["special_tokens"]


def test_r50k_base_is_gpt2_and_needs_no_file(rank_file: bytes) -> None:
    del rank_file
    tokenizer = build_tokenizer("r50k_base", [])
    assert make_fingerprint(tokenizer) == make_fingerprint(Gpt2Tokenizer())
    assert is_called(tokenizer, "r50k_base")
    assert is_called(tokenizer, "gpt2")
    assert not is_called(tokenizer, "byte")


def test_a_rank_file_in_gptmills_cache_is_enough(rank_file: bytes, tmp_path: Path) -> None:
    put_in_cache(tmp_path, rank_file)
    tokenizer = build_tokenizer("p50k_base", [])
    ids = tokenizer.encode(TEXT)
    assert decode(tokenizer, ids.tolist()) == TEXT
    assert tokenizer.end_of_text not in ids
    assert tokenizer.vocab_size == 51_257
    assert [rank if rank < 49_256 else rank - 1_001 for rank in ids.tolist()] == Gpt2Tokenizer().encode(TEXT).tolist()
    restored = restore_tokenizer(tokenizer.spec(), "here")
    assert make_fingerprint(restored) == make_fingerprint(tokenizer)


def test_an_id_that_stands_for_nothing_has_no_bytes(rank_file: bytes, tmp_path: Path) -> None:
    put_in_cache(tmp_path, rank_file)
    tokenizer = build_tokenizer("p50k_base", [])
    ids = tokenizer.encode("model").tolist()
    assert decode(tokenizer, [49_300, *ids, tokenizer.end_of_text]) == "model"


def test_tiktokens_cache_is_read_and_its_file_kept(rank_file: bytes, tmp_path: Path) -> None:
    place = tmp_path / "tiktoken" / hashlib.sha1(f"{URL}/p50k_base.tiktoken".encode()).hexdigest()
    place.parent.mkdir()
    place.write_bytes(rank_file)
    build_tokenizer("p50k_base", [])
    assert (tmp_path / "ours" / "tokenizers" / "p50k_base.tiktoken").read_bytes() == rank_file


def test_a_download_is_kept(rank_file: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_network(monkeypatch, rank_file)
    build_tokenizer("p50k_base", [])
    assert (tmp_path / "ours" / "tokenizers" / "p50k_base.tiktoken").read_bytes() == rank_file


@pytest.mark.parametrize("downloaded", [None, b"IQ== 0\n"])
def test_without_the_file_one_sentence_says_what_to_put_where(
    downloaded: bytes | None, rank_file: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_network(monkeypatch, downloaded)
    with pytest.raises(UserError) as caught:
        build_tokenizer("p50k_base", [])
    message = str(caught.value)
    assert f"{URL}/p50k_base.tiktoken" in message
    assert hashlib.sha256(rank_file).hexdigest() in message
    assert str(tmp_path / "ours" / "tokenizers" / "p50k_base.tiktoken") in message
    assert not (tmp_path / "ours").exists()


def test_a_file_with_another_checksum_is_refused(rank_file: bytes, tmp_path: Path) -> None:
    kept = put_in_cache(tmp_path, rank_file[:-1])
    with pytest.raises(UserError, match="is not the file that OpenAI published") as caught:
        build_tokenizer("p50k_base", [])
    assert str(kept) in str(caught.value)


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPTMILL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert find_cache_dir() == Path.home() / ".cache" / "gptmill"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_cache_dir() == tmp_path / "gptmill"
    monkeypatch.setenv("GPTMILL_CACHE", str(tmp_path / "mine"))
    assert openai.find_cache_dir() == tmp_path / "mine"
