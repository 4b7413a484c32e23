"""Text from tokens as they come: whole characters only, up to the end of the document or a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal

from gptmill.data.tokenizers import Tokenizer

FinishReason = Literal["end_of_text", "stop", "length"]


class TextBuilder:
    """One text. It holds back unfinished characters, and what may be the beginning of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.text = ""
        self.tokens: list[int] = []
        """All sampled tokens, those of a stop string and of the end of the document included."""
        self.log_probs: list[float] = []
        self.finish_reason: FinishReason | None = None

    def add(self, token: int, log_prob: float | None = None) -> str:
        """Returns the text that is certain now; nothing once the text has ended."""
        if self.finish_reason is not None:
            return ""
        self.tokens.append(token)
        if log_prob is not None:
            self.log_probs.append(log_prob)
        if token == self._tokenizer.end_of_text:
            return self.finish("end_of_text")
        self._held += self._decoder.decode(self._tokenizer.decode_bytes([token]))
        return self._release(len(self._held) - self._count_held())

    def finish(self, reason: FinishReason = "length") -> str:
        """Ends the text; returns its rest."""
        if self.finish_reason is not None:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        released = self._release(len(self._held))
        self.finish_reason = self.finish_reason or reason
        return released

    def _release(self, count: int) -> str:
        """The first characters held back, cut where a stop string begins."""
        starts = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if starts:
            count, self.finish_reason = min(starts), "stop"
        released, self._held = self._held[:count], self._held[count:]
        self.text += released
        return released

    def _count_held(self) -> int:
        """The length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0)
        lengths = range(min(longest - 1, len(self._held)), 0, -1)
        ends = (length for length in lengths if any(stop.startswith(self._held[-length:]) for stop in self._stops))
        return next(ends, 0)
