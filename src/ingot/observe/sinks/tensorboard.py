"""Event files for TensorBoard, of its own messages and records; TensorFlow is not needed."""

import io
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from ingot.errors import require
from ingot.plugins.sink import Sink, SinkPlace
from ingot.plugins.sink_options import TensorBoardOptions


class TensorBoardSink(Sink):
    """A scalar per number and a text per sample. The steps of an attempt replace those of earlier attempts from its
    first step on: TensorBoard drops what a session start purges. Each call is in the file when it returns, which the
    thread of TensorBoard's EventFileWriter does not do: it ends at the first error of a disk."""

    def __init__(self, place: SinkPlace, options: TensorBoardOptions):
        self._event = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = require("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._tensor = require("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        self._records = require("tensorboard.summary.writer.record_writer", "tensorboard")
        folder = place.run / options.folder if options.folder else place.own
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = (folder / name).open("ab", buffering=0)
        self._purges = False

    def open(self, run_id: str, attempt: int, config: Mapping[str, Any]) -> None:
        self._purges = attempt > 0

    def scalars(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        if self._purges and "train/loss" in values:  # an evaluation in the background is of an earlier step
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(step=step, session_log=start)
            self._purges = False
        self._add(step, [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()])

    def text(self, step: int, name: str, text: str) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        content = self._tensor.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        about = self._summary.SummaryMetadata(plugin_data=plugin)
        self._add(step, [self._summary.Summary.Value(tag=name, metadata=about, tensor=content)])

    def _add(self, step: int, values: list) -> None:
        self._write(step=step, summary=self._summary.Summary(value=values))

    def _write(self, **facts: Any) -> None:
        """Write an event, or nothing: readers take what follows a part of a record for damage."""
        buffer = io.BytesIO()
        records = self._records.RecordWriter(buffer)
        if not (size := self._file.seek(0, os.SEEK_END)):
            records.write(self._event.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        records.write(self._event.Event(wall_time=time.time(), **facts).SerializeToString())
        if (written := self._file.write(data := buffer.getvalue())) < len(data):
            self._file.truncate(size)
            raise OSError(f"only {written} of {len(data)} bytes of an event could be written")

    def close(self, deadline: float) -> None:
        self._file.close()
