"""A task of ClearML, online or as a zip file that Task.import_offline_session sends later."""

import math
import os
from collections.abc import Mapping
from typing import Any

from ingot.errors import require
from ingot.plugins.sink import Sink, SinkPlace
from ingot.plugins.sink_options import ClearMlOptions

# Without the last one ClearML sends the commit and the uncommitted changes of a repository.
_NOT_CONNECTED = ("matplotlib", "tensorboard", "tensorflow", "pytorch", "scikit", "joblib", "detect_repository")


class ClearMlSink(Sink):
    """One task for the life of a run folder, which later processes continue; offline, one zip file per process.
    ClearML keeps numbers in memory for some seconds before it sends them."""

    def __init__(self, place: SinkPlace, options: ClearMlOptions):
        if options.mode == "offline":
            os.environ["CLEARML_CACHE_DIR"] = str(place.own)
        self._library, self._options = require("clearml", "clearml"), options
        self._id_file = place.own / "task-id"
        self._task: Any = None

    def open(self, run_id: str, attempt: int, config: Mapping[str, Any]) -> None:
        if self._task is None:
            self._task = self._start(run_id, config)
        self._task.set_parameter("General/attempt", attempt)

    def _start(self, run_id: str, config: Mapping[str, Any]) -> Any:
        online = self._options.mode == "online"
        if not online:
            self._library.Task.set_offline(True)
        earlier = self._id_file.read_text() if online and self._id_file.exists() else False
        task = self._library.Task.init(
            project_name=self._options.project,
            task_name=run_id,
            reuse_last_task_id=False,
            continue_last_task=earlier,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=dict.fromkeys(_NOT_CONNECTED, False),
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        task.set_initial_iteration(0)  # a continued task would add its last step to all steps
        task.connect({name.replace("/", "."): value for name, value in config.items()}, name="run")
        if online:
            self._id_file.write_text(task.id)
        return task

    def scalars(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        logger = self._task.get_logger()
        for name, value in values.items():
            title, _, series = name.partition("/")
            if math.isfinite(value):  # ClearML takes no others
                logger.report_scalar(title, series, value=value, iteration=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._task.get_logger().report_text(f"step {step} {name}: {text}", print_console=False)

    def close(self, deadline: float) -> None:
        if self._task is not None:
            self._task.close()
