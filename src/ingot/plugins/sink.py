"""Sinks: where the numbers and events of a run go besides its folder, such as an experiment tracker."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

from ingot.plugins import sink_options as options
from ingot.plugins.contract import Contract, Reference
from ingot.plugins.registry import Part, Registry
from ingot.ranges import Deadline


@dataclass(frozen=True, kw_only=True)
class SinkLimits:
    """The settings that every table [sinks.NAME] may have, besides those of the sink.

    timeout_seconds: a call that takes longer counts as a hang: the sink's process is killed, and started again after a
      pause.
    close_seconds: how long the end of the run waits for the sink to send its last data.
    """

    timeout_seconds: Deadline = 60.0
    close_seconds: Deadline = 10.0


LIMITS = frozenset(one.name for one in fields(SinkLimits))


@dataclass(frozen=True)
class SinkPlace:
    """The place of a sink. run: the run folder. own: a folder inside of it for the sink's files, which exists."""

    run: Path
    own: Path


class Sink(Contract):
    """The contract, as a base class. A sink is a process of its own, without torch, that reads the run folder: none of
    its calls can slow a step, and it may wait for a server.

    A call that raises is made again, after a pause, and so is one that ends the process or hangs, up to three times:
    what it has done until then must not count twice. One that raises an error of its own, such as ValueError, is left
    out, and so is one that raises while later calls of the same method return.
    """

    required: ClassVar[tuple[tuple[str, ...], ...]] = (("scalars", "event", "text"),)

    def __init__(self, place: SinkPlace, options: Any):
        """Make the sink. options: an instance of the part's `settings`."""

    def open(self, run_id: str, attempt: int, config: Mapping[str, Any]) -> None:
        """Begin an attempt, before its first call. run_id: the same for the life of a run folder. config: the settings,
        flat: "optim.lr" -> 0.003. attempt: 0, 1, ...; each start of the ranks and each roll-back begins one, and its
        first step may be one that was trained before. May be called again for the same attempt, in a new process.
        """

    def scalars(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """Take numbers after a step (observe/scalars.py has their names). tokens: trained on until then. Values may be
        infinite or not a number."""

    def event(self, kind: str, step: int | None, facts: Mapping[str, Any]) -> None:
        """Take an event of the log (schema/events.py), with all its fields. step: None for one that has none."""

    def text(self, step: int, name: str, text: str) -> None:
        """Take a text, such as a sample of the model."""

    def close(self, deadline: float) -> None:
        """Send what is left. deadline: seconds from now, after which the process is killed."""


@dataclass(frozen=True, kw_only=True)
class SinkPart(Part):
    """A sink, chosen by a table [sinks.NAME].

    make: a subclass of Sink, or a reference to one. package: the import name of the library that it needs, and
    `ingot check` looks for; "": none.
    """

    make: Reference
    package: str = ""


class SinkRegistry(Registry[SinkPart]):
    """The registry of sinks, whose classes have the methods of Sink."""

    def broken(self, part: SinkPart) -> Iterator[str]:
        if isinstance(part.make, type) and not issubclass(part.make, Sink):
            yield f"make = {part.make.__qualname__} is not a subclass of Sink"
        own = {one.name for one in fields(part.settings)} if is_dataclass(part.settings) else set()
        if clash := sorted(own & LIMITS):
            yield f"its settings have {clash[0]!r}, which every sink has (SinkLimits)"


def split_limits(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of a table [sinks.NAME] as (those of SinkLimits, those of the sink's own settings)."""
    limits = {key: value for key, value in table.items() if key in LIMITS}
    return limits, {key: value for key, value in table.items() if key not in LIMITS}


_IN = "ingot.observe.sinks"
SINKS = SinkRegistry(
    "sink",
    "[sinks.NAME]",
    [
        SinkPart(name="jsonl", make=f"{_IN}.jsonl:JsonlSink", settings=options.JsonlOptions),
        SinkPart(
            name="prometheus",
            make=f"{_IN}.prometheus:PrometheusSink",
            settings=options.PrometheusOptions,
            package="prometheus_client",
        ),
        SinkPart(
            name="tensorboard",
            make=f"{_IN}.tensorboard:TensorBoardSink",
            settings=options.TensorBoardOptions,
            package="tensorboard",
        ),
        SinkPart(name="otlp", make=f"{_IN}.otlp:OtlpSink", settings=options.OtlpOptions, package="opentelemetry"),
        SinkPart(name="wandb", make=f"{_IN}.wandb:WandbSink", settings=options.WandbOptions, package="wandb"),
        SinkPart(name="clearml", make=f"{_IN}.clearml:ClearMlSink", settings=options.ClearMlOptions, package="clearml"),
        SinkPart(name="mlflow", make=f"{_IN}.mlflow:MlflowSink", settings=options.MlflowOptions, package="mlflow"),
        SinkPart(name="trackio", make=f"{_IN}.trackio:TrackioSink", settings=options.TrackioOptions, package="trackio"),
    ],
)
