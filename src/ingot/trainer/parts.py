"""The parts of a training run as two dataclasses: what one step needs, and what a whole run needs."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from ingot.events import EventLog
from ingot.schema.checkpoint import LedgerSegment
from ingot.schema.quarantine_record import Quarantined
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.tokenizer.encoder import Encoder
from ingot.trainer.callbacks import Callbacks
from ingot.trainer.checkpoint.background import BackgroundSaver
from ingot.trainer.checkpoint.files import CheckpointFacts
from ingot.trainer.checkpoint.load import FetchInstead
from ingot.trainer.checkpoint.nodes import FetchFile
from ingot.trainer.checkpoint.state import TrainingState
from ingot.trainer.checkpoint.uploader import Uploader
from ingot.trainer.guard.alerts import AlertWatch
from ingot.trainer.guard.gradient_range import GradientRange
from ingot.trainer.guard.sanity import SanityJudge
from ingot.trainer.guard.step_judge import StepJudge
from ingot.trainer.heldout import Heldout
from ingot.trainer.integrity.recompute import RecomputedGradients
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.loader.ledger import Ledger
from ingot.trainer.loader.loader import Loader
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.mesh.waiting import WaitClock
from ingot.trainer.optim.gradients import LossScale
from ingot.trainer.optim.optimizer import Optimizer
from ingot.trainer.optim.update_size import UpdateSize
from ingot.trainer.parallel.apply import ShardedModel
from ingot.trainer.parallel.balance import Balance
from ingot.trainer.parallel.pipeline import PipelineExecutor
from ingot.trainer.resilience.heartbeat import Heartbeat
from ingot.trainer.resilience.policy import Policy
from ingot.trainer.resilience.start_times import StartClock
from ingot.trainer.resilience.stop_vote import StopVote
from ingot.trainer.retry import StepRetry
from ingot.trainer.save_schedule import SaveSchedule
from ingot.trainer.telemetry.layer_sizes import LayerSizes
from ingot.trainer.telemetry.recorder import Recorder
from ingot.trainer.telemetry.route_flips import RouteFlips
from ingot.trainer.telemetry.slow_machines import SlowMachines
from ingot.trainer.telemetry.source_loss import SourceLoss
from ingot.trainer.telemetry.stragglers import StragglerWatch
from ingot.trainer.telemetry.usage import CostMeter


@dataclass(kw_only=True)
class StepParts:
    """The parts of one training step on this rank: the same in a run, a proof, a benchmark and a dry run.

    program: runs micro-batches through the pipeline's stages (one stage without pipeline parallelism).
    loss_scale: None except in fp16. state: the tensors that a checkpoint holds.
    readers: one global rank per part of the batch, in order; each knows the loss of its part.
    token_readers: all global ranks that read different tokens. loss_share: the part of this rank's loss in the loss of
    the step, 0 on ranks that are no token reader. balance: the load balancing of experts, None without experts.
    step_judge: judges the step before its update; None in a run with [guard] preset = "off", and where nobody looks.
    hashes: those of the state, None outside of a run and with guard.hash_every = 0. gradients: those that two ranks
    compute, None outside of a run and with guard.recompute_every = 0.
    gradient_range: that of each layer, None outside of a run, and where nothing is measured. update_size: that of the
    weights and of updates, layer_sizes: those of each layer; both None outside of a run, and with metrics.record =
    false. retry: tries steps again in which the guard found something; None outside of a run, and without guard.retry.
    """

    config: RunConfig
    mesh: Mesh
    model: ShardedModel
    program: PipelineExecutor
    optimizer: Optimizer
    loss_scale: LossScale | None
    state: TrainingState
    policy: Policy
    readers: list[int]
    token_readers: list[int]
    loss_share: float
    step_judge: StepJudge | None
    balance: Balance | None
    callbacks: Callbacks
    hashes: StateHashes | None = None
    gradients: RecomputedGradients | None = None
    gradient_range: GradientRange | None = None
    update_size: UpdateSize | None = None
    layer_sizes: LayerSizes | None = None
    retry: StepRetry | None = None


@dataclass(kw_only=True)
class RunParts(StepParts):
    """The parts of a run on this rank. The loop (loop.py) drives them.

    place: the rank and device of this process. background: None if training waits for saves. uploader: None except on
    rank 0 of a run with a remote tier. fetch_instead: fetches a checkpoint in place of a damaged one, on rank 0
    (tiers.py). fetch_file: fetches a file of one to a disk of this node; None without a store or without
    checkpoint.disks.
    segments: the ledger segments that checkpoints hold so far. quarantine: the tokens that the run leaves out.
    tokens_per_byte: tokens per UTF-8 byte of the training text.
    flops_per_token: forward and backward, with causal attention (theory/flops.py). peak_flops: the published peak of
    all devices together, FLOP/s; None if unknown.
    first_step: the next step to run. until_step: the step to stop after, by default the last.
    stop_vote: the agreement of the ranks to stop. schedule: decides when saves are due. save_seconds: the time of the
    last full save from the copy of the state to the published checkpoint; 0 before the first one of this process.
    heartbeat: where this rank is, for the supervisor's watchdog. clock: the time of the start by phase.
    left_out: how many saves of this process were left out because an earlier one was being written; left_out_shown:
    those of them that a line has shown.
    sanity: judges weights by held-out text before they are saved; None: nobody does.
    waits: how long this rank waits for others. stragglers: finds slow ranks, on rank 0; None if that is off.
    slow_machines: decides for which of them the machine may be drained; None if none may. alerts: of the guard; None
    with [guard] preset = "off".
    recorder: of the numbers of this rank; None with metrics.record = false. source_loss: the loss by data source; None
    without a recorder, and for one source. route_flips: of experts; None without a recorder or without experts.
    log: writes an event. say: prints a line for people. Both do nothing except on rank 0. event_log: of every rank.
    """

    folder: RunFolder
    place: RankInfo
    loader: Loader
    ledger: Ledger
    segments: list[LedgerSegment]
    quarantine: tuple[Quarantined, ...]
    checkpoint_facts: CheckpointFacts
    background: BackgroundSaver | None
    uploader: Uploader | None
    fetch_instead: FetchInstead
    fetch_file: FetchFile | None
    heldout: Heldout | None
    encoder: Encoder | None
    sanity: SanityJudge | None
    cost: CostMeter
    tokens_per_byte: float
    flops_per_token: float
    peak_flops: float | None
    first_step: int
    until_step: int
    stop_vote: StopVote
    schedule: SaveSchedule
    heartbeat: Heartbeat
    clock: StartClock
    waits: WaitClock
    stragglers: StragglerWatch | None
    slow_machines: SlowMachines | None
    alerts: AlertWatch | None
    recorder: Recorder | None
    source_loss: SourceLoss | None
    route_flips: RouteFlips | None
    event_log: EventLog
    log: Callable[..., None]
    say: Callable[[str], None]
    save_seconds: float = 0.0
    left_out: int = 0
    left_out_shown: int = 0

    def close(self) -> None:
        """End the threads, close the files and release the model. Raises ResourceError if a thread hangs in a read."""
        self.waits.stop()
        others = (self.recorder, self.model, self.optimizer, self.uploader, self.background, self.loader)
        with contextlib.ExitStack() as ends:  # the last one is closed first, and all are, whatever one of them raises
            for part in (self.event_log, *others):
                if part is not None:
                    ends.callback(part.close)
