"""A run of Weights & Biases, online or as files that `wandb sync` sends later."""

import math
import os
from collections.abc import Mapping
from typing import Any

from ingot.errors import require
from ingot.plugins.sink import Sink, SinkPlace
from ingot.plugins.sink_options import WandbOptions

_INIT_SECONDS = 50.0  # below the least time after which a call counts as hanging, by default


class WandbSink(Sink):
    """One run of W&B for the life of a run folder. Its charts have the axis train/step, because W&B drops rows whose
    own step goes back, and every row has run/attempt. Standard output, the command line, code and facts about the
    machine are not sent."""

    def __init__(self, place: SinkPlace, options: WandbOptions):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # or its client sends logs and metrics of its own
        self._library, self._options, self._place = require("wandb", "wandb"), options, place
        self._run: Any = None
        self._attempt = 0

    def open(self, run_id: str, attempt: int, config: Mapping[str, Any]) -> None:
        self._attempt = attempt
        if self._run is not None:
            return
        quiet = self._library.Settings(
            console="off",
            silent=True,
            init_timeout=_INIT_SECONDS,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            save_code=False,
            x_disable_meta=True,
            x_save_requirements=False,
            x_disable_machine_info=True,
            x_disable_stats=True,
            host="",  # not the name of this machine
            program="ingot",  # not the path of this process
        )
        self._run = self._library.init(
            project=self._options.project,
            entity=self._options.entity or None,
            id=run_id,
            name=str(config["name"]),
            config=dict(config),
            dir=str(self._place.own),
            mode=self._options.mode,
            resume="allow" if self._options.mode == "online" else None,
            settings=quiet,
        )
        self._run.define_metric("train/step")
        self._run.define_metric("*", step_metric="train/step")

    def scalars(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        axes = {"train/step": step, "train/tokens": tokens, "run/attempt": self._attempt}
        self._run.log(
            {**axes, **{name: value if math.isfinite(value) else str(value) for name, value in values.items()}}
        )

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({"train/step": step, "run/attempt": self._attempt, name: text})

    def close(self, deadline: float) -> None:
        if self._run is not None:
            self._run.finish()
