"""The tokenizer.json of every tokenizer: Hugging Face's libraries give our ids, and give back the text."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from gptmill.config.errors import UserError
from gptmill.data.tokenizers import Tokenizer, build_tokenizer, openai
from gptmill.data.tokenizers.bpe_training import make_definition
from gptmill.data.tokenizers.byte import ByteTokenizer
from gptmill.data.tokenizers.char import CharTokenizer
from gptmill.data.tokenizers.gpt2_bpe import Gpt2Tokenizer
from gptmill.data.tokenizers.json_export import make_tokenizer_config, make_tokenizer_files, make_tokenizer_json
from gptmill.data.tokenizers.openai import ENCODINGS, OpenAiTokenizer
from gptmill.data.tokenizers.tiktoken_conversion import PROBES
from gptmill.data.tokenizers.tokenizer_json import JsonTokenizer

NAMES = ("byte", "char", "gpt2", *ENCODINGS, "own")
FRAGMENTS = [
    *("\n", "\r", "\r\n", " ", "   ", "\t", "\x00", "\x85", "\u00a0", "\u2028", "\u3000", "\u200d", "\u0301"),
    *("'s", "'LL", "'ve", "'ſ", "''", "the", "The", "THE", "ǅ", "ʰ", "ß", "İ", "é", "漢字", "한", "▁", "Ġ"),
    *(
        "1",
        "22",
        "333",
        "4444",
        "٣",
        "½",
        "!",
        "://",
        "...",
        "<|endoftext|>",
        "<|endofprompt|>",
        "<|fim",
        "🙂",
        "👩‍👧🏽",
    ),
]
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=12).map("".join)
# What the character tokenizer has seen; it encodes nothing else.
ALPHABET = "".join(sorted({*"".join(PROBES), *"".join(FRAGMENTS)}))


@cache
def list_tokens(count: int) -> dict[bytes, int]:
    gpt2 = Gpt2Tokenizer()
    return {gpt2.decode_bytes([rank]): rank for rank in range(count)}


@cache
def make_tokenizer(name: str) -> Tokenizer:
    if name == "char":
        return CharTokenizer(ALPHABET)
    if name == "own":
        return JsonTokenizer(make_definition(list_tokens(1500)))
    if name in ENCODINGS:  # with a part of GPT-2's ranks: OpenAI's files are too large to have here
        lines = [base64.b64encode(token) + b" %d" % rank for token, rank in list_tokens(3000).items()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(openai, "_read_ranks", lambda _: b"\n".join(lines))
            return OpenAiTokenizer(name)
    return build_tokenizer(name, [])


@cache
def make_files(name: str) -> dict[str, str]:
    return make_tokenizer_files(make_tokenizer(name), 64)


@cache
def load_hf_tokenizer(name: str) -> HfTokenizer:
    hf_tokenizer = HfTokenizer.from_str(make_files(name)["tokenizer.json"])
    hf_tokenizer.encode_special_tokens = True  # despite its name: encodes them as plain text
    return hf_tokenizer


def keep_known(name: str, text: str) -> str:
    return "".join(character for character in text if character in ALPHABET) if name == "char" else text


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXTS)
def test_tokenizers_gives_our_ids_and_the_text_back(name: str, text: str) -> None:
    text, tokenizer, hf_tokenizer = keep_known(name, text), make_tokenizer(name), load_hf_tokenizer(name)
    ids = tokenizer.encode(text).tolist()
    assert hf_tokenizer.encode(text).ids == ids
    assert hf_tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", NAMES)
def test_a_text_of_all_scripts_has_our_ids_and_the_vocabulary_ends_where_ours_does(name: str) -> None:
    tokenizer, hf_tokenizer = make_tokenizer(name), load_hf_tokenizer(name)
    for probe in PROBES:
        assert hf_tokenizer.encode(probe).ids == tokenizer.encode(probe).tolist()
    vocabulary = hf_tokenizer.get_vocab()
    assert max(vocabulary.values()) + 1 == tokenizer.vocab_size
    assert vocabulary["<|endoftext|>"] == tokenizer.end_of_text


@pytest.mark.parametrize("name", ["byte", "char", "gpt2"])
def test_autotokenizer_reads_the_folder_and_gives_our_ids(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = make_tokenizer(name)
    write(make_files(name), tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)

    @given(text=TEXTS)
    def check(text: str) -> None:
        text = keep_known(name, text)
        ids = tokenizer.encode(text).tolist()
        assert loaded(text, split_special_tokens=True)["input_ids"] == ids
        assert loaded.decode(ids) == text

    check()
    end = tokenizer.end_of_text
    assert loaded("<|endoftext|>")["input_ids"] == [end]
    assert (loaded.eos_token_id, loaded.bos_token_id, loaded.pad_token_id) == (end, end, end)
    assert (len(loaded), loaded.model_max_length) == (len(loaded.get_vocab()), 64)
    ids = tokenizer.encode("the").tolist()
    assert loaded.decode([end, *ids, end], skip_special_tokens=True) == "the"
    assert loaded(["the", "the the"], padding=True)["input_ids"][0][-len(ids) :] == ids


@pytest.mark.parametrize("name", ["byte", "char", "cl100k_base"])
def test_gptmill_itself_reads_the_folder_and_gives_the_same_ids(name: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(name)
    write(make_files(name), tmp_path)
    read = build_tokenizer(str(tmp_path), [])
    assert (read.vocab_size, read.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    text = "".join(FRAGMENTS)
    assert read.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert read.decode_bytes(read.encode(text).tolist()) == text.encode()


def test_an_unknown_character_is_an_error_as_with_the_character_tokenizer(tmp_path: Path) -> None:
    tokenizer = CharTokenizer("abc")
    with pytest.raises(Exception, match=r"Missing .* token from the vocabulary"):
        HfTokenizer.from_str(make_tokenizer_json(tokenizer)).encode("abd")
    write(make_tokenizer_files(tokenizer, 64), tmp_path)
    with pytest.raises(UserError, match="failed to encode a text"):
        build_tokenizer(str(tmp_path), []).encode("abd")


def test_a_definition_stays_as_it_was_but_adds_no_tokens_to_a_text() -> None:
    definition = json.loads(make_definition(list_tokens(300)))
    tokenizer = JsonTokenizer(json.dumps(definition))
    assert json.loads(make_tokenizer_json(tokenizer)) == definition
    end = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [end, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [300], "tokens": ["<|endoftext|>"]}},
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    for processor, expected in (
        (template, None),
        (byte_level, byte_level),
        ({"type": "Sequence", "processors": [byte_level, template]}, {"type": "Sequence", "processors": [byte_level]}),
        ({"type": "Sequence", "processors": [template]}, None),
    ):
        tokenizer.definition = json.dumps({**definition, "post_processor": processor})
        exported = make_tokenizer_json(tokenizer)
        assert json.loads(exported)["post_processor"] == expected
        assert HfTokenizer.from_str(exported).encode("the end").ids == tokenizer.encode("the end").tolist()


def test_the_end_of_text_token_of_a_definition_keeps_its_name() -> None:
    definition: dict[str, Any] = json.loads(make_definition(list_tokens(300)))
    definition["added_tokens"][0]["content"] = "</s>"
    config = make_tokenizer_config(JsonTokenizer(json.dumps(definition)), 64)
    assert config["eos_token"] == config["bos_token"] == "</s>"


def test_a_plug_in_s_tokenizer_is_refused_even_if_it_derives_from_a_built_in_one() -> None:
    class Reversed(ByteTokenizer):
        name = "reversed"

    with pytest.raises(UserError, match=r"reversed is a plug-in's, which no tokenizer\.json can describe"):
        make_tokenizer_json(Reversed())


def write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
