"""The outlook of a whole run: wall-clock days, failures, checkpoints, useful time and cost.

Every assumption is a field of Assumptions and can be set with `--assume`. Prices are list prices, which are soon out of
date. Storage and egress are priced per gigabyte of 10^9 bytes.
"""

import math
from dataclasses import dataclass, fields, replace

from ingot.errors import ConfigError
from ingot.planner.run.storage import (
    blocking_stall,
    copy_stall,
    data_reading,
    kept_bytes,
    node_snapshot,
    rank_snapshot,
    token_bytes,
)
from ingot.ranges import Degree, Factor, Queue, Rate, Seconds, Steps, Usd
from ingot.schema.checkpoint import WEIGHTS
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Outlook
from ingot.schema.run import RunConfig
from ingot.theory.failures import (
    DAY_SECONDS,
    assumed_rate,
    daly_interval,
    goodput,
    job_mttf_seconds,
    save_interval,
    spare_nodes,
)
from ingot.theory.memory import Term
from ingot.theory.memory import checkpoint_bytes as checkpoint_bytes_of
from ingot.units import format_bytes, format_count, format_seconds, format_usd

# The assumed bytes/s of a device's link to its host if the rate is unknown: PCIe 4 x16 in practice.
_HOST_BANDWIDTH = 25e9
GIGABYTE = 10**9
MONTH_DAYS = 365.25 / 12
# List prices of May 2026: object storage of the largest provider in its first region, standard class, first 50 TB a
# month; egress to the internet, first 10 TB.
STORAGE_USD_PER_GB_MONTH = 0.023
EGRESS_USD_PER_GB = 0.09
STORAGE_PRICE_SOURCE = "AWS S3 standard, us-east-1, list price, May 2026"


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions about failures, storage and prices. The user can set all of them.

    failures_per_node_day: failures of one node per day; None means the run file's, or Llama 3's 0.38% for nodes of 8
      devices, scaled by the number of devices in a node.
    restart_seconds: time from a failure until steps continue: detection, replacement, start, loading (10 min: in
      MegaScale, Jiang et al. 2024, most failures are detected and diagnosed faster, and made up for within 15 min).
      restart_source: where a measured time is from; "": it is assumed.
    write_bytes_per_second: write rate of one node (BLOOM wrote 2.3 TB from 48 nodes in 40 s: 1.2 GB/s).
    storage_write_bytes_per_second: write rate of the whole storage (2 TB/s: Llama team 2024, section 3.3.1); 0 means no
      limit.
    storage_read_bytes_per_second: read rate of the whole storage; 0 means that it is unknown and assumed sufficient. If
      reading is slower than the steps, the steps wait.
    meeting_seconds, manifest_seconds_per_rank: time of every checkpoint in addition to writing its bytes. Ranks
      synchronize and open files; one rank writes the list of parts and reads it back while the others wait: 20 s for
      16,384 ranks (docs/design/recovery.md).
    asynchronous: True: steps stop only for the synchronization and a copy to host memory. False: steps wait for the
      whole write. None: as the run file's checkpoint.mode says.
    checkpoint_every_seconds, checkpoint_every_steps: at most one is given; if both are 0, Daly's interval is used.
    keep: number of checkpoints to keep; 0 means the run file's.
    usd_per_hour: price of one device (on CPU: of one machine); 0 means the run file's or the cluster's price.
    spares: nodes that are paid for but idle. repair_days: repair time of a failed node (OPT-175B lost about 2 of 128
      nodes a day, and had 12 to 18 spares).
    """

    failures_per_node_day: Factor | None = None
    restart_seconds: Seconds = 600.0
    restart_source: str = ""
    write_bytes_per_second: Rate = 1.2e9
    storage_write_bytes_per_second: Rate = 2e12
    storage_read_bytes_per_second: Rate = 0.0
    meeting_seconds: Seconds = 1.0
    manifest_seconds_per_rank: Seconds = 1.2e-3
    asynchronous: bool | None = None
    checkpoint_every_seconds: Seconds = 0.0
    checkpoint_every_steps: Steps = 0
    keep: Queue = 0
    usd_per_hour: Usd = 0.0
    storage_usd_per_gb_month: Usd = STORAGE_USD_PER_GB_MONTH
    egress_usd_per_gb: Usd = EGRESS_USD_PER_GB
    spares: Degree = 0
    repair_days: Factor = 5.0

    def problems(self):
        for name in (field.name for field in fields(self) if field.name not in ("asynchronous", "restart_source")):
            value = getattr(self, name)
            if value is not None and not (0 <= value < math.inf):
                yield name, f"is {value}, must be finite and at least 0"
        if self.write_bytes_per_second == 0:
            yield "write_bytes_per_second", "is 0, so no checkpoint would ever be complete; must be above 0"

    def with_interval_of(self, run: RunConfig) -> "Assumptions":
        """Return these assumptions with the run file's checkpoint interval, unless they have one themselves or the
        run decides with "auto", which is the interval of assumptions without one."""
        if self.checkpoint_every_seconds or self.checkpoint_every_steps:
            return self
        interval = run.checkpoint.interval
        return replace(self, checkpoint_every_seconds=interval.seconds, checkpoint_every_steps=interval.steps)

    def in_background(self, run: RunConfig) -> bool:
        """Return True if steps continue while a checkpoint is written."""
        return run.checkpoint.mode == "async" if self.asynchronous is None else self.asynchronous


@dataclass(frozen=True)
class _NodesInUse:
    """The numbers of nodes and devices that a run uses. rate: failures per node per day, with the source as formula."""

    nodes: int
    devices: int
    rate: Term

    @property
    def mttf(self) -> float:
        """The mean time between failures of the job, in seconds."""
        return job_mttf_seconds(self.nodes, self.rate.value)


def outlook(
    run: RunConfig,
    cluster: Cluster,
    step_seconds: float,
    checkpoint_bytes: float,
    assumptions: Assumptions | None = None,
) -> tuple[Outlook, dict[str, str]]:
    """Return the outlook of a run, and its formulas with keys "outlook.NAME".

    step_seconds: step time, without waiting for storage. checkpoint_bytes: size of one checkpoint. The outlook's
    usd_by_kind is empty if no device price is known. Raises ConfigError for impossible assumptions, or if failures are
    more frequent than restarts can repair.
    """
    given = assumptions or Assumptions()
    _require(given, step_seconds, checkpoint_bytes)
    reading = data_reading(run, step_seconds, given.storage_read_bytes_per_second)
    step_seconds *= max(reading.share, 1.0)
    job, productive = _job(run, cluster, given), run.train.steps * step_seconds
    copied = node_snapshot(run, cluster) if given.in_background(run) else Term(0.0, "")
    write, stall = _stalls(job, cluster, given, checkpoint_bytes, rank_snapshot(run).value if copied.value else 0.0)
    # A checkpoint that is not completely written when the job fails cannot be used.
    writing = write.value if copied.value else 0.0
    every = _cadence(job, given, stall.value, writing, step_seconds, productive)
    lost = given.restart_seconds + writing
    weights = _weights_saves(run, cluster, given, job, step_seconds)
    useful = goodput(job.mttf, stall.value, every.value, lost)
    useful = Term(useful.value * weights.share, useful.formula + weights.formula)
    _require_progress(job, useful.value, given)
    days = productive / useful.value / DAY_SECONDS
    stored = kept_bytes(
        checkpoint_bytes,
        every.value,
        productive,
        given.keep or run.checkpoint.most_kept(run.train.steps, run.guard.proven_steps),
    )
    if weights.bytes:
        stored += kept_bytes(weights.bytes, weights.every_seconds, productive, run.checkpoint.weights_keep)
    spares = spare_nodes(job.nodes, job.rate.value, given.repair_days)
    usd = _usd(run, cluster, given, job, days, stored, checkpoint_bytes)
    found = Outlook(
        days=days,
        productive_days=productive / DAY_SECONDS,
        goodput=useful.value,
        failures=job.nodes * job.rate.value * days,
        failures_per_node_day=job.rate.value,
        restart_seconds=given.restart_seconds,
        checkpoint_every_seconds=every.value,
        checkpoint_stall_seconds=stall.value,
        device_hours=device_hours(job.devices, days),
        storage_bytes=stored,
        spare_nodes=round(spares.value),
        snapshot_bytes_per_node=copied.value,
        read_bytes_per_second=reading.bytes_per_second / max(reading.share, 1.0),
        usd_by_kind={kind: term.value for kind, term in usd.items()},
    )
    formulas = _formulas(found, job, run.train.steps, step_seconds, checkpoint_bytes)
    steps = max(round(every.value / step_seconds), 1)
    formulas |= {
        "goodput": useful.formula,
        "checkpoint_every": f"{every.formula}; {steps:,} x {format_seconds(step_seconds)}",
        "checkpoint_stall": stall.formula,
        **({"restart": given.restart_source} if given.restart_source else {}),
        "spare_nodes": spares.formula,
        "reading": reading.formula,
        **({"snapshot": copied.formula} if copied.value else {}),
        **{f"usd.{kind}": term.formula for kind, term in usd.items()},
    }
    return found, {f"outlook.{name}": formula for name, formula in formulas.items()}


def _formulas(
    found: Outlook, job: _NodesInUse, steps: int, step_seconds: float, checkpoint_bytes: float
) -> dict[str, str]:
    """Return the formulas of the outlook's derived values: days, failures, device hours, storage."""
    of_steps, days = format_seconds(steps * step_seconds), f"{found.days:,.1f} days"
    often = f"one every {format_seconds(job.mttf)}" if job.rate.value else "none"
    failing = f"{job.nodes:,} nodes x {job.rate.value:.3%} a day ({job.rate.formula}) x {days}"
    kept = f"checkpoints of {format_bytes(checkpoint_bytes)}, and the weights alone"
    return {
        "productive_days": f"{steps:,} steps x {format_seconds(step_seconds)} = {of_steps}",
        "days": f"{of_steps} of steps / {found.goodput:.1%} goodput = {days}",
        "failures": f"{failing} = {found.failures:,.1f}, {often}",
        "device_hours": f"{job.devices:,} x {days} x 24 = {format_count(found.device_hours)} hours",
        "storage_bytes": f"{kept} = {format_bytes(found.storage_bytes)}",
    }


def _require(given: Assumptions, step_seconds: float, checkpoint_bytes: float) -> None:
    problems = [f"{name} {problem}" for name, problem in given.problems()]
    for name, value in (("step_seconds", step_seconds), ("checkpoint_bytes", checkpoint_bytes)):
        if not 0 < value < math.inf:
            problems.append(f"{name} is {value}, must be finite and above 0")
    if problems:
        raise ConfigError(
            "E-OUTLOOK-VALUE",
            "\n".join(problems),
            rule="rates, times and prices are finite and not negative; step time, checkpoint size and write rate are"
            " above 0",
            fix="change these values (--assume NAME=VALUE)",
            names=[problem.split()[0] for problem in problems],
        )


def _require_progress(job: _NodesInUse, useful: float, given: Assumptions) -> None:
    if useful < 1e-6:
        every, restart = format_seconds(job.mttf), format_seconds(given.restart_seconds)
        raise ConfigError(
            "E-OUTLOOK-PROGRESS",
            f"{job.nodes:,} nodes fail every {every}, and a restart takes {restart}: the run would never end",
            rule="a restart takes less time than passes between two failures",
            fix="assume a faster restart (--assume restart_seconds=5min), fewer failures (--failures) or fewer nodes",
            nodes=job.nodes,
            mttf_seconds=job.mttf,
            restart_seconds=given.restart_seconds,
        )


def _job(run: RunConfig, cluster: Cluster, given: Assumptions) -> _NodesInUse:
    cpu = cluster.device == "cpu"
    devices = cluster.nodes if cpu else run.parallel.world_size
    nodes = cluster.nodes if cpu else -(-devices // cluster.devices_per_node)
    rate = given.failures_per_node_day
    if rate is None:
        rate = run.launch.failures_per_node_day or None
    return _NodesInUse(nodes, devices, assumed_rate(0 if cpu else cluster.devices_per_node, rate))


def _stalls(
    job: _NodesInUse, cluster: Cluster, given: Assumptions, checkpoint_bytes: float, copied_bytes: float
) -> tuple[Term, Term]:
    """Return two times in seconds: until a checkpoint is complete, and the part of it in which no step runs.

    copied_bytes: what a rank copies to host memory before steps continue; 0 if they wait for the whole write.
    """
    size = blocking_stall(
        checkpoint_bytes, job.nodes, given.write_bytes_per_second, given.storage_write_bytes_per_second
    )
    meeting, listing = given.meeting_seconds, given.manifest_seconds_per_rank * job.devices
    extra = f"meeting {format_seconds(meeting)}, manifest of {job.devices:,} ranks {format_seconds(listing)}"
    write = Term(size.value + meeting + listing, f"{size.formula}; {extra}")
    if not copied_bytes:
        return write, write
    copy = copy_stall(copied_bytes, 1, cluster.host_bandwidth or _HOST_BANDWIDTH)
    return write, Term(copy.value + meeting, f"{copy.formula}; meeting {format_seconds(meeting)}")


@dataclass(frozen=True)
class _WeightsSaves:
    """The saves of the weights alone. share: of the time that they leave to steps. bytes: of one; 0 without any."""

    share: float = 1.0
    bytes: float = 0.0
    every_seconds: float = math.inf
    formula: str = ""


def _weights_saves(
    run: RunConfig, cluster: Cluster, given: Assumptions, job: _NodesInUse, step_seconds: float
) -> _WeightsSaves:
    """Return the cost of saves of the weights alone. At Daly's interval ("auto") they come with checkpoints."""
    interval = run.checkpoint.weights_interval
    if interval is None or interval.is_auto:
        return _WeightsSaves()
    size = checkpoint_bytes_of(run.model, run.train.precision, 0).value
    copied = rank_snapshot(run, WEIGHTS).value if given.in_background(run) else 0.0
    _, stall = _stalls(job, cluster, given, size, copied)
    every = interval.in_seconds(step_seconds)
    share = every / (every + stall.value)
    text = f"; the weights alone every {format_seconds(every)}, a stall of {format_seconds(stall.value)}: x {share:.2%}"
    return _WeightsSaves(share, size, every, text)


def _cadence(job: _NodesInUse, given: Assumptions, stall: float, write: float, step: float, productive: float) -> Term:
    """Return the interval between two checkpoints, in seconds of steps: the assumed one, or else Daly's. Daly's is
    raised to at least one step and, if steps continue during a write, one write. A save that is due during a write is
    left out.

    stall, write, step: seconds of a checkpoint's stall, of its write while steps continue, and of a step. productive:
    seconds of all steps.
    """
    best = daly_interval(job.mttf, stall)
    if due := given.checkpoint_every_seconds or given.checkpoint_every_steps * step:
        steps, seconds = f"{given.checkpoint_every_steps:,} steps", format_seconds(given.checkpoint_every_seconds)
        daly = f", Daly's interval is {format_seconds(best)}" if best < productive else ""
        taken = max(math.ceil(write / due), 1)
        skipped = f", of which every {taken}th is saved: a write takes {format_seconds(write)}" if taken > 1 else ""
        interval = seconds if given.checkpoint_every_seconds else steps
        return Term(min(taken * due, productive), f"every {interval}, as given{skipped}{daly}")
    if best >= productive:
        return Term(productive, "only at the end: failures are rarer than the run is long")
    return save_interval(job.mttf, stall, *max((step, "one step"), (write, "the write itself")))


def _usd(
    run: RunConfig,
    cluster: Cluster,
    given: Assumptions,
    job: _NodesInUse,
    days: float,
    stored: float,
    checkpoint_bytes: float,
) -> dict[str, Term]:
    """Return the cost by kind, {} if no device price is known. Token shards are stored for the whole run; egress is the
    transfer of one checkpoint out of the cloud."""
    price = given.usd_per_hour or run.cost.usd_per_hour or cluster.usd_per_hour
    if not price:
        return {}
    source = f" ({cluster.price_source})" if cluster.price_source and price == cluster.usd_per_hour else ""
    devices = device_usd(job.devices, days, price)
    usd = {"devices": Term(devices.value, f"{devices.formula}{source}")}
    if given.spares:
        per_node = 1 if cluster.device == "cpu" else cluster.devices_per_node
        spares = device_usd(given.spares * per_node, days, price)
        usd["spares"] = Term(spares.value, f"{given.spares} spare nodes: {spares.formula}")
    tokens = run.train.steps * run.tokens_per_step
    held = stored + tokens * token_bytes(run.model.vocab_size)
    storage = storage_usd(held, days, given.storage_usd_per_gb_month)
    egress = egress_usd(checkpoint_bytes, given.egress_usd_per_gb)
    listed = (STORAGE_USD_PER_GB_MONTH, EGRESS_USD_PER_GB)
    asked = (given.storage_usd_per_gb_month, given.egress_usd_per_gb)
    where = f" ({STORAGE_PRICE_SOURCE})" if asked == listed else ""
    usd["storage"] = Term(
        storage.value, f"checkpoints kept and {format_count(tokens)} tokens: {storage.formula}{where}"
    )
    usd["egress"] = Term(egress.value, f"one checkpoint is moved out: {egress.formula}{where}")
    return usd


def device_hours(devices: int, days: float) -> float:
    return devices * days * 24


def device_usd(devices: int, days: float, usd_per_hour: float) -> Term:
    """Return the price of `devices` devices (or machines) for `days`. usd_per_hour: price of one of them."""
    hours = device_hours(devices, days)
    usd = hours * usd_per_hour
    formula = f"{devices:,} x {days:,.1f} days x 24 = {format_count(hours)} hours x ${usd_per_hour:g}"
    return Term(usd, f"{formula} = {format_usd(usd)}")


def storage_usd(stored_bytes: float, days: float, usd_per_gb_month: float = STORAGE_USD_PER_GB_MONTH) -> Term:
    gigabytes, months = stored_bytes / GIGABYTE, days / MONTH_DAYS
    usd = gigabytes * months * usd_per_gb_month
    formula = f"{gigabytes:,.0f} GB x {months:.2f} months x ${usd_per_gb_month:g}"
    return Term(usd, f"{formula} = {format_usd(usd)}")


def egress_usd(moved_bytes: float, usd_per_gb: float = EGRESS_USD_PER_GB) -> Term:
    usd = moved_bytes / GIGABYTE * usd_per_gb
    return Term(usd, f"{moved_bytes / GIGABYTE:,.0f} GB x ${usd_per_gb:g} = {format_usd(usd)}")
