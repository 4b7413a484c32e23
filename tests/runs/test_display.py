"""Text for eyes: every tracker and terminal shows it, and what a run keeps stays as drawn."""

from __future__ import annotations

from html import escape
from pathlib import Path

import markdown
import pytest
from conftest import make_environment
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from zygote import Zygote

from gptmill.config.run import RunConfig, TrackingConfig
from gptmill.runs.directory import create_run
from gptmill.runs.display import make_plain, make_writable
from gptmill.runs.event_log import read_events
from gptmill.runs.events import SampleDrawn
from gptmill.runs.reporting.terminal_report import make_report
from gptmill.runs.trackers import open_trackers
from gptmill.runs.trackers.tensorboard import TensorBoard

DRAWN = "“It’s”\u00a0— he\u200b said… ﬁne\ufffd é 中 Я\n\n* <b>not bold</b>\n  indented\x1b[2J"
SHOWN = '"It\'s" -- he said... fine· é 中 Я\n\n* <b>not bold</b>\n  indented·[2J'


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("‘a’ “b” „c“ «d»", '\'a\' "b" "c" "d"'),
        ("1–2, x‑y, −5, a—b", "1-2, x-y, -5, a--b"),
        ("wait…", "wait..."),
        ("a\u00a0b\u2003c\u3000d\u202fe", "a b c d e"),
        ("a\u200bb\u200dc\ufeffd\u00ade", "abcde"),
        ("• one ‣ two", "* one * two"),
        ("ﬁre ﬂow oﬃce", "fire flow office"),
        ("a\x1b[2Jb\rc\x07d\x00e\u2028f\x9bg\u202eh\ud800i\ufffdj", "a·[2Jb·c·d·e·f·g·h·i·j"),
        ("line\r\nline\n\ttab", "line\nline\n\ttab"),
        ("é e\u0301 ß 中文 Я हिन्दी 😀 ½ ™ ×", "é e\u0301 ß 中文 Я हिन्दी 😀 ½ ™ ×"),
        ("", ""),
    ],
)
def test_typography_becomes_plain_and_letters_stay(text: str, plain: str) -> None:
    assert make_plain(text) == plain
    assert make_plain(plain) == plain


@pytest.mark.parametrize(
    ("text", "encoding", "plain"),
    [
        ("“é” e\u0301 ñ Å ﬁ ß", "ascii", '"e" e n A fi ss'),
        ("中 Я 😀 한", "ascii", "? ? ? ?"),
        ("½ ™ ² ①", "ascii", "1/2 TM 2 1"),
        ("a\x00b ──", "ascii", "a.b --"),
        ("“é” ő Я", "latin-1", '"é" o ?'),
        ("Я é", "cp1251", "Я e"),
    ],
)
def test_what_an_encoding_lacks_is_spelt_without_accents_or_replaced(text: str, encoding: str, plain: str) -> None:
    assert make_plain(text, encoding) == plain
    plain.encode(encoding)


@pytest.mark.slow
def test_every_character_can_be_shown_in_every_encoding() -> None:
    """Each of the first 12,288, which every rule concerns, and one in 17 of the rest."""
    everything = "".join(map(chr, [*range(0x3000), *range(0x3000, 0x30000, 17)]))
    for encoding in ("ascii", "latin-1", "cp437", "utf-8"):
        plain = make_plain(everything, encoding)
        plain.encode(encoding)
        assert not {chr(code) for code in range(32)} & set(plain) - {"\n", "\t"}


def test_text_is_written_untouched_where_the_stream_can_hold_it() -> None:
    assert make_writable(DRAWN, "utf-8") == DRAWN
    assert make_writable(DRAWN, None) == DRAWN
    assert make_writable("plain\x1b", "ascii") == "plain\x1b"
    assert make_writable("“é”", "ascii") == '"e"'
    assert make_writable("“é”", "cp1252") == "“é”"


def test_a_run_keeps_its_samples_as_drawn_and_shows_them_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run(str(tmp_path), "shown", RunConfig())
    with open_trackers(run, TrackingConfig(use_tensorboard=True), 0) as trackers:
        trackers.track(SampleDrawn(1, "", DRAWN))
    assert capsys.readouterr().err == ""
    (event,) = read_events(run.events)
    assert isinstance(event, SampleDrawn)
    assert event.text == DRAWN
    (sample,) = run.samples.iterdir()
    assert sample.read_bytes().decode() == DRAWN + "\n"
    assert SHOWN in make_report(run)
    assert '"It\'s" -- he said... fine. e ? ?\n' in make_report(run, "ascii")


def test_tensorboard_shows_a_sample_line_by_line_and_not_as_markdown(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path, 0)
    tracker.track(SampleDrawn(7, "", DRAWN))
    tracker.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    (entry,) = accumulator.Tensors("sample")
    html = markdown.markdown(entry.tensor_proto.string_val[0].decode(), extensions=["markdown.extensions.tables"])
    assert entry.step == 7
    assert html == f"<pre><code>{escape(SHOWN, quote=False)}\n</code></pre>"


# The verb itself with a stand-in for the model: text that comes in pieces cut inside characters.
SAMPLING = """
import sys
from gptmill.cli import sample
from gptmill.config.sample_request import SampleRequest
from gptmill.inference import sampling
from gptmill.inference.readback import SampledTokens
from gptmill.inference.text_generation import TextBatch

class Tokenizer:
    end_of_text = -1

    def decode_bytes(self, ids):
        return bytes(ids)

class Generator:
    def generate(self, prompts, count, seeds):
        for byte in "“é” 中…\\x07".encode():
            yield SampledTokens([byte] * len(prompts), None)

class Sampler:
    model, prompts, request = None, ["Å "], SampleRequest(num_samples=2)

    def start_batches(self):
        prompts = ["Å "] * 2
        yield sampling.PromptedBatch(TextBatch(Generator(), Tokenizer(), SampleRequest(), prompts, [1, 2]), prompts, [])

sample.warn_of_long_prompts = lambda sampler: None
sampling.open_sampler = lambda run, request: Sampler()
sys.exit(sample.run(["run", "--prompt", "Å ", "--num_samples", "2"]))
"""


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("utf-8", "Å “é” 中…\x07\n\n" + "─" * 72 + "\nÅ “é” 中…\x07\n"),
        ("ascii", 'A "e" ?...\x07\n\n' + "-" * 72 + '\nA "e" ?...\x07\n'),
        ("cp1252", "Å “é” ?…\x07\n\n" + "-" * 72 + "\nÅ “é” ?…\x07\n"),
    ],
    ids=["utf-8", "ascii", "cp1252"],
)
def test_samples_are_printed_untouched_or_as_the_output_can_hold_them(
    encoding: str, expected: str, tmp_path: Path, zygote: Zygote
) -> None:
    environment = make_environment(PYTHONIOENCODING=encoding)
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        process = zygote.run(["-c", SAMPLING], tmp_path, environment, stdout=file)
    assert process.returncode == 0, process.stderr
    assert output.read_bytes().decode(encoding) == expected
