"""How a layout divides a model: what "auto" means, which blocks a stage has, which parameters a rank holds.

And the rules of layouts that need such figures; those that do not are in schema/layout_rules.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ingot.errors import ConfigError
from ingot.schema.arch import Arch
from ingot.schema.parallel import V_SHAPED, Parallel
from ingot.schema.run import RunConfig, Train
from ingot.theory.context import resolve_context
from ingot.theory.params import block_mlp_parameters, count_parameters
from ingot.theory.schedule import Table, build_table, schedule_problems

# Below this many parameters, splitting them saves less memory than the collectives cost that bring them together.
WHOLE_PARAMETERS = 20_000_000


def resolve_parallel(run: RunConfig) -> Parallel:
    """`run.parallel` with every "auto" decided: `zero`, `unit_layers`, the form of context parallelism, and of a
    pipeline its stages and their blocks."""
    parallel = run.parallel
    if parallel.zero == "auto":
        parallel = replace(parallel, zero=automatic_zero(run.model, parallel))
    if parallel.unit_layers == "auto":
        parallel = replace(parallel, unit_layers=0 if count_parameters(run.model) < WHOLE_PARAMETERS else 1)
    if parallel.cp > 1:
        parallel = resolve_context(run.model, run.train, parallel)
    if parallel.pp > 1:
        layers, each = stage_layers(parallel, run.model.num_layers), parallel.stages_on_each_rank
        parallel = replace(parallel, stage_layers=layers, stages_per_rank=each)
    return parallel


def automatic_zero(arch: Arch, parallel: Parallel) -> int:
    """3 where parameters are worth splitting. A pipeline would gather them anew for each of its micro-batches."""
    whole = parallel.dp_shard == 1 or parallel.pp > 1 or count_parameters(arch) < WHOLE_PARAMETERS
    return 1 if whole else 3


def stage_layers(parallel: Parallel, num_layers: int) -> tuple[int, ...]:
    """Blocks of each stage, in order. What does not divide goes to middle stages: the ends have embedding and head."""
    if parallel.stage_layers:
        return parallel.stage_layers
    each, left = divmod(num_layers, parallel.stages)
    first = (parallel.stages - left) // 2
    return tuple(each + (first <= stage < first + left) for stage in range(parallel.stages))


def rank_of_stage(parallel: Parallel) -> tuple[int, ...]:
    """The pipeline rank that holds each stage, as in the tables of theory/schedule."""
    last, v_shaped = 2 * parallel.pp - 1, parallel.pp > 1 and parallel.schedule in V_SHAPED
    return tuple(min(s, last - s) if v_shaped else s % parallel.pp for s in range(parallel.stages))


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage holds of the model on one tp rank, counted in parameters.

    layers: the numbers of its blocks. block: parameters of each. embedding, norm (the last one), head: 0 where absent.
    A tied matrix counts on the first stage as embedding and on the last as head, once where one rank has both.
    partial: those that every tp rank holds alike but applies to its own tokens or heads: their gradients are summed.
    """

    number: int
    first: bool
    last: bool
    layers: range
    block: int
    embedding: int
    norm: int
    head: int
    partial: int

    @property
    def outside(self) -> int:
        """Parameters outside of blocks."""
        return self.embedding + self.norm + self.head

    @property
    def parameters(self) -> int:
        return len(self.layers) * self.block + self.outside


@dataclass(frozen=True)
class Position:
    """One pipeline rank of a run: what it holds and does. The other axes differ in nothing that is counted here.

    parallel: resolved. accumulation: micro-batches per step.
    """

    arch: Arch
    train: Train
    parallel: Parallel
    accumulation: int
    rank: int
    stages: tuple[Stage, ...]

    @property
    def parameters(self) -> int:
        return sum(stage.parameters for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.train.micro_batch * self.train.seq_len

    @property
    def sequence_ranks(self) -> int:
        """By how many the tokens are cut between the regions of tensor parallelism."""
        return self.parallel.tp if self.parallel.sequence else 1

    @cached_property
    def table(self) -> Table:
        parallel = self.parallel
        name = parallel.schedule if parallel.pp > 1 else "1f1b"
        return build_table(name, parallel.pp, self.accumulation, parallel.stages_on_each_rank)

    def recomputed(self, stage: Stage) -> int:
        """How many blocks of `stage` are recomputed (parallel/recompute.py)."""
        if self.parallel.recompute == "none":
            return 0
        return sum(layer % self.parallel.recompute_every == 0 for layer in stage.layers)

    def units(self, stage: Stage) -> int:
        """Groups of parameters that are gathered and reduced together (parallel/units.py)."""
        if self.parallel.unit_blocks == 0:
            return 1
        return (stage.outside > 0) + -(-len(stage.layers) // self.parallel.unit_blocks)


def positions(run: RunConfig) -> tuple[Position, ...]:
    """One for each pipeline rank of a run without problems."""
    parallel = resolve_parallel(run)
    stages = [_stage(run.model, parallel, number) for number in range(parallel.stages)]
    owner = rank_of_stage(parallel)
    return tuple(
        Position(
            arch=run.model,
            train=run.train,
            parallel=parallel,
            accumulation=run.accumulation,
            rank=rank,
            stages=tuple(stage for stage in stages if owner[stage.number] == rank),
        )
        for rank in range(parallel.pp)
    )


def _stage(arch: Arch, parallel: Parallel, number: int) -> Stage:
    layers, tp = stage_layers(parallel, arch.num_layers), parallel.tp
    first, last, owner = number == 0, number == parallel.stages - 1, rank_of_stage(parallel)
    splits_kv = arch.num_kv_heads % tp == 0  # else every rank holds all key/value heads
    per_head = 2 * arch.head_dim if arch.qk_norm else 0
    queries = 2 * arch.d_model * arch.head_dim * arch.num_heads // tp
    keys = 2 * arch.d_model * arch.head_dim * arch.num_kv_heads // (tp if splits_kv else 1)
    vocabulary = arch.vocab_size * arch.d_model // tp
    stream = arch.d_model if parallel.sequence else 0  # norms between regions see a part of the tokens
    partial = layers[number] * (2 * stream + per_head + (0 if splits_kv else keys)) + (stream if last else 0)
    start = sum(layers[:number])
    return Stage(
        number=number,
        first=first,
        last=last,
        layers=range(start, start + layers[number]),
        block=queries + keys + block_mlp_parameters(arch) // tp + 2 * arch.d_model + per_head,
        embedding=vocabulary if first else 0,
        norm=arch.d_model if last else 0,
        head=vocabulary if last and not (arch.tied_embeddings and owner[0] == owner[-1]) else 0,
        partial=partial if tp > 1 else 0,
    )


def layout_problems(run: RunConfig) -> Iterator[tuple[str, str]]:
    """(dotted key, what is wrong and the way out) for every rule of layouts, also those of the run file's reader."""
    known = [(f"parallel.{name}", message) for name, message in run.parallel.problems()] + list(run.problems())
    yield from known
    if not known:
        yield from derived_problems(run)


def derived_problems(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Those of `layout_problems` that only this module sees. `run` has no other problems."""
    parallel = run.parallel
    if parallel.pp > 1:
        name, each = parallel.schedule, parallel.stages_per_rank
        for message in schedule_problems(name, parallel.pp, run.accumulation, each):
            yield "parallel.schedule", message
    zero = resolve_parallel(run).zero
    if parallel.offload_parameters and zero != 3:
        yield "parallel.offload_parameters", f'needs zero 3, and zero = "auto" means {zero} here; set parallel.zero = 3'


def require_layout(run: RunConfig) -> None:
    """Raises ConfigError with all problems of the layout, before anything is built for it."""
    problems = [f"{key}: {message}" for key, message in layout_problems(run)]
    if problems:
        raise ConfigError("\n".join(problems), fix="`ingot check` shows all problems of a run file with their lines")
