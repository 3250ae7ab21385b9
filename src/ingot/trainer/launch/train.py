"""`ingot train` as a function: prepare the run, then train in this process, or keep the job of its ranks running."""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ingot.machine.facts import usable_cores
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import Job, RunFolder
from ingot.storage import full_disk_named
from ingot.trainer.given import NOTHING_GIVEN, GivenCallbacks
from ingot.trainer.interrupts import PendingSignals
from ingot.trainer.launch.evaluations import BackgroundEvaluations, require_lm_eval
from ingot.trainer.launch.folder_watch import FolderWatch
from ingot.trainer.launch.health import HealthWatch
from ingot.trainer.launch.job_here import JobHere
from ingot.trainer.launch.layouts import open_layouts
from ingot.trainer.launch.leading import leading
from ingot.trainer.launch.node import follow, lead_or_follow
from ingot.trainer.launch.node_messages import own_facts
from ingot.trainer.launch.observing import observers_of, observing
from ingot.trainer.launch.outcome import JobResult
from ingot.trainer.launch.prepare import RunRequest
from ingot.trainer.launch.supervise import supervise
from ingot.trainer.lease import open_lease
from ingot.trainer.mesh.start import worker_environment
from ingot.trainer.resilience.lock import RunLock

WORKER = "ingot.trainer.main"  # the module that every rank runs
PRELOAD = ("ingot.trainer.run",)  # what it imports, with torch
# Called with the folder of the run file, the run folder and the run.
PlanFallbacks = Callable[[Path, RunFolder, RunConfig], None]


def train(
    run_file: Path,
    out: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    accept: Collection[str] = (),
    fresh: bool = False,
    archive: bool = False,
    until_step: int | None = None,
    given: GivenCallbacks = NOTHING_GIVEN,
    quiet: bool = False,
    say: Callable[[str], None] = lambda text: None,
    plan_fallbacks: PlanFallbacks | None = None,
) -> JobResult:
    """Start the run of `run_file` in folder `out`, or continue the run that is there.

    run_file: a run file, or the folder of a run. out: the run folder (default: `runs/NAME` next to the run file).
    overrides: settings as "a.b=c". accept: the keys of settings whose change is confirmed for the existing run. fresh:
    start at step 0; with `archive`, an existing run is moved aside, otherwise an error. until_step: the step to save
    and stop after. given: callbacks in Python; with them, a run with one rank trains in this process. quiet: the ranks
    print nothing. say: called with each line of progress. plan_fallbacks: writes the fallback layouts of the run
    (schema/fallbacks.py) before ranks start; None: those that the folder has are used.

    Raises any IngotError; KeyboardInterrupt after a second Ctrl-C.
    """
    began = time.monotonic()
    request = RunRequest(
        run_file,
        out,
        overrides=overrides,
        accept=accept,
        fresh=fresh,
        archive=archive,
        until_step=until_step,
        given=given,
    )
    folder, config, nodes = request.folder, request.written, request.written.launch.nodes
    require_lm_eval(config)
    here = bool(given) and config.parallel.world_size == 1
    references = [] if here else given.references()

    health = None if here else HealthWatch(config.launch, say, own=folder.health_reports)

    def job_of(terms: Mapping[str, Any]) -> Job:
        return training_job(folder, config, **terms, quiet=quiet, callbacks=references)

    def lead(signals: PendingSignals) -> JobResult:
        watching: contextlib.AbstractContextManager[FolderWatch | None]
        watching = contextlib.nullcontext() if here else FolderWatch(folder.root, config.launch)
        with watching as watch, RunLock(folder.lock), open_lease(folder, request.config) as lease, ExitStack() as ends:
            if ended := request.prepare(lease, say):
                return ended
            observers = observers_of(folder, config, quiet=quiet)
            at_end = ends.enter_context(observing(folder, observers, signals, say))
            if plan_fallbacks is not None and not here:
                plan_fallbacks(request.path.parent, folder, config)
            terms = {"epoch": lease.epoch, "until_step": until_step}
            job, launch = job_of(terms), config.launch
            evaluations = BackgroundEvaluations(folder, config, ranks=job.processes, say=say)
            at_end(evaluations.close)
            if here:
                from ingot.trainer.launch.here import train_here  # only this imports torch

                return train_here(folder, job.env, launch, **terms, given=given, say=say)
            layouts = open_layouts(folder, config)
            if layouts.adapted:
                say(f"memory    goes on with {' '.join(layouts.adapted)}   as since a rank ran out of memory")
            running = JobHere(folder, job, launch, layouts=layouts, show_output=not quiet, health=health, say=say)
            if watch is not None:
                watch.kills(running.kill)
            signals.catch()  # from here on, none of them ends this process before its run has ended
            options = {"lease": lease, "watch": watch, "began": began, "received": signals.received, "say": say}
            if nodes == 1:
                if launch.spares:
                    say(f"note      launch.spares = {launch.spares} has no effect on a run with launch.nodes = 1")
                return supervise(folder, running, launch, **options)
            facts = own_facts(config)
            with leading(folder, running, launch, layouts, terms=terms, facts=facts, signals=signals, say=say) as job:
                result = supervise(folder, job, launch, **options)
                job.part(result.facts())
                return result

    def join(signals: PendingSignals) -> JobResult:
        return follow(folder, config.launch, own_facts(config), job_of, signals=signals, say=say, health=health)

    with (
        full_disk_named(folder.root),
        contextlib.closing(health) if health else contextlib.nullcontext(),
        PendingSignals() as signals,
    ):
        return lead(signals) if nodes == 1 else lead_or_follow(lead, join, folder, config.launch, signals)


def training_job(
    folder: RunFolder,
    config: RunConfig,
    *,
    epoch: int = 0,
    until_step: int | None = None,
    quiet: bool = False,
    callbacks: Sequence[tuple[str, str]] = (),
) -> Job:
    """Describe the job that trains the run in `folder`, to its end or `until_step`, independently of a launcher; of a
    run on several nodes, the part of one.

    Rank 0 prints progress lines unless `quiet`. epoch: the number of this attempt (checkpoint/fence.py). callbacks:
    (folder, "module:Class") of each given callback.
    """
    nodes = config.launch.nodes
    processes = config.parallel.world_size // nodes
    until = [] if until_step is None else ["--until-step", str(until_step)]
    own = [word for reference in callbacks for word in ("--callback", *reference)]
    arguments = (str(folder.root), "--epoch", str(epoch), *until, *(["--quiet"] if quiet else []), *own)
    env = worker_environment(max(most_ranks(config.parallel) // nodes, 1), usable_cores())  # a container's CPU quota
    if nodes == 1 and Path("/sys/class/net/lo").exists():
        # Ranks of one machine communicate over loopback: the host name does not matter, and no other host can connect.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    if config.launch.restart == "partial":
        # torch's own watchdog ends a process whose communicators fail. The supervisor has another one.
        env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    return Job(module=WORKER, arguments=arguments, processes=processes, env=env, preload=PRELOAD)


def most_ranks(parallel: Parallel) -> int:
    """Return the number of ranks among which the cores are divided.

    The bits of a matrix product with few rows depend on the number of threads. With canonical sums, a rank therefore
    always gets the number of threads that it has with the largest number of replicas.
    """
    if parallel.reduce != "canonical":
        return parallel.world_size
    return parallel.world_size // parallel.dp_replicate * parallel.virtual_ranks
