"""The way a layout divides a model: the values that "auto" means, the blocks of a stage, the parameters of a rank.

Rules of layouts that need these numbers are here too; all other rules of layouts are in theory/rules.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ingot.errors import ConfigError
from ingot.plugins.callback import CALLBACKS
from ingot.plugins.loss import LOSS_TERMS
from ingot.plugins.optimizer import OPTIMIZERS
from ingot.schema.arch import Arch
from ingot.schema.parallel import V_SHAPED, Parallel
from ingot.schema.run import RunConfig, Train
from ingot.schema.software import INGOT, Software
from ingot.theory.context import resolve_context
from ingot.theory.params import (
    block_attention_parameters,
    block_mlp_parameters,
    block_norm_parameters,
    count_parameters,
    expert_parameters,
    last_norm_parameters,
    latent_down_parameters,
    router_parameters,
    shared_parameters,
    stream_norm_parameters,
)
from ingot.theory.rules import run_problems
from ingot.theory.schedule import ScheduleTable, build_table, schedule_problems

# The parameters that stand for all matrices of a block, and for those of routed experts, in `OptimizerPart.moments`.
BLOCK_NAME, EXPERT_NAME = "blocks.0.attention.q.weight", "blocks.0.moe.experts.up.weight"
# Below this many parameters, splitting them is not worth its collectives, because it saves little memory.
WHOLE_PARAMETERS = 20_000_000


def resolve_parallel(run: RunConfig) -> Parallel:
    """Return `run.parallel` with every "auto" decided: `zero`, `unit_layers`, the form of context parallelism, and for
    a pipeline the number of stages and the blocks of each.
    """
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
    """Return ZeRO stage 3 if the parameters are worth splitting, else 1. With a pipeline it is 1, because stage 3 would
    gather parameters for each micro-batch.
    """
    whole = parallel.shard_ranks == 1 or parallel.pp > 1 or count_parameters(arch) < WHOLE_PARAMETERS
    return 1 if whole else 3


def stage_layers(parallel: Parallel, num_layers: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage, in order.

    The remainder goes to the middle stages, because the first and last stages have the embedding and the head.
    """
    if parallel.stage_layers:
        return parallel.stage_layers
    each, left = divmod(num_layers, parallel.stages)
    first = (parallel.stages - left) // 2
    return tuple(each + (first <= stage < first + left) for stage in range(parallel.stages))


def rank_of_stage(parallel: Parallel) -> tuple[int, ...]:
    """Return the pipeline rank that holds each stage, as in the tables of theory/schedule."""
    last, v_shaped = 2 * parallel.pp - 1, parallel.pp > 1 and parallel.schedule in V_SHAPED
    return tuple(min(s, last - s) if v_shaped else s % parallel.pp for s in range(parallel.stages))


@dataclass(frozen=True)
class PipelineStage:
    """The part of the model that one pipeline stage holds on one tp rank, counted in parameters.

    layers: the indices of its blocks; expert_layers: the indices of its blocks with experts.
    block, expert_block: parameters of a block without experts, and of a block with experts but without its routed
      experts. experts: parameters of this rank's routed experts in one block.
    embedding, norm (the last one), head: 0 if the stage does not have it. A tied matrix counts on the first stage as
      embedding and on the last as head, but only once if the same rank has both.
    partial: parameters that every tp rank holds whole but applies only to its own tokens or heads, so that their
      gradients are summed over tp.
    """

    number: int
    first: bool
    last: bool
    layers: range
    expert_layers: range
    block: int
    expert_block: int
    experts: int
    embedding: int
    norm: int
    head: int
    partial: int

    @property
    def outside(self) -> int:
        """The parameters outside blocks."""
        return self.embedding + self.norm + self.head

    def block_parameters(self, layers: range) -> int:
        """Return the parameters of the stage's blocks `layers`, with routed experts."""
        sparse = len([layer for layer in layers if layer in self.expert_layers]) if self.expert_layers else 0
        return (len(layers) - sparse) * self.block + sparse * (self.expert_block + self.experts)

    @property
    def common(self) -> int:
        """All parameters except routed experts. The ranks of the "shard" view (trainer/mesh) divide them."""
        return self.block_parameters(self.layers) - self.routed + self.outside

    @property
    def routed(self) -> int:
        """The parameters of routed experts. The ranks of the "expert_shard" view (trainer/mesh) divide them."""
        return len(self.expert_layers) * self.experts

    @property
    def parameters(self) -> int:
        """All parameters of the stage."""
        return self.block_parameters(self.layers) + self.outside


# Rows of blocks of a fixed size, over those that equal loads keep, at most. With more, much of what is sent and
# computed is fill, which costs more than a host that waits for the counts.
MOST_BLOCK_ROWS = 1.5


def fixed_expert_rows(
    tokens: int, top_k: int, ranks: int, experts: int, most_rows: int, even_rows: float
) -> int | None:
    """Return the number of rows of a block that holds all rows of one rank for another one, whatever is routed; None if
    the blocks of a rank would have more than MOST_BLOCK_ROWS times the rows of equal loads.

    tokens: those routed on a rank, each to `top_k` of all `experts`, which `ranks` ranks divide. most_rows: the largest
    number of these tokens that one expert keeps; even_rows: the same if the ranks that share sequences share the
    capacity evenly.
    """
    each = experts // ranks
    rows = min(tokens * min(top_k, each), each * most_rows)
    return rows if ranks * rows <= MOST_BLOCK_ROWS * min(tokens * top_k, experts * even_rows) else None


@dataclass(frozen=True)
class Position:
    """One pipeline rank of a run, with its part of the model. Ranks that differ only on other axes have the same
    counts.

    parallel: settings with every "auto" decided. accumulation: micro-batches per step. rank: index on the axis pp.
    software: the training system that executes the run. optimizer: the registered one, by name.
    callback_tensors: the number of tensors that callbacks keep per parameter. term_tensors: for each loss term, the
    number of tensors of the logits' shape that it adds to a chunk of the loss; terms run one after the other.
    """

    arch: Arch
    train: Train
    parallel: Parallel
    accumulation: int
    rank: int
    stages: tuple[PipelineStage, ...]
    software: Software = INGOT
    optimizer: str = "adamw"
    callback_tensors: int = 0
    term_tensors: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(stage.parameters for stage in self.stages)

    @property
    def common(self) -> int:
        return sum(stage.common for stage in self.stages)

    @property
    def routed(self) -> int:
        return sum(stage.routed for stage in self.stages)

    @property
    def tokens(self) -> int:
        """The number of tokens of one micro-batch on this rank; context-parallel ranks divide its sequences."""
        return self.train.micro_batch * self.train.seq_len // self.parallel.cp

    @property
    def sequence_ranks(self) -> int:
        """The number of tp ranks that divide the tokens outside attention and feed-forward: 1 unless `sequence`."""
        return self.parallel.tp if self.parallel.sequence else 1

    @property
    def assignments(self) -> float:
        """The number of rows that this rank sends to the experts of one block for one micro-batch. With equal loads,
        its own experts receive as many.

        There are top_k rows per token. With a capacity there are as many as it can keep at most, even if fewer are kept
        (model/experts.py, parallel/expert.py).
        """
        moe, seq_len, ranks = self.arch.moe, self.train.seq_len, self.parallel.ep
        tokens = self.tokens // self.sequence_ranks
        assignments = self.tokens / self.sequence_ranks * moe.top_k
        if not moe.capacity_factor:
            return assignments
        capacity, micro_batch = moe.capacity(seq_len), self.train.micro_batch
        most_rows, even_rows = micro_batch * min(capacity, tokens // micro_batch), capacity * tokens / seq_len
        if ranks == 1:
            return min(assignments, moe.num_experts * most_rows)
        fixed = fixed_expert_rows(tokens, moe.top_k, ranks, moe.num_experts, most_rows, even_rows)
        return min(assignments, moe.num_experts * even_rows) if fixed is None else ranks * fixed

    @cached_property
    def common_moments(self) -> float:
        """The mean number of state tensors per parameter, with those of callbacks, routed experts left out."""
        moments, norms = OPTIMIZERS[self.optimizer].moments, block_norm_parameters(self.arch)
        total = 0.0
        for stage in self.stages:
            of_norms = len(stage.layers) * norms
            total += stage.embedding * moments("embed.weight", 2) + stage.head * moments("head.weight", 2)
            total += stage.norm * moments("norm.weight", 1) + of_norms * moments("blocks.0.attention_norm.weight", 1)
            total += (stage.common - stage.outside - of_norms) * moments(BLOCK_NAME, 2)
        return total / self.common + self.callback_tensors if self.common else 0.0

    @cached_property
    def expert_moments(self) -> float:
        """The number of state tensors per parameter of routed experts, with those of callbacks."""
        return OPTIMIZERS[self.optimizer].moments(EXPERT_NAME, 2) + self.callback_tensors

    @cached_property
    def table(self) -> ScheduleTable:
        parallel = self.parallel
        name = parallel.schedule if parallel.pp > 1 else "1f1b"
        return build_table(name, parallel.pp, self.accumulation, parallel.stages_on_each_rank)

    def recomputed(self, stage: PipelineStage) -> int:
        """Return how many blocks of `stage` are recomputed (parallel/recompute.py)."""
        return self._recomputed(stage.layers)

    def recomputed_with_experts(self, stage: PipelineStage) -> int:
        """Return how many of the blocks of `stage` that have experts are recomputed."""
        return self._recomputed(stage.expert_layers)

    def _recomputed(self, layers: range) -> int:
        if self.parallel.recompute == "none":
            return 0
        every = self.parallel.recompute_every
        return len(layers) if every == 1 else sum(layer % every == 0 for layer in layers)

    def groups(self, stage: PipelineStage) -> list[range]:
        """Return the blocks of `stage` in groups that are gathered and reduced together. unit_layers = 0: all blocks
        are one group.
        """
        size = self.parallel.unit_blocks or max(len(stage.layers), 1)
        return [stage.layers[i : i + size] for i in range(0, len(stage.layers), size)]

    def common_units(self, stage: PipelineStage) -> int:
        """Return the number of units of `stage` (parallel/units.py) that do not consist of routed experts."""
        if self.parallel.unit_blocks == 0:
            return 1
        return (stage.outside > 0) + len(self.groups(stage))

    def expert_units(self, stage: PipelineStage) -> int:
        """Return the number of units of routed experts: one per group of blocks with experts. They are units of their
        own because other ranks divide them.
        """
        sparse = stage.expert_layers
        if not sparse:
            return 0
        return sum(any(layer in sparse for layer in group) for group in self.groups(stage))

    def units(self, stage: PipelineStage) -> int:
        return self.common_units(stage) + self.expert_units(stage)


def positions(run: RunConfig, software: Software = INGOT) -> tuple[Position, ...]:
    """Return one Position for each pipeline rank of a run that has no problems."""
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
            software=software,
            optimizer=run.optim.kind,
            callback_tensors=callback_tensors(run),
            term_tensors=tuple(LOSS_TERMS[name].tensors for name in run.loss),
        )
        for rank in range(parallel.pp)
    )


def callback_tensors(run: RunConfig) -> int:
    """Return the number of tensors that the callbacks of a run keep per parameter."""
    return sum(CALLBACKS[name].pieces for name in run.callbacks)


def _stage(arch: Arch, parallel: Parallel, number: int) -> PipelineStage:
    layers, tp = stage_layers(parallel, arch.num_layers), parallel.tp
    first, last, owner = number == 0, number == parallel.stages - 1, rank_of_stage(parallel)
    start = sum(layers[:number])
    own = range(start, start + layers[number])
    sparse = range(max(own.start, arch.expert_layers.start), own.stop) if arch.is_moe else range(own.stop, own.stop)
    vocabulary = arch.vocab_size * arch.d_model // tp
    norms = block_norm_parameters(arch)
    last_norm, between = last_norm_parameters(arch), stream_norm_parameters(arch)
    of_heads = _shared_by_heads(arch, tp) + norms - between  # each tp rank applies them to its own heads
    stream = int(parallel.sequence)  # norms between regions see only a part of the tokens
    routing = _routing_of_rank(arch)
    partial = len(own) * (of_heads + stream * between) + len(sparse) * routing + (stream * last_norm if last else 0)
    around = attention_matrices(arch, tp) + norms
    return PipelineStage(
        number=number,
        first=first,
        last=last,
        layers=own,
        expert_layers=sparse,
        block=around + block_mlp_parameters(arch) // tp,
        expert_block=around + routing + shared_parameters(arch) // tp,
        experts=arch.moe.num_experts // parallel.ep * expert_parameters(arch),
        embedding=vocabulary if first else 0,
        norm=last_norm if last else 0,
        head=vocabulary if last and not (arch.tied_embeddings and owner[0] == owner[-1]) else 0,
        partial=partial if tp > 1 else 0,
    )


def _shared_by_heads(arch: Arch, tp: int) -> int:
    """Return the parameters of one attention's matrices that every tp rank holds whole: the down matrices of latents,
    or the key/value matrices if there are fewer key/value heads than ranks.
    """
    if arch.is_mla:
        return latent_down_parameters(arch)
    return 2 * arch.d_model * arch.head_dim * arch.num_kv_heads if arch.num_kv_heads % tp else 0


def attention_matrices(arch: Arch, tp: int) -> int:
    """Return the number of parameters of one attention's matrices on one tp rank."""
    alike = _shared_by_heads(arch, tp)
    return alike + (block_attention_parameters(arch) - alike) // tp


def _routing_of_rank(arch: Arch) -> int:
    """Return the parameters of the router and the expert for overflow. Each tp rank holds both whole and applies them
    to its own tokens.
    """
    return router_parameters(arch) + (expert_parameters(arch) if arch.moe.has_fallback else 0)


def layout_problems(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, problem and fix) for every broken rule of a run: the rules of the run file, then those of
    layouts.
    """
    known = [(f"parallel.{name}", message) for name, message in run.parallel.problems()] + list(run_problems(run))
    yield from known
    if not known:
        yield from derived_problems(run)


def derived_problems(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the problems that need derived numbers. `run` must have no other problems."""
    parallel = run.parallel
    if parallel.pp > 1:
        name, each = parallel.schedule, parallel.stages_per_rank
        for message in schedule_problems(name, parallel.pp, run.accumulation, each):
            yield "parallel.schedule", message
    zero = resolve_parallel(run).zero
    if parallel.offload_parameters and zero != 3:
        yield "parallel.offload_parameters", f'needs zero 3, but zero = "auto" means {zero} here; set parallel.zero = 3'


def require_layout(run: RunConfig) -> None:
    """Raise ConfigError with all problems of the layout, if it has any. Call this before anything is built."""
    found = list(layout_problems(run))
    if found:
        raise ConfigError(
            "E-LAYOUT-ILLEGAL",
            "\n".join(f"{key}: {message}" for key, message in found),
            rule="degrees divide the model, the batch and the sequences, and options fit together; nothing was started",
            fix="change the settings above; `ingot check RUN_FILE` shows them with their lines",
            keys=[key for key, _ in found],
        )
