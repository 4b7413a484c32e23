"""A byte-level tokenizer.json as a table for tiktoken, five times as fast as its own library, where both agree.

The merges are proven equal. tiktoken joins any two neighbours whose bytes are a token, lowest id first; the library
joins the pairs in its list, first in the list first. Let the list be in the order of its results' ids, let it make
tokens before it joins them, and let the library make every token from that token's own bytes. Take the first join on
which the two would part: neighbours x, y that make the token t, which the library makes of another pair l, r. Every
pair of a lower rank is joined by then and none across the outer ends of x and y, so the library, given the bytes of t
alone, stands at x, y at that rank. But it makes t there, so it stands at l, r: the two are one.

How text is split is a regular expression, which two engines read; they are compared on a text of all scripts.
"""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from gptmill.data.tokenizers.byte_level import SPELLING, unspell
from gptmill.data.tokenizers.byte_pairs import BytePairs
from gptmill.data.tokenizers.gpt2_bpe import WORD_PATTERN

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

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
WHOLE = r"[\s\S]+"
NO_MODEL = '{"type": "BPE", "vocab": {}, "merges": []}'


def make_byte_pairs(definition: dict[str, Any], library: Library) -> BytePairs | None:
    """The same tokenizer through tiktoken, or None where that cannot be shown."""
    pattern = _find_pattern(definition)
    ranks = _find_ranks(definition) if pattern else None
    if pattern is None or ranks is None or not _makes_every_token(definition, ranks):
        return None
    try:
        pairs = BytePairs(pattern, ranks, {})
        same = _splits_alike(pattern, json.dumps(definition["pre_tokenizer"])) and all(
            library.encode(probe, add_special_tokens=False).ids == pairs.encode(probe).tolist() for probe in PROBES
        )
    except BaseException as error:  # a pattern that one of the two cannot read, or takes for ever to
        if not is_failure(error):
            raise
        return None
    return pairs if same else None


def is_failure(error: BaseException) -> bool:
    """Whether a library failed, rather than the user stopped it; where Rust panics, that is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _find_pattern(definition: dict[str, Any]) -> str | None:
    """The split pattern, if splitting by it is all that happens to a text before the merges."""
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
    """Token bytes by id, if the merges stand in the order of the ids that they make, each after those that it joins."""
    model = definition["model"]
    unusual = "dropout continuing_subword_prefix end_of_word_suffix byte_fallback".split()
    if model.get("type") != "BPE" or any(model.get(name) for name in unusual):
        return None
    vocabulary = model["vocab"]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    made = {"".join(merge): place for place, merge in enumerate(merges)}
    tokens = [*SPELLING.values(), *made]
    special = {token["content"] for token in definition.get("added_tokens") or []}
    if model.get("ignore_merges") and not set(vocabulary) - special <= set(tokens):
        return None  # words that no merge makes
    if any(made.get(part, -1) >= place for place, merge in enumerate(merges) for part in merge):
        return None
    try:
        if len(made) < len(merges) or any(vocabulary[one] >= vocabulary[next_] for one, next_ in pairwise(made)):
            return None
        return {unspell(token): vocabulary[token] for token in tokens}
    except KeyError:  # a byte without an id, or a token that spells no bytes
        return None


def _makes_every_token(definition: dict[str, Any], ranks: dict[bytes, int]) -> bool:
    """Whether the library's merges turn the bytes of every token into that token."""
    from tokenizers import Tokenizer as Library

    by_merges_only = json.dumps({**definition, "model": {**definition["model"], "ignore_merges": False}})
    model = Library.from_str(by_merges_only).model
    spelt = {rank: "".join(SPELLING[byte] for byte in token) for token, rank in ranks.items()}
    return all([token.id for token in model.tokenize(word)] == [rank] for rank, word in spelt.items())


@cache
def _splits_alike(pattern: str, pre_tokenizer: str) -> bool:
    """Whether tiktoken splits the probes where the library's pre-tokenizer does.

    tiktoken does not show where it splits. So every two bytes are made a token, in an order drawn by lot: a split in
    another place forbids or allows a pair there, and the ids of one probe or another tell.
    """
    from tokenizers import Tokenizer as Library

    splitter = Library.from_str(f'{{"version": "1.0", "pre_tokenizer": {pre_tokenizer}, "model": {NO_MODEL}}}')
    every_pair = [bytes(pair) for pair in product(range(256), repeat=2)]
    random.Random(0).shuffle(every_pair)
    ranks = {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *every_pair])}
    by_pattern, whole = BytePairs(pattern, ranks, {}), BytePairs(WHOLE, ranks, {})
    for probe in PROBES:
        pieces = [unspell(piece).decode() for piece, _ in splitter.pre_tokenizer.pre_tokenize_str(probe)]
        expected = [id_ for piece in pieces for id_ in whole.encode(piece).tolist()]
        if by_pattern.encode(probe).tolist() != expected:
            return False
    return True
