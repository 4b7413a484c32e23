"""The report as a page, Markdown and JSON: well-formed, self-contained, and safe whatever a run wrote."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reporting_events import make_events, make_start, make_step, write_run

from gptmill.config.errors import UserError
from gptmill.config.report_request import ReportFormat, ReportRequest
from gptmill.runs.events import EvalDone, Event, SampleDrawn
from gptmill.runs.reporting.facts import collect_facts
from gptmill.runs.reporting.svg import Axis, make_axis
from gptmill.runs.reporting.writing import make_report, render

VOID = {"meta", "br", "hr", "img", "input", "link"}
FORMATS: tuple[ReportFormat, ...] = ("html", "md", "json")
HOSTILE = "</pre><script>alert(1)</script>\x1b[31m\u202eevil\x00\ud800 | `````` <img src=//evil.example/x onerror=a()>"


class Checker(HTMLParser):
    """Checks that tags nest, and collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_page(text: str) -> Checker:
    """Asserts that a page is well-formed, runs nothing and loads nothing."""
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    assert not checker.tags & {"script", "link", "iframe", "object", "embed", "img", "base", "form"}
    assert not [name for name, _ in checker.attributes if name.startswith("on") or name in ("src", "href", "style")]
    assert not re.search(r"@import|url\((?!#)|https?:", text)
    assert "nan" not in re.findall(r'(?:d|x|y|cx|cy|points)="[^"]*"', text)
    assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', text)
    return checker


def write_page(folder: Path, events: list[Event], to: ReportFormat = "html", **options: object) -> str:
    run = write_run(folder, events)
    return make_report([str(run.path)], replace(ReportRequest(format=to, out="-"), **options)).text  # type: ignore[arg-type]


def test_the_page_has_every_part(tmp_path: Path) -> None:
    text = check_page(write_page(tmp_path, make_events())).text
    for part in ("Loss", "Phases", "Timeline", "Speed", "Curves", "What the model wrote", "Incidents", "Cost"):
        assert part in text
    assert "fell from 10.0000 to 1.2000 (−88.0 %)" in text
    assert "90 % of the gain was reached by step 60, after 2 min 0 s." in text
    assert "Stopping there would have saved 40.0 s and $0.078, 20 % of the training time." in text
    assert "token embedding" in text
    assert "max_lr" in text
    assert "upon step 40" in text


@pytest.mark.parametrize("axes", ["linear", "log"])
@pytest.mark.parametrize(
    "events",
    [
        [],
        [make_start()],
        [make_start(), make_step(1)],
        [make_step(1)],
        [make_start(), make_step(1, loss=math.nan, grad_norm=math.inf), EvalDone(1, math.nan, 1, 0.0)],
        [make_start(), *(make_step(step, loss=0.0, lr=0.0, grad_norm=0.0) for step in (1, 2, 3))],
        [make_start(), *(make_step(step, loss=10.0 ** (30 * (step == 5))) for step in range(1, 9))],
        [replace(make_start(), config={}, parts={}), *(make_step(step, mfu=None) for step in (1, 2))],
        [make_start(), SampleDrawn(0, "", "")],
    ],
    ids=["empty", "started", "one step", "no start", "NaN", "zeros", "huge", "old", "sample"],
)
def test_every_run_gets_a_report(tmp_path: Path, events: list[Event], axes: str) -> None:
    facts = collect_facts(write_run(tmp_path, events), None)
    for to in FORMATS:
        text = render([facts], to, is_log=axes == "log")
        if to == "html":
            check_page(text)
        elif to == "json":
            json.loads(text, parse_constant=pytest.fail)


def test_telemetry_is_drawn_and_names_a_bound(tmp_path: Path) -> None:
    steps = [make_step(step, telemetry={"gpu_utilization": 0.5, "gpu_power_watts": 300.0}) for step in (1, 2, 3)]
    text = check_page(write_page(tmp_path, [make_start(), *steps])).text
    assert "GPU utilisation" in text
    assert "The host bounds it: the GPU was busy 50 % of the time" in text
    assert "Its GPUs on the machine of rank 0 used 0.5 Wh of energy, at a mean power of 300 W." in text


def test_what_an_old_run_lacks_is_said(tmp_path: Path) -> None:
    events = [replace(make_start(), config={}, parts={}), *make_events()[1:]]
    text = write_page(tmp_path, events)
    assert "The options were not recorded" in text
    assert "1,000,000 in all; how many each part has was not recorded." in text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    bad = HOSTILE.replace("\ud800", "")  # which a line of UTF-8 has escaped only
    events = [make_start(corpus=bad, device=bad, config={bad: bad}, parts={bad: 1.0})]
    run = write_run(tmp_path, [*events, *make_events()[1:]])
    line = json.dumps({"event": "SampleDrawn", "step": 100, "time": 1e6, "prompt": HOSTILE, "text": HOSTILE})
    with run.events.open("a") as file:
        file.write(line + "\n")
    facts = collect_facts(run, None)
    page = render([facts], "html")
    assert "alert(1)" in check_page(page).text
    for text in (page, render([facts], "md")):
        assert not re.search("[\x00\x1b\u202e\ud800]", text)
        text.encode()
    markdown = render([facts], "md")
    outside = re.sub(r"^(`{3,})text\n.*?\n\1$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    assert "<script" not in outside.replace("\\<", "")
    assert json.loads(render([facts], "json"))["runs"][0]["samples"][-1]["text"] == HOSTILE


def test_several_runs_are_told_apart_without_colour(tmp_path: Path) -> None:
    one = write_run(tmp_path, make_events(), "one")
    other = [make_start(config={"seed": "8", "max_lr": "0.001"}), *make_events()[1:]]
    two = write_run(tmp_path, [replace(e, val_loss=9.0) if isinstance(e, EvalDone) else e for e in other], "two")
    facts = [collect_facts(run, None) for run in (one, two)]
    page = render(facts, "html")
    text = check_page(page).text
    assert "one has the lowest loss, 1.0000 at step 80" in text
    assert '<path class="line s1"' in page
    assert ".line.s1{stroke:var(--c1);stroke-dasharray:7 3}" in page
    assert "| seed | 7 | 8 |" in render(facts, "md")
    assert "max\\_lr" not in render(facts, "md")
    assert json.loads(render(facts, "json"))["differences"]["seed"] == ["7", "8"]
    assert len(json.loads(render([*facts] * 4, "json"))["runs"]) == 8
    check_page(render([*facts] * 4, "html"))


def test_json_has_the_numbers(tmp_path: Path) -> None:
    run = json.loads(write_page(tmp_path, make_events(), "json"))["runs"][0]
    assert run["learning"]["most"]["step"] == 60
    assert run["cost"]["price_per_hour"] == 3.5
    assert [phase["name"] for phase in run["phases"]] == ["warm-up", "main", "decay"]
    assert len(run["curves"]["loss"]["step"]) == 100
    assert run["parameters_by_part"]["blocks"] == 750_000


def test_markdown_draws_the_loss(tmp_path: Path) -> None:
    text = write_page(tmp_path, make_events(), "md")
    assert text.startswith("<!-- gptmill report -->\n")
    assert "⠉" in text or "⠒" in text
    assert "| **80** | **1.0000** |" in text


def test_html_goes_to_the_run_and_only_a_report_is_overwritten(tmp_path: Path) -> None:
    run = write_run(tmp_path, make_events())
    request = ReportRequest()
    assert make_report([str(run.path)], request).path == run.path / "report.html"
    for out in ("a.html", "a.md", "a.json"):
        path = tmp_path / out
        to: ReportFormat = path.suffix.removeprefix(".")  # type: ignore[assignment]
        for _ in range(2):
            make_report([str(run.path)], ReportRequest(format=to, out=str(path)))
    mine = tmp_path / "thesis.md"
    mine.write_text("mine")
    with pytest.raises(UserError, match="is not a gptmill report"):
        make_report([str(run.path)], ReportRequest(format="md", out=str(mine)))
    assert mine.read_text() == "mine"
    for out, says in ((str(tmp_path), "is a folder"), (str(tmp_path / "no/a.md"), "does not exist")):
        with pytest.raises(UserError, match=says):
            make_report([str(run.path)], ReportRequest(format="md", out=out))
    with pytest.raises(UserError, match="is negative"):
        make_report([str(run.path)], ReportRequest(price_per_hour=-1.0))
    assert not list(tmp_path.rglob("*.partial"))


def test_ticks_are_round_and_few() -> None:
    assert Axis(0, 900).list_ticks(4) == [0, 200, 400, 600, 800]
    assert Axis(1.62, 4.3).list_ticks(5) == [2.0, 2.5, 3.0, 3.5, 4.0]
    assert Axis(1, 1000, is_log=True).list_ticks(4) == [1, 10, 100, 1000]
    for values in ([0.0], [5.0, 5.0], [-1.0, 1.0], [1e-30, 1e30], [0.0, 1e-12]):
        for is_log in (False, True):
            axis = make_axis(values, str, is_log=is_log)
            assert len(axis.list_ticks(4)) < 20
            assert all(math.isfinite(axis.place(value)) for value in values)


def test_the_raw_curve_shows_a_spike_that_the_smooth_one_hides(tmp_path: Path) -> None:
    steps = [make_step(step, loss=4.0 if step == 1500 else 3.0) for step in range(1, 2501)]
    page = write_page(tmp_path, [make_start(max_steps=2500), *steps])
    band = re.findall(r'class="band s0" d="M([^"]+)"', page)[0]
    heights = [float(point.split(",")[1]) for point in band.split("L")]
    assert min(heights) < 0.3 * max(heights)
    assert len(page) < 400_000


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium to look at the page")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, make_events())
    path = make_report([str(run.path)], ReportRequest()).path
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    command = ["chromium", *flags.split(), "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}"]
    process = subprocess.run(
        [*command, "--dump-dom", f"file://{path}"], capture_output=True, text=True, timeout=100, check=True
    )
    assert process.stdout.count("<svg") == process.stdout.count("</svg>") == 6
    assert "Content Security Policy" not in process.stderr
