"""Events as TensorBoard's protocol buffers. Needs neither torch nor TensorFlow.

The library is imported where it is used: few runs need it, and every program imports the trackers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from gptmill.runs.display import make_plain
from gptmill.runs.events import (
    EVALUATIONS,
    Event,
    HistogramsTaken,
    RolledBack,
    RunFinished,
    RunStarted,
    SampleDrawn,
    StepLogged,
    Warned,
)
from gptmill.runs.histogram_buckets import EDGES, trim
from gptmill.runs.trackers.metric_names import FINAL_METRICS, describe_incident, list_scalars, stack_histograms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from tensorboard.compat.proto.event_pb2 import Event as Record
    from tensorboard.compat.proto.summary_pb2 import Summary


BUCKET_LIMIT, BUCKET = 6, 7  # fields of HistogramProto
LENGTH_DELIMITED = 2
SHOWN_EVENTS = (*EVALUATIONS, StepLogged, HistogramsTaken, Warned, RolledBack, RunStarted, RunFinished)


def list_records(event: Event) -> list[Record]:
    """Returns what an event adds to TensorBoard's files; nothing for events that it does not show."""
    from tensorboard.compat.proto.event_pb2 import Event as Record

    return [Record(wall_time=event.time, step=event.step, summary=summary) for summary in _list_summaries(event)]


def make_header() -> Record:
    """Returns the first record of every file."""
    from tensorboard.compat.proto.event_pb2 import Event as Record

    return Record(wall_time=time.time(), file_version="brain.Event:2")


def make_purge(step: int) -> Record:
    """Returns the record that makes TensorBoard discard this step and later ones of the files before."""
    from tensorboard.compat.proto.event_pb2 import Event as Record
    from tensorboard.compat.proto.event_pb2 import SessionLog

    return Record(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))


def _list_summaries(event: Event) -> list[Summary]:
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in list_scalars(event).items()]
    summary = Summary(value=values)
    if isinstance(event, HistogramsTaken):
        _add_histograms(summary, event)
    return [*([summary] if summary.value else []), *_list_texts(event), *_list_hparams(event)]


def _list_texts(event: Event) -> Iterator[Summary]:
    from tensorboard.plugins.text.summary_v2 import text_pb

    if isinstance(event, SampleDrawn):
        yield text_pb("sample", _make_sample_blocks(event))
    elif isinstance(event, RunStarted) and event.config:
        yield text_pb("config", _make_table(event.config))
    elif incident := describe_incident(event):
        yield text_pb("incidents", make_plain(incident))


def _list_hparams(event: Event) -> Iterator[Summary]:
    """The HParams tab: the options of the run beside its newest metrics."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2
    from tensorboard.plugins.hparams.summary_v2 import Metric, hparams_config_pb, hparams_pb

    if isinstance(event, RunStarted) and event.config:
        yield hparams_config_pb(hparams=[], metrics=[Metric(name) for name in FINAL_METRICS])
        options = {name: _parse_number(value) for name, value in event.config.items()}
        yield hparams_pb(options, trial_id=event.run, start_time_secs=event.time)
    elif isinstance(event, RunFinished):
        end = plugin_data_pb2.SessionEndInfo(status=_find_status(event.reason), end_time_secs=event.time)
        data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
        content = metadata.create_summary_metadata(data)
        yield Summary(value=[Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=content)])


def _find_status(reason: str) -> int:
    from tensorboard.plugins.hparams import api_pb2

    is_success = reason.startswith(("finished", "stopped early"))
    status: int = api_pb2.STATUS_SUCCESS if is_success else api_pb2.STATUS_FAILURE
    return status


def _parse_number(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def _add_histograms(summary: Summary, event: HistogramsTaken) -> None:
    names, rows = stack_histograms(event)
    middles = (EDGES[:-1] + EDGES[1:]) / 2
    totals, sums, squares = (side.tolist() for side in (rows.sum(axis=1), rows @ middles, rows @ middles**2))
    for index, (counts, edges) in enumerate(trim(rows)):
        value = summary.value.add(tag=names[index])
        value.histo.num, value.histo.sum, value.histo.sum_squares = totals[index], sums[index], squares[index]
        if len(edges):
            value.histo.min, value.histo.max = edges[0], edges[-1]
        value.histo.MergeFromString(_pack(BUCKET_LIMIT, edges[1:]) + _pack(BUCKET, counts))


def _pack(field: int, numbers: NDArray[Any]) -> bytes:
    """Returns a repeated field of doubles as Protocol Buffers encode it: ten times as fast as number by number."""
    data = numbers.astype("<f8").tobytes()
    return bytes((field << 3 | LENGTH_DELIMITED, len(data) & 0x7F | 0x80, len(data) >> 7)) + data


def _make_sample_blocks(event: SampleDrawn) -> str:
    """Returns each sample as a block, under its name if there are several."""
    if not event.more_texts:
        return _make_block(event.prompt + event.text)
    blocks = (f"{name}\n\n{_make_block(event.prompt + text)}" for name, text in event.texts.items())
    return "\n\n".join(blocks)


def _make_block(text: str) -> str:
    """Returns the text as a Markdown code block: TensorBoard renders Markdown, which would join its lines."""
    return "\n".join("    " + line for line in make_plain(text).split("\n"))


def _make_table(options: dict[str, str]) -> str:
    rows = [f"| {name} | {value.replace('|', '&#124;')} |" for name, value in options.items()]
    return "\n".join(["| option | value |", "|---|---|", *rows])
