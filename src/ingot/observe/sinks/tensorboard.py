"""Event files for TensorBoard, written with TensorBoard's own writer; TensorFlow is not needed."""

import time
from collections.abc import Mapping
from typing import Any

from ingot.errors import require
from ingot.plugins.sink import Sink, SinkPlace
from ingot.plugins.sink_options import TensorBoardOptions


class TensorBoardSink(Sink):
    """A scalar per number and a text per sample. The steps of an attempt replace those of earlier attempts from its
    first step on: TensorBoard drops what a session start purges."""

    def __init__(self, place: SinkPlace, options: TensorBoardOptions):
        self._event = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = require("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._tensor = require("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        writer = require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        folder = place.run / options.folder if options.folder else place.own
        self._writer = writer.EventFileWriter(str(folder), flush_secs=2)
        self._purges = False

    def open(self, run_id: str, attempt: int, config: Mapping[str, Any]) -> None:
        self._purges = attempt > 0

    def scalars(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        if self._purges and "train/loss" in values:  # an evaluation in the background is of an earlier step
            self._purges = False
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, session_log=start))
        self._add(step, [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()])

    def text(self, step: int, name: str, text: str) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        content = self._tensor.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        about = self._summary.SummaryMetadata(plugin_data=plugin)
        self._add(step, [self._summary.Summary.Value(tag=name, metadata=about, tensor=content)])

    def _add(self, step: int, values: list) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self, deadline: float) -> None:
        self._writer.close()
