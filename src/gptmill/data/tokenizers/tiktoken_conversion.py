"""Converts a byte-level tokenizer.json to tiktoken, five times as fast as Hugging Face's library, if both agree.

The merges are proven equal. tiktoken merges any two adjacent tokens whose concatenation is a token, lowest id first;
Hugging Face merges the pairs of its merge list, in the order of the list. Assume that (1) the list is sorted by the ids
of its results, (2) every token is produced before it is merged further, and (3) Hugging Face turns the bytes of every
token into that token. Consider the first merge at which the two would differ: adjacent x, y that form the token t,
which the merge list forms from another pair l, r. All pairs of lower rank are merged by then, none across the outer
ends of x and y, so Hugging Face, given the bytes of t alone, arrives at x, y at that rank. By (3) it forms t there,
hence from l, r: the two pairs are the same.

The pre-tokenizer is a regular expression, which two engines interpret; they are compared on a text of all scripts.
"""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from gptmill.data.tokenizers.byte_level import BYTE_TO_CHAR, decode_byte_level, encode_byte_level
from gptmill.data.tokenizers.gpt2_bpe import WORD_PATTERN
from gptmill.data.tokenizers.tiktoken_bpe import TiktokenBpe

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HfTokenizer

SCRIPTS = [*range(0x250), *range(0x250, 0x3100, 4), *range(0x2000, 0x2070), *range(0x3000, 0x3010), 0xFEFF, 0xFFFD]
SCRIPTS += [*range(0x4E00, 0x10000, 97), *range(0x10000, 0x1F300, 97), *range(0x1F300, 0x1F700, 7)]
PROBES = (
    "I'll say it's what WE'VE DON'T you'd, they're 'tis 'S 'ſ x's' ''s\n",
    "0 12 345 6789 1234567890 3.14 1,000,000 ½ ² ٣٤٥٦ ४५६७ Ⅷ a1b22c333d4444\n",
    "a b  c   d    e\tf\t\tg\nh\n\ni\r\nj\r\n\r\nk \n l  \n\n  m\n \n\t\n n\u00a0o\u3000p\u2028q\u2029r\u0085s\u200bt",
    "def f(x):\n    return {'a': [x**2, -1]}  # ok?!\n\n\n\tif x != y: <|endoftext|> </s> [SEP] ...-->===\n",
    "naïve Ärger e\u0301a\u0308 СЪЕШЬ ещё Ελληνικά हिन्दी ไทย العربية עברית 漢字かな交じり文 한국어 🙂👩‍👩‍👧🏽",
    "CamelCaseWords snake_case_words http://example.org/?a=b&c=d#e user@example.org\n" + "=" * 90 + " " * 90,
    *("", " ", "\n", "trailing   ", "trailing\n\n "),
    "".join(f"{chr(p)}'s {chr(p)}{chr(p)}1 \n{chr(p)}a." for p in SCRIPTS if not 0xD800 <= p < 0xE000),
)
NO_SPLIT = r"[\s\S]+"
EMPTY_MODEL = '{"type": "BPE", "vocab": {}, "merges": []}'


def convert_to_tiktoken(definition: dict[str, Any], hf_tokenizer: HfTokenizer) -> TiktokenBpe | None:
    """Returns the same tokenizer as tiktoken runs it, or None if the two cannot be shown to be equal."""
    pattern = _find_pattern(definition)
    ranks = _find_ranks(definition) if pattern else None
    if pattern is None or ranks is None or not _forms_every_token(definition, ranks):
        return None
    try:
        bpe = TiktokenBpe(pattern, ranks, {})
        is_equal = _splits_equally(pattern, json.dumps(definition["pre_tokenizer"])) and all(
            hf_tokenizer.encode(probe, add_special_tokens=False).ids == bpe.encode(probe).tolist() for probe in PROBES
        )
    except BaseException as error:  # one of the two cannot parse the pattern, or exceeds its backtracking limit
        if not is_library_error(error):
            raise
        return None
    return bpe if is_equal else None


def is_library_error(error: BaseException) -> bool:
    """Whether a library failed, as opposed to an interrupt by the user; a Rust panic is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _find_pattern(definition: dict[str, Any]) -> str | None:
    """Returns the pre-tokenizer pattern, or None if anything else happens to a text before the merges."""
    special_only = all(token["special"] for token in definition.get("added_tokens") or [])
    if definition.get("normalizer") is not None or not special_only:
        return None
    match definition.get("pre_tokenizer"):
        case {"type": "ByteLevel", "add_prefix_space": False, **rest} if rest.get("use_regex", True):
            return WORD_PATTERN
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return None


def _find_ranks(definition: dict[str, Any]) -> dict[bytes, int] | None:
    """Returns the rank table, or None unless merges are in the order of their ids, each after those that it uses."""
    model = definition["model"]
    unsupported = "dropout continuing_subword_prefix end_of_word_suffix byte_fallback".split()
    if model.get("type") != "BPE" or any(model.get(name) for name in unsupported):
        return None
    vocabulary = model["vocab"]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merged = {"".join(merge): index for index, merge in enumerate(merges)}
    tokens = [*BYTE_TO_CHAR.values(), *merged]
    special = {token["content"] for token in definition.get("added_tokens") or []}
    if model.get("ignore_merges") and not set(vocabulary) - special <= set(tokens):
        return None  # tokens that no merge forms
    if any(merged.get(part, -1) >= index for index, merge in enumerate(merges) for part in merge):
        return None
    try:
        if len(merged) < len(merges) or any(vocabulary[one] >= vocabulary[next_] for one, next_ in pairwise(merged)):
            return None
        return {decode_byte_level(token): vocabulary[token] for token in tokens}
    except KeyError:  # a byte without an id, or a token outside the byte-level alphabet
        return None


def _forms_every_token(definition: dict[str, Any], ranks: dict[bytes, int]) -> bool:
    """Whether Hugging Face's merges turn the bytes of every token into that token."""
    from tokenizers import Tokenizer as HfTokenizer

    by_merges_only = json.dumps({**definition, "model": {**definition["model"], "ignore_merges": False}})
    model = HfTokenizer.from_str(by_merges_only).model
    words = {rank: encode_byte_level(token) for token, rank in ranks.items()}
    return all([token.id for token in model.tokenize(word)] == [rank] for rank, word in words.items())


@cache
def _splits_equally(pattern: str, pre_tokenizer: str) -> bool:
    """Whether tiktoken splits the probes where Hugging Face's pre-tokenizer does.

    tiktoken does not expose where it splits. So every pair of bytes is made a token, in random order: a different split
    forbids or allows a merge there, which changes the ids of some probe.
    """
    from tokenizers import Tokenizer as HfTokenizer

    splitter = HfTokenizer.from_str(f'{{"version": "1.0", "pre_tokenizer": {pre_tokenizer}, "model": {EMPTY_MODEL}}}')
    every_pair = [bytes(pair) for pair in product(range(256), repeat=2)]
    random.Random(0).shuffle(every_pair)
    ranks = {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *every_pair])}
    split, unsplit = TiktokenBpe(pattern, ranks, {}), TiktokenBpe(NO_SPLIT, ranks, {})
    for probe in PROBES:
        pieces = [decode_byte_level(piece).decode() for piece, _ in splitter.pre_tokenizer.pre_tokenize_str(probe)]
        expected = [id_ for piece in pieces for id_ in unsplit.encode(piece).tolist()]
        if split.encode(probe).tolist() != expected:
            return False
    return True
