"""A complete run file for a model, a number of tokens and a cluster, with the rule that chose each value."""

from dataclasses import dataclass, replace

from ingot.errors import ConfigError
from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.planner.run.scaling import (
    MAX_USEFUL_EPOCHS,
    compute_optimal_tokens,
    least_warmup_steps,
    suggested_batch_tokens,
    suggested_learning_rate,
    warmup_steps,
)
from ingot.planner.search.candidates import MEMORY_SHARE
from ingot.planner.search.space import MICRO_BATCH_TOKENS
from ingot.ranges import Factor, Steps
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.run import Checkpoint, Cost, Data, Evaluate, Optim, RunConfig, Schedule, Train, WatchSettings
from ingot.theory.layout import WHOLE_PARAMETERS
from ingot.theory.params import count_active_parameters, count_parameters
from ingot.theory.rules.expert import legal_ep
from ingot.units import format_count


@dataclass(frozen=True, kw_only=True)
class Hints:
    """Settings known to work with a model, or asked for by the user. A rule chooses those that are 0. why: the source
    of the settings."""

    steps: Steps = 0
    seq_len: Steps = 0
    global_batch: Steps = 0
    lr: Factor = 0.0
    why: str = ""


NO_HINTS = Hints()


@dataclass(frozen=True, kw_only=True)
class ProposedRun:
    """A proposed run. reasons: why a value was chosen, by its dotted key in the run file."""

    run: RunConfig
    reasons: dict[str, str]


def propose(
    arch: Arch,
    cluster: Cluster,
    data: Data,
    *,
    name: str,
    tokens: int,
    vocab_size: int = 0,
    preset: Hints = NO_HINTS,
    wanted: Hints = NO_HINTS,
    precision: str = "",
    usd_per_hour: float = 0.0,
) -> ProposedRun:
    """Return a run for a model, a cluster and data, and the reason for each chosen value.

    tokens: number of tokens in the training set. vocab_size: vocabulary of its tokenizer, 0 if unknown. wanted:
    settings that the user asked for, which take precedence over the preset's, and these over the rules. precision: "":
    bf16, or fp32 where the cluster's products are faster in it or a CPU was not measured. Raises ConfigError if the
    batch that the user asked for is not a multiple of the cluster's devices.
    """
    reasons: dict[str, str] = {}
    arch = _fit_vocabulary(arch, vocab_size, reasons)
    seq_len = _choose("train.seq_len", wanted.seq_len, preset, "seq_len", reasons) or min(arch.max_seq_len, 2048)
    if seq_len > arch.max_seq_len:
        arch = replace(arch, max_seq_len=seq_len)
        reasons["model.max_seq_len"] = "as long as the sequences asked for"
    ranks = cluster.devices
    reasons["parallel.dp_shard"] = f"every device of {cluster.name}"
    goal = _training_tokens(arch, tokens)
    batch = _batch(wanted, preset, ranks, suggested_batch_tokens(arch, seq_len, goal) / seq_len, reasons)
    steps = _steps(wanted, preset, goal, tokens, batch * seq_len, reasons)
    lr = _choose("optim.lr", wanted.lr, preset, "lr", reasons) or _learning_rate(arch, seq_len, steps * batch, reasons)
    run = RunConfig(
        name=name,
        model=arch,
        data=data,
        train=Train(
            steps=steps,
            seq_len=seq_len,
            global_batch=batch,
            micro_batch=batch // ranks,
            precision=precision or _precision(cluster, reasons),  # type: ignore[arg-type]
        ),
        optim=Optim(lr=lr),
        schedule=Schedule(kind="cosine", warmup_steps=_warmup(steps, arch, reasons)),
        parallel=Parallel(dp_shard=ranks, ep=_expert_ranks(arch, cluster, reasons)),
        checkpoint=Checkpoint(every_steps=min(max(steps // 10, 1), 1000)),
        evaluate=Evaluate(every_steps=max(steps // 4, 1) if data.heldout else 0),
        watch=WatchSettings(log_every=min(max(steps // 40, 1), 20)),
        cost=Cost(usd_per_hour=usd_per_hour or cluster.usd_per_hour),
    )
    return ProposedRun(run=_fit_micro_batch(run, cluster, reasons), reasons=reasons)


def _choose(key: str, wanted, preset: Hints, field: str, reasons: dict[str, str]):
    if wanted:
        reasons[key] = "as asked for"
        return wanted
    if value := getattr(preset, field):
        reasons[key] = preset.why or "the preset's"
        return value
    return 0


def _precision(cluster: Cluster, reasons: dict[str, str]) -> str:
    """Return "fp32" if the rates of the cluster say that its products are faster in it, as on a CPU without
    instructions for bf16, or if it is a CPU whose rate in bf16 is not known; else "bf16"."""
    bf16, fp32 = (cluster.peak_flops.get(name, 0.0) for name in ("bf16", "fp32"))
    if not bf16 and cluster.device == "cpu":
        reasons["train.precision"] = "no rate in bf16 is known, and CPUs without instructions for it are slow"
        return "fp32"
    if not 0 < bf16 < fp32:
        return "bf16"
    reasons["train.precision"] = f"products of {cluster.name} are {fp32 / bf16:.2g} times as fast as in bf16"
    return "fp32"


def _learning_rate(arch: Arch, seq_len: int, sequences: int, reasons: dict[str, str]) -> float:
    reasons["optim.lr"] = "fit over compute budgets, Bi et al. 2024 (DeepSeek LLM), eq. 1"
    return suggested_learning_rate(arch, seq_len, sequences * seq_len)


def _fit_vocabulary(arch: Arch, vocab_size: int, reasons: dict[str, str]) -> Arch:
    if not vocab_size or vocab_size == arch.vocab_size:
        return arch
    rounded = -(-vocab_size // 64) * 64
    reasons["model.vocab_size"] = f"the tokenizer's {vocab_size:,} ids, rounded up to a multiple of 64"
    return replace(arch, vocab_size=rounded)


def _training_tokens(arch: Arch, tokens: int) -> int:
    """Return the number of tokens to train on: one pass over the data, or up to four passes if one pass has fewer
    tokens than is compute-optimal."""
    return max(tokens, min(compute_optimal_tokens(count_active_parameters(arch)), MAX_USEFUL_EPOCHS * tokens))


def _expert_ranks(arch: Arch, cluster: Cluster, reasons: dict[str, str]) -> int:
    """Return the largest legal ep inside a node; 1 for dense models, and for small models, in which gathering experts
    is cheaper than sending tokens."""
    if not arch.is_moe or count_parameters(arch) < WHOLE_PARAMETERS:
        return 1
    legal = legal_ep(arch.moe.num_experts, Parallel(dp_shard=cluster.devices))
    reasons["parallel.ep"] = "tokens are sent inside a node, instead of gathering experts from all ranks"
    return max(ep for ep in legal if ep <= cluster.devices_per_node)


def _batch(wanted: Hints, preset: Hints, ranks: int, suggested: float, reasons: dict[str, str]) -> int:
    """Return the number of sequences per step, a multiple of `ranks`: the user's, or else the preset's, or else
    `suggested`. Raises ConfigError if the user's is not such a multiple."""
    key = "train.global_batch"
    batch = _choose(key, wanted.global_batch, preset, "global_batch", reasons)
    if not batch:
        reasons[key] = "fit over compute budgets, Bi et al. 2024 (DeepSeek LLM), eq. 1"
        return ranks * _power_of_two(suggested / ranks)
    if batch % ranks == 0:
        return batch
    low = batch // ranks * ranks
    if wanted.global_batch:
        near = f"{low} or {low + ranks}" if low else f"{ranks}"
        raise ConfigError(
            "E-BATCH-RANKS",
            f"a batch of {batch} sequences cannot be divided evenly among {ranks} ranks",
            rule="each rank gets the same number of sequences",
            fix=f"use --batch {near}",
            batch=batch,
            ranks=ranks,
            legal=[low, low + ranks] if low else [ranks],
        )
    reasons[key] += f", made a multiple of {ranks} ranks"
    return low or ranks


def _power_of_two(value: float) -> int:
    """Return the power of two whose ratio to `value` is nearest to 1; at least 1."""
    power = 1
    while power * 2**0.5 < value:
        power *= 2
    return power


def _steps(wanted: Hints, preset: Hints, goal: int, tokens: int, tokens_per_step: int, reasons: dict[str, str]) -> int:
    if steps := _choose("train.steps", wanted.steps, preset, "steps", reasons):
        limit = MAX_USEFUL_EPOCHS * tokens // tokens_per_step
        if wanted.steps or steps <= limit:
            return steps
    steps = max(goal // tokens_per_step, 1)
    passes = steps * tokens_per_step / tokens
    if passes > 1.01:
        rule = f"{passes:.1f} passes: up to 20 tokens per parameter (Hoffmann et al. 2022), at most 4 passes"
        reasons["train.steps"] = f"{rule} (Muennighoff et al. 2023)"
    else:
        reasons["train.steps"] = f"one pass over {format_count(tokens)} tokens"
    return steps


def _warmup(steps: int, arch: Arch, reasons: dict[str, str]) -> int:
    parameters = count_parameters(arch)
    least = ", above 1B parameters at least 1,000 or half of the steps" if least_warmup_steps(steps, parameters) else ""
    reasons["schedule.warmup_steps"] = f"5% of the steps, at most 2,000 (Touvron et al. 2023){least}"
    return warmup_steps(steps, parameters)


def _fit_micro_batch(run: RunConfig, cluster: Cluster, reasons: dict[str, str]) -> RunConfig:
    """Return the run with the largest micro-batch that fits into memory. If none fits, it is 1, and the plan warns."""
    per_rank = run.train.global_batch // run.parallel.data_ranks
    budget = MEMORY_SHARE * rank_memory_bytes(cluster, run.parallel.world_size)
    sizes = [n for n in range(per_rank, 0, -1) if per_rank % n == 0]
    for size in sizes:
        candidate = replace(run, train=replace(run.train, micro_batch=size))
        if size > 1 and size * run.train.seq_len > MICRO_BATCH_TOKENS:
            continue
        if sum(term.value for term in memory_bill(candidate, cluster).values()) <= budget:
            reasons["train.micro_batch"] = "the largest that fits into memory" if size < per_rank else "no accumulation"
            return candidate
    reasons["train.micro_batch"] = "the smallest, but even this does not fit"
    return replace(run, train=replace(run.train, micro_batch=1))
