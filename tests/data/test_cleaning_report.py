"""The cleaning report: counts, examples and JSON."""

from __future__ import annotations

import json

from gptmill.data.cleaning import CleaningReport, Drop


def make_report() -> CleaningReport:
    report = CleaningReport()
    for number in range(5):
        report.add_dropped(Drop("min_chars"), f"no. {number}\n\tis \x1b[2J short " + "x" * 1000, 1100)
    report.add_dropped(Drop("languages"), "\u202eGuten Tag", 1_234_567)
    report.add_repaired(3)
    return report


def test_a_report_counts_by_filter_and_shows_a_few_examples_on_one_line_each() -> None:
    lines = make_report().describe()
    assert "repaired 3 documents" in lines
    (head,) = [line for line in lines if "min_chars" in line]
    assert "5 documents" in head
    assert "5,500 bytes" in head
    assert [line.split()[1] for line in lines if line.startswith("  no.")] == ["0", "1", "2"]
    assert all(len(line) <= 82 and line.isprintable() for line in lines if line.startswith("  "))
    assert any("1 document," in line and "1,234,567 bytes" in line and "languages" in line for line in lines)


def test_a_report_survives_json() -> None:
    report = make_report()
    restored = CleaningReport.from_json(json.loads(json.dumps(report.to_json())))
    assert restored == report
    restored.add_dropped(Drop("min_chars"), "another", 1)
    assert restored.dropped["min_chars"].documents == 6
    assert len(restored.dropped["min_chars"].examples) == 3


def test_where_nothing_was_done_nothing_is_reported() -> None:
    assert CleaningReport().describe() == []
    assert CleaningReport.from_json(CleaningReport().to_json()) == CleaningReport()
