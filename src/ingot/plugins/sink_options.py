"""The settings of ingot's own sinks: the keys of their tables [sinks.NAME]. Paths are relative to the run folder."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ingot.ranges import Range

Port = Annotated[int, Range(0, 65535)]


@dataclass(frozen=True, kw_only=True)
class JsonlOptions:
    """Rows of JSON in a file. file: its path; "": sinks/jsonl/metrics.jsonl in the run folder."""

    file: str = ""


@dataclass(frozen=True, kw_only=True)
class PrometheusOptions:
    """Metrics for Prometheus, of the whole run and of every rank.

    port: where Prometheus scrapes them (GET /metrics); 0: nowhere. address: of the interface that listens; "0.0.0.0":
    all of them. textfile: a file for the textfile collector of node_exporter, whose name ends in .prom; "": none.
    """

    port: Port = 9464
    address: str = "0.0.0.0"
    textfile: str = ""

    def problems(self):
        if self.textfile and not self.textfile.endswith(".prom"):
            yield "textfile", f"{self.textfile!r} does not end in .prom, which node_exporter's collector requires"
        if not self.port and not self.textfile:
            yield "port", "is 0 and there is no textfile, so that nothing would be shown; set one of them"


@dataclass(frozen=True, kw_only=True)
class TensorBoardOptions:
    """Event files for TensorBoard. folder: where they are; "": sinks/tensorboard in the run folder."""

    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class OtlpOptions:
    """Metrics for an OpenTelemetry collector, with OTLP over HTTP. endpoint: the URL of the collector, without
    /v1/metrics. Headers, such as keys, come from OTEL_EXPORTER_OTLP_HEADERS."""

    endpoint: str = "http://localhost:4318"

    def problems(self):
        if not self.endpoint.startswith(("http://", "https://")):
            yield "endpoint", f"{self.endpoint!r} is no URL; write http://HOST:4318"


@dataclass(frozen=True, kw_only=True)
class WandbOptions:
    """A run of Weights & Biases. The key comes from WANDB_API_KEY, or from `wandb login`.

    entity: a user or team; "": that of the key. mode: "offline" writes files that `wandb sync` sends later.
    """

    project: str = "ingot"
    entity: str = ""
    mode: Literal["online", "offline"] = "online"


@dataclass(frozen=True, kw_only=True)
class ClearMlOptions:
    """A task of ClearML. The server and its keys come from ClearML's own configuration.

    mode: "offline" writes a zip file in sinks/clearml of the run folder, which Task.import_offline_session sends later.
    """

    project: str = "ingot"
    mode: Literal["online", "offline"] = "online"


@dataclass(frozen=True, kw_only=True)
class MlflowOptions:
    """A run of MLflow. tracking_uri: of the server; "": MLFLOW_TRACKING_URI, else a database in sinks/mlflow of the run
    folder."""

    tracking_uri: str = ""
    experiment: str = "ingot"


@dataclass(frozen=True, kw_only=True)
class TrackioOptions:
    """A run of trackio, in its SQLite files. folder: where they are; "": TRACKIO_DIR, else trackio's own place."""

    project: str = "ingot"
    folder: str = ""
