"""The split of a run over processes: the degrees of the mesh, and the settings of each form of parallelism."""

import math
from dataclasses import dataclass
from typing import Literal

from ingot.ranges import Degree, Layers, PositiveDegree, PositiveLayers, Queue

# Pipeline schedules, by the names of their papers (theory/schedule makes their tables).
PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v"
]
TWO_STAGES = ("interleaved", "looped_bfs", "interleaved_zb", "zb_v", "dualpipe_v")
# Schedules whose backward has two halves: gradients of the inputs first, gradients of the weights when there is time.
SPLIT_BACKWARD = ("zb_h1", "interleaved_zb", "zb_v", "dualpipe_v")
# Rank r of P holds stages r and 2P-1-r: a forward passes all ranks from first to last, then from last to first.
V_SHAPED = ("zb_v", "dualpipe_v")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Degrees of the mesh axes, outermost first: pp, dp_replicate, dp_shard, cp, tp. World size is their product.

    cp: ranks that share the tokens of each sequence. They also share model state, as the ranks of dp_shard do, unless
      reduce = "canonical". context: how attention reaches all tokens: "ring" passes keys and values around (Liu et al.
      2023), "ulysses" divides heads instead of tokens (Jacobs et al. 2023), "usp" does both in a grid (Fang & Zhao
      2024) with `ulysses` ranks in a row; ulysses = 0: the fastest number. "auto": the fastest form for the heads,
      sequence and links (theory/context.py).
      context_layout: the tokens of rank r in a ring of n. zigzag: the r-th and the r-th last of 2n equal parts,
      striped: every n-th token, contiguous: the r-th of n parts. Only "ring" and "usp" have a ring; the ranks of
      "ulysses" have neighboring tokens, and "auto" may choose "ulysses".
    ep: ranks among which experts are divided. They are neighbors among the dp_shard x cp x tp ranks that share a copy
      of the model; ep is not a factor of the world size. Groups of experts (model.moe.groups) keep a token's experts on
      few of these ranks (theory/rules/expert.py).

    dp_replicate: number of copies of the model, which divide each batch. dp_shard: ranks that share one copy. zero = 1
      splits optimizer state among them, 2 also gradients, 3 also parameters (FSDP2); "auto": 1 for models below 20M
      parameters and in pipelines, else 3. dp_replicate with dp_shard = 1 is DDP; both above 1 is HSDP.
    unit_layers: blocks per unit, which is gathered and reduced as a whole; 0: all blocks; "auto": all blocks for models
      below 20M parameters, else 1. prefetch: units gathered ahead of the unit in use.
    reshard: zero 3 frees a unit after its forward and gathers it again for the backward.
    grads: dtype in which gradients are kept and reduced. Bytes per parameter with bf16 weights: 16 with bf16 gradients,
      18 with fp32 gradients. zero 3 always needs 16: it keeps gradient shards in fp32, but no bf16 weights.
    reduce: "canonical" sums gradients of `virtual_ranks` equal parts of the batch in one fixed tree, so that 1, 2, 4..
      copies (dp_replicate) give the same bits; not with precision fp16, whose smallest gradients depend on the copies.
    sequence: with tp, split norms and residuals along the sequence. async_tp: overlap tp's collectives with its matrix
      products (only on GPUs with symmetric memory). tp_chunks: with sequence, divide the tokens of a collective and of
      the products next to it into so many chunks, and move one while another is multiplied; 1: one after the other.
    schedule: the pipeline schedule. stages_per_rank: 0: the number that the schedule needs. stage_layers: number of
      blocks of each stage; empty: equal parts.
    recompute: "full" keeps only the input of a block; "selective" also keeps the results of matrix products and
      attention. recompute_every: recompute only every n-th block.
    offload: where optimizer state is kept and updated: "cpu" memory, or "nvme" files in `offload_folder` (a relative
      path starts at the folder of the run file). offload_parameters: with "cpu" and zero 3, offload parameters too.
    """

    dp_replicate: PositiveDegree = 1
    dp_shard: PositiveDegree = 1
    pp: PositiveDegree = 1
    cp: PositiveDegree = 1
    tp: PositiveDegree = 1
    ep: PositiveDegree = 1
    context: Literal["auto", "ring", "ulysses", "usp"] = "auto"
    ulysses: Degree = 0
    context_layout: Literal["zigzag", "striped", "contiguous"] = "zigzag"
    zero: Literal["auto", 1, 2, 3] = "auto"
    unit_layers: Literal["auto"] | Layers = "auto"
    prefetch: Queue = 1
    reshard: bool = True
    grads: Literal["fp32", "bf16"] = "fp32"
    reduce: Literal["fast", "canonical"] = "fast"
    virtual_ranks: Degree = 0
    sequence: bool = True
    async_tp: bool = False
    tp_chunks: PositiveDegree = 1
    schedule: PipelineSchedule = "1f1b"
    stages_per_rank: Layers = 0
    stage_layers: tuple[Layers, ...] = ()
    recompute: Literal["none", "full", "selective"] = "none"
    recompute_every: PositiveLayers = 1
    offload: Literal["none", "cpu", "nvme"] = "none"
    offload_parameters: bool = False
    offload_folder: str = ""

    def problems(self):
        """Yield the values that are wrong in any run; rules that depend on the rest of the run are in theory/rules."""
        for name in ("dp_replicate", "dp_shard", "pp", "cp", "tp", "ep", "tp_chunks", "recompute_every"):
            if getattr(self, name) < 1:
                yield name, f"is {getattr(self, name)}, must be at least 1"
        for name in ("unit_layers", "prefetch", "virtual_ranks", "stages_per_rank", "ulysses"):
            if getattr(self, name) != "auto" and getattr(self, name) < 0:
                yield name, f"is {getattr(self, name)}, must be at least 0"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """The number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def token_ranks(self) -> int:
        """The number of ranks that compute losses of different tokens with the same parameters: data_ranks x cp. The
        gradient is the mean over these ranks.
        """
        return self.data_ranks * self.cp

    @property
    def shard_ranks(self) -> int:
        """The number of ranks that divide the state of one copy of the model; with reduce = "canonical" cp ranks do
        not divide it.
        """
        return self.dp_shard * (1 if self.reduce == "canonical" else self.cp)

    @property
    def expert_ranks(self) -> int:
        """The number of ranks that hold the same experts within one copy of the model, and divide their state."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def expert_parts(self) -> int:
        """The number of parts of the batch after which groups of experts repeat: 1 without experts.

        The ep ranks of a group are neighbors in dp_shard x cp x tp, so a group may cover several data ranks.
        """
        return self.ep // math.gcd(self.ep, self.cp * self.tp)

    @property
    def ring(self) -> int:
        """The number of ranks in a ring of context parallelism, after theory/layout.py has decided `ulysses`."""
        return self.cp // max(self.ulysses, 1)

    @property
    def context_form(self) -> str:
        """The form of context parallelism as text: "ring", "ulysses" or "usp, ulysses 2"; "" if cp is 1. Needs a
        decided `ulysses`.
        """
        if self.cp == 1:
            return ""
        return {1: "ulysses", self.cp: "ring"}.get(self.ring, f"usp, ulysses {self.ulysses}")

    @property
    def unit_blocks(self) -> int:
        """The value of `unit_layers`, which must not be "auto" any more (theory/layout.py decides it)."""
        assert self.unit_layers != "auto"
        return self.unit_layers

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.pp * self.stages_on_each_rank

    @property
    def stages_on_each_rank(self) -> int:
        return self.stages_per_rank or (2 if self.pp > 1 and self.schedule in TWO_STAGES else 1)

    @property
    def splits_backward(self) -> bool:
        return self.pp > 1 and self.schedule in SPLIT_BACKWARD
