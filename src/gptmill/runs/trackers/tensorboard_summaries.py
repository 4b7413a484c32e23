"""Events as TensorBoard's protocol buffers. Needs neither torch nor TensorFlow.

The library is imported where it is used: few runs need it, and every program imports the trackers.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

from gptmill.runs.display import make_plain
from gptmill.runs.events import Event, HistogramsTaken, RunFinished, RunStarted, SampleDrawn
from gptmill.runs.histogram_buckets import trim
from gptmill.runs.trackers.metric_names import FINAL_METRICS, describe_incident, list_histograms, list_scalars

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorboard.compat.proto.event_pb2 import Event as Record
    from tensorboard.compat.proto.summary_pb2 import Summary


def list_records(event: Event) -> list[Record]:
    """Returns what an event adds to TensorBoard's files; nothing for events that it does not show."""
    from tensorboard.compat.proto.event_pb2 import Event as Record

    return [Record(wall_time=event.time, step=event.step, summary=summary) for summary in _list_summaries(event)]


def make_purge(step: int) -> Record:
    """Returns the record that makes TensorBoard discard this step and later ones of the files before."""
    from tensorboard.compat.proto.event_pb2 import Event as Record
    from tensorboard.compat.proto.event_pb2 import SessionLog

    return Record(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))


def _list_summaries(event: Event) -> list[Summary]:
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in list_scalars(event).items()]
    if isinstance(event, HistogramsTaken):
        values += [_make_histogram(name, counts) for name, counts in list_histograms(event).items()]
    summaries = [Summary(value=values)] if values else []
    return [*summaries, *_list_texts(event), *_list_hparams(event)]


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


def _make_histogram(name: str, counts: list[int]) -> Summary.Value:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    filled, edges = trim(counts)
    middles = [(left + right) / 2 for left, right in pairwise(edges)]
    histogram = HistogramProto(
        min=edges[0] if edges else 0.0,
        max=edges[-1] if edges else 0.0,
        num=sum(filled),
        sum=sum(count * middle for count, middle in zip(filled, middles, strict=True)),
        sum_squares=sum(count * middle**2 for count, middle in zip(filled, middles, strict=True)),
        bucket_limit=edges[1:],
        bucket=filled,
    )
    return Summary.Value(tag=name, histo=histogram)


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
