"""The layouts that a model, a batch and a precision allow. Each problem has the value found and the nearest legal
values.

Rules that need derived numbers (parameter counts, tables of schedules) are in theory/layout.py.
"""

from collections.abc import Iterator

from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.theory.rules.context import context_rules, cut_of_sequences
from ingot.theory.rules.expert import expert_rules
from ingot.theory.rules.nearest import divisors, multiples, nearest

Problems = Iterator[tuple[str, str]]
_WHOLE_BACKWARD = "one of the schedules gpipe, 1f1b, interleaved, looped_bfs"


def layout_rules(run: RunConfig) -> Problems:
    """Yield (dotted key of the run file, problem and fix) for every broken rule of a layout."""
    if any(run.parallel.problems()):
        return  # a degree below 1 is reported elsewhere, and would break the arithmetic here
    yield from _idle_settings(run.parallel)
    yield from _batch_rules(run)
    yield from _tensor_rules(run)
    yield from context_rules(run)
    yield from expert_rules(run)
    yield from _pipeline_rules(run)
    yield from _canonical_rules(run.parallel)
    yield from _offload_rules(run.parallel)
    yield from _recomputation_rules(run)
    if run.parallel.world_size % run.launch.nodes:
        ranks = run.parallel.world_size
        yield (
            "launch.nodes",
            f"{run.launch.nodes} does not divide the {ranks} ranks; use {nearest(run.launch.nodes, divisors(ranks))}",
        )
    elif run.launch.min_ranks:
        yield from _fewest_rules(run)
    if run.parallel.grads == "bf16" and run.train.precision in ("fp32", "fp64"):
        yield "parallel.grads", f'"bf16" is coarser than train.precision = {run.train.precision!r}; use "fp32"'


def _recomputation_rules(run: RunConfig) -> Problems:
    every, parallel = run.guard.recompute_every, run.parallel
    if not every or parallel.data_ranks > parallel.expert_parts:
        return
    key, needs = "guard.recompute_every", "needs a second rank that can compute the same part of the batch"
    if parallel.data_ranks == 1:
        yield key, f"{every} {needs}, and there is one data rank; set parallel.dp_replicate to 2 or more, or remove it"
    else:
        found = f"the {parallel.data_ranks} data ranks are one group of experts (ep = {parallel.ep})"
        yield key, f"{every} {needs}, and {found}; halve parallel.ep, double the data ranks, or remove it"


def _fewest_rules(run: RunConfig) -> Problems:
    least, ranks = run.launch.min_ranks, run.parallel.world_size
    of_node = ranks // run.launch.nodes
    if least % of_node or least > ranks:
        near = nearest(least, range(of_node, ranks + 1, of_node))
        rule = f"it must be a multiple of the {of_node} ranks of a node, and at most all {ranks}"
        yield "launch.min_ranks", f"is {least}: {rule}; use {near}"


def _idle_settings(parallel: Parallel) -> Problems:
    """Yield settings that would silently have no effect."""
    if parallel.pp == 1:
        for name, idle in (("stages_per_rank", 0), ("stage_layers", ()), ("schedule", "1f1b")):
            if (value := getattr(parallel, name)) != idle:
                found = f"{value!r} has no effect without a pipeline"
                yield f"parallel.{name}", f"{found}; set parallel.pp to 2 or more, or remove it"
    if parallel.async_tp and (parallel.tp == 1 or not parallel.sequence):
        needs = "tp of at least 2" if parallel.tp == 1 else "sequence = true"
        yield "parallel.async_tp", f"overlaps the collectives of sequence parallelism; it needs {needs}, or remove it"
    if parallel.tp_chunks > 1 and (parallel.tp == 1 or not parallel.sequence):
        needs = "tp of at least 2" if parallel.tp == 1 else "sequence = true"
        yield "parallel.tp_chunks", f"divides the exchanges of sequence parallelism; it needs {needs}, or set it to 1"
    if parallel.recompute == "none" and parallel.recompute_every > 1:
        found = f'{parallel.recompute_every} with recompute = "none"'
        yield "parallel.recompute_every", f'{found}; set parallel.recompute to "full" or "selective", or remove it'
    if parallel.reduce == "fast" and parallel.virtual_ranks:
        found = f'{parallel.virtual_ranks} with reduce = "fast"'
        yield "parallel.virtual_ranks", f'{found}; set parallel.reduce = "canonical", or remove it'
    if parallel.offload != "nvme" and parallel.offload_folder:
        found = f"{parallel.offload_folder!r} with offload = {parallel.offload!r}"
        yield "parallel.offload_folder", f'{found}; set parallel.offload = "nvme", or remove it'


def _batch_rules(run: RunConfig) -> Problems:
    batch, micro, parallel = run.train.global_batch, run.train.micro_batch, run.parallel
    ranks, what = parallel.data_ranks, "data-parallel"
    if parallel.reduce == "canonical" and batch % (micro * ranks) == 0 and parallel.virtual_ranks:
        ranks, what = parallel.virtual_ranks, "virtual"
    if batch % (micro * ranks):
        yield (
            "train.global_batch",
            f"{batch} is not micro_batch {micro} x accumulation x {ranks} {what} ranks; nearest: "
            f"{multiples(batch, micro * ranks)}",
        )


def _tensor_rules(run: RunConfig) -> Problems:
    arch, tp, cp = run.model, run.parallel.tp, run.parallel.cp
    if tp == 1:
        return
    # If context parallelism cannot divide the length evenly, context_rules reports that.
    cut_tokens = run.train.seq_len // cp if run.parallel.sequence and run.train.seq_len % cp == 0 else 0
    near = nearest(tp, legal_tp(arch, cut_tokens))
    for name, size in _cut_sizes(arch).items():
        if size % tp:
            yield "parallel.tp", f"{tp} does not divide {name}={size}; nearest: {near}"
    if not _shares_kv_heads(arch, tp):
        rule = "it must divide them, or be a multiple of them (each is then held by several ranks)"
        yield "parallel.tp", f"{tp} does not fit model.num_kv_heads={arch.num_kv_heads}: {rule}; nearest: {near}"
    if arch.vocab_size % tp:
        padded = -(-arch.vocab_size // tp) * tp
        instead = f"or model.vocab_size = {padded}, with unused ids at the end"
        yield "parallel.tp", f"{tp} does not divide model.vocab_size={arch.vocab_size}; nearest: {near}, {instead}"
    if cut_tokens % tp:
        instead = f"or a seq_len of {multiples(run.train.seq_len, cut_of_sequences(run.parallel))}"
        instead += "" if arch.is_moe else ", or parallel.sequence = false"
        of = f" / cp {cp} = {cut_tokens} tokens" if cp > 1 else ""
        found = f"{tp} does not divide train.seq_len={run.train.seq_len}{of}, which sequence parallelism cuts"
        yield "parallel.tp", f"{found}; nearest: {near}, {instead}"
    yield from _async_rules(run)
    yield from _chunk_rules(run)


def _chunk_rules(run: RunConfig) -> Problems:
    parallel = run.parallel
    if parallel.tp_chunks == 1 or not parallel.sequence:
        return
    tokens = run.train.seq_len // (parallel.cp * parallel.tp)
    if parallel.tp_chunks > max(tokens, 1):
        found = f"{parallel.tp_chunks} chunks of the {tokens} tokens that a rank has of a sequence"
        yield "parallel.tp_chunks", f"{found}; use at most {max(tokens, 1)}"
    if parallel.async_tp:
        both = "parallel.async_tp lets the compiler divide the same products"
        yield "parallel.tp_chunks", f"is {parallel.tp_chunks}, and {both}; set it to 1, or remove parallel.async_tp"


def _async_rules(run: RunConfig) -> Problems:
    if not run.parallel.async_tp:
        return
    if run.train.device == "cpu":
        yield "parallel.async_tp", 'needs GPUs with symmetric memory, and train.device is "cpu"; remove it'
    if run.train.compile == "off":
        why = 'it works only inside compiled blocks, and train.compile is "off"'
        yield "parallel.async_tp", f'would have no effect: {why}; set train.compile to "auto" or "on", or remove it'
    if run.parallel.splits_backward:
        why = f"schedule = {run.parallel.schedule!r} splits the backward, and a compiled backward cannot be split"
        yield "parallel.async_tp", f"works only inside compiled blocks: {why}; use {_WHOLE_BACKWARD}, or remove it"


def legal_tp(arch: Arch, cut_tokens: int = 0) -> list[int]:
    """Return the degrees of tensor parallelism that the model allows. cut_tokens: the sequence length that tp has to
    divide; 0: none.
    """
    sizes = (*_cut_sizes(arch).values(), arch.vocab_size, cut_tokens)
    degrees = range(1, arch.num_heads + 1)
    return [tp for tp in degrees if not any(size % tp for size in sizes) and _shares_kv_heads(arch, tp)]


def _cut_sizes(arch: Arch) -> dict[str, int]:
    """Return the sizes, by name, that tensor parallelism divides besides the vocabulary. Routed experts are not
    divided.
    """
    moe, sizes = arch.moe, {"model.num_heads": arch.num_heads}
    if len(arch.expert_layers) < arch.num_layers:
        sizes["model.d_ffn"] = arch.d_ffn
    if arch.is_moe and moe.shared_experts:
        sizes["model.moe.shared_experts x d_expert"] = moe.shared_experts * moe.d_expert
    return sizes


def _shares_kv_heads(arch: Arch, tp: int) -> bool:
    """Return whether tp ranks can share the key/value heads.

    Latent attention makes keys and values of all heads from one latent, so its heads are divided like queries.
    """
    return arch.is_mla or arch.num_kv_heads % tp == 0 or tp % arch.num_kv_heads == 0


def _pipeline_rules(run: RunConfig) -> Problems:
    parallel, layers = run.parallel, run.model.num_layers
    if parallel.pp == 1:
        return
    each = parallel.stages_on_each_rank
    if parallel.stage_layers:
        yield from _stage_layer_rules(parallel, layers)
    elif parallel.stages > layers:
        of = f"{parallel.pp} ranks x {each} stages" if each > 1 else f"{parallel.pp} stages"
        use = f"use at most {layers // each}" if layers >= 2 * each else "use fewer stages per rank, or pp = 1"
        yield "parallel.pp", f"{of} are more than model.num_layers={layers}; {use}"
    if parallel.splits_backward and parallel.zero == 3:
        why = f"schedule = {parallel.schedule!r} computes weight gradients after the hooks that would reduce them"
        yield "parallel.zero", f"3 is not possible here: {why}; use zero 1 or 2, or {_WHOLE_BACKWARD}"
    if parallel.splits_backward and run.train.compile == "on":
        why = f"parallel.schedule = {parallel.schedule!r} splits the backward, and a compiled backward cannot be split"
        yield "train.compile", f'"on" is not possible here: {why}; use "auto" or "off", or {_WHOLE_BACKWARD}'


def _stage_layer_rules(parallel: Parallel, layers: int) -> Problems:
    given, stages, each = parallel.stage_layers, parallel.stages, parallel.stages_on_each_rank
    if len(given) != stages:
        found = f"has {len(given)} entries for {stages} stages ({parallel.pp} ranks x {each})"
        yield "parallel.stage_layers", f"{found}; give one number of blocks for each stage"
    for stage, blocks in enumerate(given):
        at_end = stage in (0, len(given) - 1)
        if blocks < (0 if at_end else 1):
            yield "parallel.stage_layers", f"stage {stage} has {blocks} blocks; only the first and the last may have 0"
    if sum(given) != layers:
        yield "parallel.stage_layers", f"sums to {sum(given)} blocks, but model.num_layers is {layers}; make them equal"


def _canonical_rules(parallel: Parallel) -> Problems:
    if parallel.reduce != "canonical":
        return
    if parallel.dp_shard != 1:
        use = f"use dp_replicate = {parallel.data_ranks} and dp_shard = 1"
        yield "parallel.dp_shard", f'{parallel.dp_shard} with reduce = "canonical", which sums whole gradients; {use}'
    if parallel.zero in (2, 3):
        yield "parallel.zero", f'{parallel.zero} with reduce = "canonical", which sums whole gradients; use "auto" or 1'
    if parallel.splits_backward:
        why = f"schedule = {parallel.schedule!r} leaves weight gradients for later, and so mixes the parts of the batch"
        yield "parallel.schedule", f'not possible with reduce = "canonical": {why}; use {_WHOLE_BACKWARD}'
    virtual, copies = parallel.virtual_ranks, parallel.dp_replicate
    if virtual < 1 or virtual & (virtual - 1):
        low = 1 << max(virtual, 1).bit_length() - 1
        use = f"nearest: {low} or {2 * low}" if virtual else "use the most copies that this run will ever have"
        yield "parallel.virtual_ranks", f'is {virtual}; reduce = "canonical" needs a power of two; {use}'
    elif virtual % copies:
        near = nearest(copies, (1 << n for n in range(virtual.bit_length())))
        yield "parallel.dp_replicate", f"{copies} does not divide virtual_ranks={virtual}; nearest: {near}"


def _offload_rules(parallel: Parallel) -> Problems:
    if parallel.offload == "nvme" and not parallel.offload_folder:
        yield "parallel.offload_folder", 'is empty; offload = "nvme" needs a folder on a fast local disk'
    if parallel.offload_parameters and parallel.offload != "cpu":
        yield "parallel.offload_parameters", f'needs offload = "cpu", which is {parallel.offload!r}'
    if parallel.offload_parameters and parallel.zero in (1, 2):
        yield "parallel.offload_parameters", f"needs zero = 3, which is {parallel.zero} and keeps parameters whole"
