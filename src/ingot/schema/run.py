"""The run file, which `plan` writes and `train` executes: TOML on disk, these dataclasses in memory, no torch.

The schema is here and not in the trainer, because planner, `check` and `report` read it without torch. To read a run
file with all its rules, use ingot.theory.rules.load_run.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from ingot.config import LEFT_OUT_AT_DEFAULT, to_dict
from ingot.errors import ConfigError
from ingot.ranges import (
    Bytes,
    Factor,
    LearningRate,
    Positive,
    PositiveQueue,
    PositiveSteps,
    Queue,
    Seed,
    Sequences,
    Share,
    Steps,
    Tokens,
    Usd,
    Weight,
)
from ingot.schema.alerting import Alerts
from ingot.schema.arch import Arch
from ingot.schema.changes import SettingChange, compare, identity
from ingot.schema.evaluate import BPB, Evaluate
from ingot.schema.guard import Guard
from ingot.schema.launch import Launch
from ingot.schema.load_filter import LoadFilter
from ingot.schema.metric_settings import MetricSettings
from ingot.schema.parallel import Parallel
from ingot.schema.plugins import Plugins
from ingot.schema.save_interval import NEVER, SaveInterval, parse_interval
from ingot.schema.step_ranges import StepSpan, number_of, parse_step_range
from ingot.storage import canonical_json, sha256_bytes


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a run.

    tokens, heldout: token folders. tokenizer: a tokenizer.json. All paths are relative to the run file.
    weights: source -> share of the samples; empty: in proportion to the sizes of the sources.
    mask_documents: attention does not cross document borders.
    prefetch: batches that each rank reads ahead; more batches cover longer pauses of the storage.
    skip: steps whose batches are passed: "120", or "120-122". They keep their number and their learning rate, but
      nothing is computed and nothing changes.
    quarantine: lists of documents (schema/quarantine.py) that are not trained on: windows with a token of them are
      replaced by others of the same source, from the start on that reads the list.
    on_damage: what follows if a token shard is damaged, missing or of another build: "stop", or "quarantine": its
      damaged windows are replaced by others of the same source, on all ranks, from the step on that would use them.
    max_quarantined: the largest share of the windows of a source that may be in quarantine; beyond it the run stops.
    filter: the windows that are not used because of their content.
    """

    tokens: str
    heldout: str = ""
    tokenizer: str = ""
    weights: dict[str, Weight] = field(default_factory=dict)
    mask_documents: bool = False
    prefetch: PositiveQueue = 2
    skip: tuple[str, ...] = ()
    quarantine: tuple[str, ...] = ()
    on_damage: Literal["stop", "quarantine"] = "stop"
    max_quarantined: Share = 0.01
    filter: LoadFilter = field(default_factory=LoadFilter, metadata=LEFT_OUT_AT_DEFAULT)

    @property
    def skipped_steps(self) -> list[StepSpan]:
        return [parse_step_range(text) for text in self.skip]

    def problems(self):
        for text in self.skip:
            try:
                parse_step_range(text)
            except ConfigError as error:
                yield "skip", f"{error.found}; {error.rule}"
        for source, weight in self.weights.items():
            if weight <= 0:
                yield "weights", f"{source} = {weight}; weights are positive shares"


@dataclass(frozen=True, kw_only=True)
class Train:
    """Steps and batches. A batch size is a number of sequences of `seq_len` tokens: global_batch = micro_batch x
    accumulation x data-parallel ranks.

    precision: dtype of the computation; parameters are kept and updated in fp32 ("fp64": in fp64, for exact tests).
      fp16 scales the loss dynamically. tf32: fp32 products on NVIDIA GPUs round their inputs to a 10-bit mantissa.
    compile: torch.compile each block; in blocks with experts, only attention and shared experts (parallel/apply.py).
    """

    steps: PositiveSteps
    seq_len: Tokens
    global_batch: Sequences
    micro_batch: Sequences
    precision: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    tf32: bool = False
    compile: Literal["auto", "on", "off"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer. Weight decay acts on matrices only.

    kind: "adamw" (Loshchilov & Hutter 2019), or an optimizer that a plug-in registers (plugins/optimizer.py).
    clip_norm: global norm to which larger gradients are scaled down; 0: no clipping.
    options: the settings of a plug-in's optimizer.
    """

    kind: str = "adamw"
    lr: LearningRate = 3e-3
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-8
    weight_decay: Factor = 0.1
    clip_norm: Factor = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def problems(self):
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1:
                yield name, "is 1, must be below 1: the average would never change"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate by step: linear warm-up, then a cosine to `final_fraction` of the peak, or WSD.

    kind: "cosine", "wsd", or a schedule that a plug-in registers (plugins/schedule.py). WSD (warm-up, stable, decay):
      constant after warm-up, then linear to `final_fraction` over the last `decay_steps`.
    options: the settings of a plug-in's schedule.
    """

    kind: str = "cosine"
    warmup_steps: Steps = 0
    decay_steps: Steps = 0
    final_fraction: Share = 0.1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RemoteCheckpoints:
    """The second tier of checkpoints, in a store.

    url: the place of this run alone: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder;
      "": none. Credentials come from the usual environment variables.
    keep: the number of newest checkpoints that stay; 0: all. keep_every: besides them, those whose step is a multiple
      of it; 0: none.
    bytes_per_second: the bandwidth that uploads and downloads may use; 0: no limit.
    """

    url: str = ""
    keep: Queue = 3
    keep_every: Steps = 0
    bytes_per_second: Bytes = 0

    def problems(self):
        if self.url and not re.match(r"(s3|gs|az)://[^/@?#:]+(/[^@?#:]*)?$|file:///", self.url):
            folder = "" if "://" in self.url else f"; a folder is file://{self.url if self.url[0] == '/' else '/...'}"
            yield (
                "url",
                f"is not s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder{folder}",
            )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpoints: one per interval and one at the end.

    keep: the number of newest checkpoints that stay on the disk. keep_every: besides them, those whose step is a
      multiple of it; 0: none. `ingot ckpt pin` keeps others.
    mode: "async": training waits for a copy of its state in memory, from which a process of each rank writes and
      verifies the files; a save that is due while another one is being written is left out. "sync": training waits for
      the verified files.
    every: the interval, with its unit: "60 min", "1 h", "500 steps"; or "auto": Daly's interval from the measured stall
      of a save and launch.failures_per_node_day. "": as `every_steps` says, or every 60 minutes if that is 0, too. A
      time is measured on rank 0; the first checkpoint of an attempt comes after at most 10 minutes.
    every_steps: the interval as a number of steps; 0: as `every` says.
    weights_every: the interval of saves of the weights alone, in the same form; "" or "0 steps": none. They are for
      evaluation, export and a new start; training cannot continue from them. A full checkpoint counts as one.
    weights_keep: how many of them are kept, on the disk and in the store.
    replicas: on how many other nodes the snapshots of a node are kept in memory, until the next one; 0: nowhere. If a
      node is lost, training continues from them without reading a checkpoint. With one node, they survive the ranks
      alone. Each replica needs the memory of a snapshot.
    disks: folders on local disks, for the files of full checkpoints: process i of a node writes to disk i modulo their
      number, and `{node}` stands for the number of the node. Manifests, and saves of the weights alone, stay in the run
      folder, which all nodes must see. Empty: all files are in the run folder.
    remote: a store to which saved checkpoints are uploaded while training goes on, and the weights alone after them.
    """

    mode: Literal["async", "sync"] = "async"
    every: str = ""
    every_steps: Steps = 0
    keep: PositiveQueue = 3
    keep_every: Steps = 0
    weights_every: str = "10 min"
    weights_keep: PositiveQueue = 3
    replicas: Queue = 0
    disks: tuple[str, ...] = ()
    remote: RemoteCheckpoints = field(default_factory=RemoteCheckpoints, metadata=LEFT_OUT_AT_DEFAULT)

    def most_kept(self, steps: int, proven_steps: int = 0) -> int:
        """Return the number of checkpoints that a run of `steps` steps keeps on its disk at most, without pinned
        ones. proven_steps: of the guard, which keeps one that has them and the next one, if they are older than the
        newest `keep`."""
        span = self.interval.steps * self.keep
        return self.keep + (steps // self.keep_every if self.keep_every else 0) + 2 * (0 < span < proven_steps + 2)

    def problems(self):
        if self.replicas and self.mode == "sync":
            yield "replicas", f"is {self.replicas}, but without snapshots, as mode = 'sync', there is nothing to keep"
        if self.every and self.every_steps:
            found = f"is {self.every!r}, and every_steps = {self.every_steps} is another interval"
            yield "every", f'{found}; remove one of them, or on the command line set it to "" or 0'
        if wrong := [disk for disk in self.disks if not disk.startswith("/") or "\0" in disk]:
            yield "disks", f"lists {wrong[0]!r}, which is not the absolute path of a folder"
        if len(set(self.disks)) < len(self.disks):
            yield "disks", "lists a folder twice"
        for name in ("every", "weights_every"):
            text = getattr(self, name)
            if text in NEVER if name == "weights_every" else not text:
                continue
            try:
                parse_interval(text)
            except ConfigError as error:
                yield name, f"{error.found}; {error.rule}"

    @property
    def interval(self) -> SaveInterval:
        """The interval between two full checkpoints."""
        return SaveInterval(steps=self.every_steps) if self.every_steps else parse_interval(self.every or _HOURLY)

    def with_steps(self, steps: int) -> dict[str, int | str]:
        """Return the setting that makes the interval `steps` steps, in the form that this one has, by its key."""
        return {"checkpoint.every_steps": steps} if self.every_steps else {"checkpoint.every": f"{steps} steps"}

    @property
    def weights_interval(self) -> SaveInterval | None:
        """The interval between two saves of the weights alone; None without any."""
        return None if self.weights_every in NEVER else parse_interval(self.weights_every)

    @property
    def weights_apart(self) -> bool:
        """True if saves of the weights alone have a snapshot of their own: the last full one stays in memory."""
        return self.replicas > 0 and self.weights_interval is not None


_HOURLY = "60 min"


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Logging. log_every: steps per log line. Between two lines, metrics stay on the device."""

    log_every: PositiveSteps = 10


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The price. usd_per_hour: US dollars per hour of one GPU (on CPU: of the machine); 0: unknown, no cost is
    printed.
    """

    usd_per_hour: Usd = 0.0


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a run.

    init: the folder of the first weights, relative to the run file: a Hugging Face model folder, or a checkpoint, save
      of the weights alone or run folder of ingot; "": random weights. Only step 0 reads it. The path is part of the
      experiment's identity, but the tensors are not hashed: other weights at that path have the same identity.
    callbacks: name of a registered callback -> its settings. All are called, in this order (plugins/callback.py).
    loss: name of a registered loss term -> its `weight` and its own settings (plugins/loss.py).
    sinks: name of a registered sink -> its settings: where numbers and events go, too (plugins/sink.py).
    """

    name: str
    seed: Seed = 1234
    init: str = ""
    model: Arch
    data: Data
    train: Train
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    evaluate: Evaluate = field(default_factory=Evaluate)
    watch: WatchSettings = field(default_factory=WatchSettings)
    launch: Launch = field(default_factory=Launch)
    guard: Guard = field(default_factory=Guard, metadata=LEFT_OUT_AT_DEFAULT)
    cost: Cost = field(default_factory=Cost)
    metrics: MetricSettings = field(default_factory=MetricSettings, metadata=LEFT_OUT_AT_DEFAULT)
    alerts: Alerts = field(default_factory=Alerts, metadata=LEFT_OUT_AT_DEFAULT)
    plugins: Plugins = field(default_factory=Plugins, metadata=LEFT_OUT_AT_DEFAULT)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    loss: dict[str, dict[str, Any]] = field(default_factory=dict)
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def problems(self):
        """Yield the broken rules between sections; the rules of layouts are in theory/rules."""
        if self.data.filter.max_repeated < 1 and self.data.filter.ngram >= self.train.seq_len:
            found = f"{self.data.filter.ngram} is not below train.seq_len = {self.train.seq_len}"
            yield "data.filter.ngram", f"{found}; a window has to have several n-grams"
        if self.data.filter.max_broken < 1 and not self.data.tokenizer:
            yield "data.filter.max_broken", "needs data.tokenizer, to read windows as text"
        background = self.evaluate.background
        if background.tasks and not self.data.tokenizer:
            yield "evaluate.background.tasks", "needs data.tokenizer, to encode the text of tasks"
        if background.keep_best == BPB and not self.data.heldout:
            yield "evaluate.background.keep_best", "is 'bpb', which needs the held-out text of data.heldout"
        if self.train.seq_len > self.model.max_seq_len:
            yield "train.seq_len", f"{self.train.seq_len} exceeds model.max_seq_len={self.model.max_seq_len}"
        if self.model.sliding_window >= self.model.max_seq_len:
            found = f"{self.model.sliding_window} hides nothing in sequences of at most {self.model.max_seq_len} tokens"
            yield "model.sliding_window", f"{found} (model.max_seq_len); lower it, or remove it"
        if self.model.moe.bias_steps >= self.train.steps > 0:
            found = f"{self.model.moe.bias_steps} are all {self.train.steps} steps of the run (train.steps)"
            yield "model.moe.bias_steps", f"{found}; lower it, or remove it"
        if number_of(self.data.skipped_steps, 1, self.train.steps) == self.train.steps:
            found = f"passes all {self.train.steps} steps of the run (train.steps), so nothing would be trained"
            yield "data.skip", f"{found}; name fewer steps"
        if self.schedule.warmup_steps > self.train.steps:
            yield "schedule.warmup_steps", f"warm-up is longer than the {self.train.steps} steps of the run"

    @property
    def accumulation(self) -> int:
        return self.train.global_batch // (self.train.micro_batch * self.parallel.data_ranks)

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.train.seq_len

    @property
    def settled_after(self) -> int:
        """The last step of the warm-up of the learning rate and of the guard's `settle_steps` after it."""
        return self.schedule.warmup_steps + self.guard.settle_steps

    def settings(self) -> dict[str, Any]:
        """Return all settings, flat: "optim.lr" -> 0.003. A callback or sink without settings of its own has the
        value {}."""
        tables = {"callbacks": self.callbacks, "sinks": self.sinks}
        empty = {f"{table}.{name}": {} for table, own in tables.items() for name, values in own.items() if not values}
        return _flat(to_dict(self)) | empty

    def training_sha256(self) -> str:
        """Return the identity of the experiment: equal for two runs that may continue each other's checkpoints."""
        return settings_sha256(self.settings())


def settings_sha256(settings: Mapping[str, Any]) -> str:
    """Return the identity of the experiment that has these flat `settings`; free ones have no effect."""
    return sha256_bytes(canonical_json(identity(settings, DEFAULTS)).encode())


def setting_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[SettingChange]:
    """Return the changes from the settings of a checkpoint to the flat settings `after` (schema/changes.py)."""
    return compare(before, after, DEFAULTS)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values as a flat dict: {"optim": {"lr": 0.003}} -> {"optim.lr": 0.003}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _defaults(section: type) -> dict[str, Any]:
    """Return the nested default values of a dataclass, without the fields that have none."""
    found: dict[str, Any] = {}
    for each in fields(section):
        if each.default is not MISSING:
            found[each.name] = list(each.default) if isinstance(each.default, tuple) else each.default
        elif each.default_factory is not MISSING:
            value = each.default_factory()
            found[each.name] = to_dict(value) if is_dataclass(value) else value
        elif isinstance(each.type, type) and is_dataclass(each.type):
            found[each.name] = _defaults(each.type)
    return found


# The default of every setting that has one, flat. A default must mean the behavior from before the setting, unless the
# setting is free to change (schema/changes.py): those are not compared.
DEFAULTS = _flat(_defaults(RunConfig))
