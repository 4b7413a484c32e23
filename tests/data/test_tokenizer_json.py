"""Any tokenizer.json: the library's ids, however they are found; a spec that needs no file; text that stays text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from gptmill.config.errors import UserError
from gptmill.data.tokenizers import (
    Tokenizer,
    bpe_training,
    build_tokenizer,
    identify_tokenizer,
    is_called,
    restore_tokenizer,
)
from gptmill.data.tokenizers.bpe_training import PATTERN, train_tokenizer
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer
from gptmill.data.tokenizers.protocol import decode, make_fingerprint
from gptmill.data.tokenizers.tiktoken_conversion import convert_to_tiktoken
from gptmill.data.tokenizers.tokenizer_json import FILE_NAME, JsonTokenizer

pytestmark = pytest.mark.slow

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SAMPLE = "the rain in the old town, the rains' end: it's 1234 steps \n\n  to THE river; été, 漢字 🙂. " * 30
SPECIAL = "<|endoftext|>"
VOCAB_SIZE = 300


@cache
def train_definition() -> str:
    return train_tokenizer([SAMPLE], VOCAB_SIZE, 1_000_000, lambda _: None).definition


def make_definition(**changes: Any) -> dict[str, Any]:
    return {**json.loads(train_definition()), **changes}


def write(path: Path, library: Library | dict[str, Any]) -> str:
    path.write_text(library.to_str() if isinstance(library, Library) else json.dumps(library), encoding="utf-8")
    return str(path)


def load(definition: dict[str, Any]) -> Library:
    library = Library.from_str(json.dumps(definition))
    library.encode_special_tokens = True
    return library


@cache
def make_gpt2_pair() -> tuple[Library, Tokenizer]:
    """GPT-2's published table as a tokenizer.json, in Hugging Face's library and in gptmill."""
    gpt2 = Gpt2Tokenizer()
    ranks = {gpt2.decode_bytes([rank]): rank for rank in range(gpt2.end_of_text)}
    definition = json.loads(bpe_training.make_definition(ranks))
    definition["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return load(definition), JsonTokenizer(json.dumps(definition))


@cache
def make_gpt2() -> Gpt2Tokenizer:
    return Gpt2Tokenizer()


@given(text=TEXTS)
@example("I'll don't WE'VE  12345\r\n\t\n <|endoftext|> \u2028\x00\u00a0 naïve 漢字🙂👩‍👩‍👧 e\u0301" + " " * 50)
@settings(deadline=None)
def test_a_byte_level_file_gives_the_librarys_ids_and_brings_text_back(text: str) -> None:
    library, tokenizer = make_gpt2_pair()
    ids = tokenizer.encode(text).tolist()
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert ids == make_gpt2().encode(text).tolist()
    assert decode(tokenizer, ids) == text


def set_pattern(pattern: str) -> Callable[[dict[str, Any]], None]:
    def change(definition: dict[str, Any]) -> None:
        definition["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern

    return change


def swap_merges(definition: dict[str, Any]) -> None:
    merges = definition["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def split_otherwise(definition: dict[str, Any]) -> None:
    """A token that is listed as made of a pair that its own bytes never come to."""
    tokens, merges = [*definition["model"]["vocab"]], definition["model"]["merges"]
    index = next(index for index, merge in enumerate(merges) if merge.index(" ") == 2 and len(merge) == 4)
    first, second, _, third = merges[index]
    merges[index : index + 1] = [f"{second} {third}", f"{first} {second}{third}"]
    tokens.insert(256 + index, second + third)
    definition["model"]["vocab"] = {token: id_ for id_, token in enumerate(tokens)}
    definition["added_tokens"][0]["id"] = len(tokens)


def add_plain_token(definition: dict[str, Any]) -> None:
    definition["added_tokens"].append(
        {**definition["added_tokens"][0], "id": VOCAB_SIZE, "content": "rain", "special": False}
    )


def normalise(definition: dict[str, Any]) -> None:
    definition["normalizer"] = {"type": "Lowercase"}


def prefix_space(definition: dict[str, Any]) -> None:
    definition["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


CHANGES = {
    "merges in another order": swap_merges,
    "a token from another pair": split_otherwise,
    "an added token that is text": add_plain_token,
    "a normaliser": normalise,
    "a space before": prefix_space,
    "a pattern that the engines read differently": set_pattern(PATTERN.replace("{1,3}", "{1,3}+")),
    "a pattern with gaps": set_pattern(r"\p{L}+"),
    "a pattern that only one engine knows": set_pattern(r"(?~a)|[\s\S]"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_cannot_be_shown_equal_is_left_to_the_library(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    definition = make_definition()
    assert convert_to_tiktoken(definition, load(definition)) is not None
    change(definition)
    library = load(definition)
    assert convert_to_tiktoken(definition, library) is None
    tokenizer = build_tokenizer(write(tmp_path / "x.json", definition), [])
    for text in (SAMPLE, "The Rain 1234567 theother\n\n\t <|endoftext|>"):
        assert tokenizer.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids


def test_words_taken_whole_stay_with_the_library() -> None:
    definition = make_definition()
    definition["model"]["ignore_merges"] = True
    assert convert_to_tiktoken(definition, load(definition)) is not None
    definition["model"]["vocab"]["rivers"] = VOCAB_SIZE
    assert convert_to_tiktoken(definition, load(definition)) is None


def test_the_spec_outlives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine" / FILE_NAME
    path.parent.mkdir()
    tokenizer = build_tokenizer(write(path, make_definition()), [])
    spec = json.loads(json.dumps(tokenizer.spec()))
    assert make_fingerprint(build_tokenizer(str(path.parent), [])) == make_fingerprint(tokenizer)
    path.unlink()
    restored = restore_tokenizer(spec, "here")
    assert make_fingerprint(restored) == make_fingerprint(tokenizer)
    assert restored.encode(SAMPLE).tolist() == tokenizer.encode(SAMPLE).tolist()
    assert (restored.vocab_size, restored.end_of_text) == (VOCAB_SIZE, VOCAB_SIZE - 1)


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    name = write(tmp_path / "a.json", make_definition())
    tokenizer, label = build_tokenizer(name, []), identify_tokenizer(name)
    assert is_called(tokenizer, name)
    assert label.startswith("a-")
    Path(name).write_text(json.dumps(make_definition(), indent=3), encoding="utf-8")
    assert is_called(tokenizer, name)
    assert identify_tokenizer(name) == label
    write(Path(name), make_definition(normalizer={"type": "NFC"}))
    assert not is_called(tokenizer, name)
    assert identify_tokenizer(name) != label
    Path(name).unlink()
    with pytest.raises(UserError, match="there is no tokenizer"):
        is_called(tokenizer, name)
    assert not is_called(tokenizer, "gpt2")


@pytest.mark.parametrize("damage", [{"sha256": "0" * 64}, {"json_zlib_base64": "AAAA"}, {"json_zlib_base64": 7}])
def test_a_damaged_spec_is_refused(damage: dict[str, Any]) -> None:
    spec = JsonTokenizer(train_definition()).spec()
    with pytest.raises(UserError, match="tokenizer spec in here is corrupt"):
        restore_tokenizer({**spec, **damage}, "here")


def test_nothing_is_cut_padded_or_added_to_a_text(tmp_path: Path) -> None:
    library = Library.from_str(train_definition())
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL} $A", special_tokens=[(SPECIAL, VOCAB_SIZE - 1)]
    )
    tokenizer = build_tokenizer(write(tmp_path / "x.json", library), [])
    ids = tokenizer.encode(SAMPLE).tolist()
    assert ids == JsonTokenizer(train_definition()).encode(SAMPLE).tolist()
    assert decode(tokenizer, ids) == SAMPLE


def make_unigram() -> Library:
    pieces = ["<unk>", "</s>", "▁", "▁rain", "a", "b", "<", "/", "s", ">", "\0"]
    library = Library(models.Unigram([(piece, -float(place)) for place, piece in enumerate(pieces)], unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["</s>"])
    return library


def test_an_end_mark_in_a_text_is_text_even_to_a_model_that_knows_it_as_a_word(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write(tmp_path / "x.json", make_unigram()), [])
    assert tokenizer.end_of_text == 1
    ids = tokenizer.encode("a</s>\0b</s>").tolist()
    assert tokenizer.end_of_text not in ids
    assert decode(tokenizer, ids).replace(" ", "") == "a</s>\0b</s>"


def test_an_end_mark_that_the_file_calls_plain_is_none_in_a_text(tmp_path: Path) -> None:
    definition = make_definition()
    definition["added_tokens"][0]["special"] = False
    tokenizer = build_tokenizer(write(tmp_path / "x.json", definition), [])
    ids = tokenizer.encode(f"rain {SPECIAL} rain").tolist()
    assert tokenizer.end_of_text not in ids
    assert decode(tokenizer, ids) == f"rain {SPECIAL} rain"


def test_sentencepiece_like_text_comes_back_after_one_space(tmp_path: Path) -> None:
    words = ["<unk>", "</s>", "▁", "a", "b", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(
        {word: id_ for id_, word in enumerate(words)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True
    )
    library = Library(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(["</s>"])
    tokenizer = build_tokenizer(write(tmp_path / "x.json", library), [])
    ids = tokenizer.encode("ab a 漢🙂").tolist()
    assert decode(tokenizer, ids) == " ab a 漢🙂"
    assert b"".join(tokenizer.decode_bytes([token]) for token in ids) == tokenizer.decode_bytes(ids)


def test_wordpiece_words_come_back_with_spaces(tmp_path: Path) -> None:
    library = Library(models.WordPiece({"[UNK]": 0, "[SEP]": 1, "rain": 2, "##s": 3, "fall": 4}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.add_special_tokens(["[SEP]"])
    tokenizer = build_tokenizer(write(tmp_path / "x.json", library), [])
    assert decode(tokenizer, tokenizer.encode("rains fall").tolist()) == " rains fall"
    assert tokenizer.end_of_text not in tokenizer.encode("rain [SEP]")


def test_ids_of_a_large_vocabulary_take_four_bytes_and_lie_inside_it(tmp_path: Path) -> None:
    definition = make_definition()
    definition["added_tokens"].append(
        {**definition["added_tokens"][0], "id": 70_000, "content": "rain", "special": False}
    )
    definition["model"]["vocab"]["rain"] = 70_000
    tokenizer = build_tokenizer(write(tmp_path / "x.json", definition), [])
    ids = tokenizer.encode("the rain")
    assert ids.dtype == np.uint32
    assert ids.max() == 70_000
    assert tokenizer.vocab_size == 70_001
    assert tokenizer.decode_bytes([5_000, 70_000]) == b"rain"


def test_the_end_of_text_is_found_by_its_usual_names(tmp_path: Path) -> None:
    for mark in ("<|end_of_text|>", "</s>", "<eos>", "<|im_end|>"):
        library = Library(models.WordLevel({"<unk>": 0, "rain": 1}, unk_token="<unk>"))
        library.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
        library.add_special_tokens([AddedToken("<s>"), AddedToken(mark)])
        assert build_tokenizer(write(tmp_path / "x.json", library), []).end_of_text == 3


def test_a_file_without_an_end_of_text_token_says_what_to_add(tmp_path: Path) -> None:
    name = write(tmp_path / "x.json", make_definition(added_tokens=[]))
    with pytest.raises(UserError, match=r"no end-of-text token; add .*<\|endoftext\|>"):
        build_tokenizer(name, [])


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff\xfe", b'{"added_tokens": [7]}', b'{"model": {"type": "No"}}'])
def test_other_files_are_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"other\.json"):
        build_tokenizer(str(path), [])


def test_unknown_names_and_places_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer 'cl100k_bas' \(did you mean cl100k_base\?\)"):
        build_tokenizer("cl100k_bas", [])
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        build_tokenizer(str(tmp_path), [])
    with pytest.raises(UserError, match="name its encoding"):
        build_tokenizer("some.tiktoken", [])


def test_a_missing_library_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = train_definition()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'gptmill\[data\]'"):
        JsonTokenizer(definition)
