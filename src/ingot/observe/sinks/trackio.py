"""A run of trackio, in its SQLite files."""

import math
import os
from collections.abc import Mapping
from typing import Any

from ingot.errors import require
from ingot.plugins.sink import Sink, SinkPlace
from ingot.plugins.sink_options import TrackioOptions


class TrackioSink(Sink):
    """One run of trackio for the life of a run folder, which later processes continue. Facts about the machine are not
    logged."""

    def __init__(self, place: SinkPlace, options: TrackioOptions):
        if options.folder:
            os.environ["TRACKIO_DIR"] = str((place.run / options.folder).absolute())  # read at import
        self._library, self._project = require("trackio", "trackio"), options.project
        self._run: Any = None
        self._attempt = 0

    def open(self, run_id: str, attempt: int, config: Mapping[str, Any]) -> None:
        self._attempt = attempt
        if self._run is None:
            self._run = self._library.init(
                project=self._project,
                name=run_id,
                config={
                    key: value if isinstance(value, int | float | str) else str(value) for key, value in config.items()
                },
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def scalars(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        shown = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._library.log({**shown, "train/tokens": tokens, "run/attempt": self._attempt}, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._library.log({name: text}, step=step)

    def close(self, deadline: float) -> None:
        if self._run is not None:
            self._library.finish()
