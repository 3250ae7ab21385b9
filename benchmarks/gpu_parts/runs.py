"""The models and batches that one GPU is measured with, what is expected of them, and the layouts of the stress.

Shapes are those of Llama: embeddings apart, grouped queries, heads of 128. In `smoke` each has the same kinds of layers
and is small enough for a CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ingot.planner.request.presets import load_model
from ingot.planner.run.plan import make_plan
from ingot.schema.arch import Arch, Moe
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel, PipelineSchedule
from ingot.schema.plan import Plan
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.layout import layout_problems

SCHEDULES: tuple[PipelineSchedule, ...] = (
    "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v"
)  # fmt: skip
WORLDS = (2, 4, 8)
_DEGREES = (1, 2, 4)
_STRESS_LAYERS, _STRESS_TOKENS, _STRESS_BATCH, _STRESS_MICRO_BATCHES = 8, 256, 16, 8


def _llama(width: int, layers: int, kv_heads: int, ffn: int) -> Arch:
    return Arch(
        vocab_size=32000,
        d_model=width,
        num_layers=layers,
        num_heads=width // 128,
        num_kv_heads=kv_heads,
        head_dim=128,
        d_ffn=ffn,
        max_seq_len=4096,
        tied_embeddings=False,
    )


MODELS = {
    "0.5b": _llama(1280, 22, 5, 3584),
    "1.3b": _llama(2048, 24, 8, 5632),
    "3b": _llama(2560, 34, 5, 8704),
    "8b-width": replace(load_model("llama3-8b").arch, num_layers=8),
    "moe": replace(load_model("qwen3-30b-a3b").arch, num_layers=4),
}


@dataclass(frozen=True)
class Case:
    """A measured step. document_tokens: mean length of documents; 0: attention crosses their borders."""

    model: str
    seq_len: int
    micro_batch: int
    document_tokens: int = 0

    def run(self, device: str, *, smoke: bool = False) -> RunConfig:
        """Return the run of one process that takes this step."""
        arch, seq_len = MODELS[self.model], self.seq_len
        if smoke:
            arch, seq_len = _small(arch), 64
        train = Train(
            steps=1,
            seq_len=seq_len,
            global_batch=self.micro_batch,
            micro_batch=self.micro_batch,
            device=device,
            compile="off" if smoke else "auto",
        )
        data = Data(tokens="", mask_documents=self.document_tokens > 0)
        arch = replace(arch, max_seq_len=max(arch.max_seq_len, seq_len))
        return RunConfig(name="benchmark", model=arch, data=data, train=train)

    def expected(self, cluster: Cluster) -> Plan:
        """Return the planner's prediction of this step on a cluster of one device."""
        return make_plan(self.run("cuda"), cluster)


def _small(arch: Arch) -> Arch:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    moe = replace(arch.moe, num_experts=4, top_k=2, d_expert=32) if arch.is_moe else arch.moe
    return replace(arch, vocab_size=256, d_model=64, num_layers=2, d_ffn=96, moe=moe, **heads)


CASES = {
    "0.5b": Case("0.5b", 4096, 8),
    "1.3b": Case("1.3b", 4096, 8),
    "3b": Case("3b", 4096, 4),
    "8b-width": Case("8b-width", 8192, 2),
    "moe": Case("moe", 4096, 4),
    "documents": Case("1.3b", 8192, 4, document_tokens=1000),
    "32k": Case("1.3b", 32768, 1),
}


# -- the stress: every legal combination of schedule, tp, cp and ep on 2, 4 and 8 ranks ------------------------------


def stress_model(*, experts: bool, small: bool) -> Arch:
    """Return a model that every axis up to 4 divides, with a stage for each of 2 x 4 pipeline ranks."""
    width, ffn, words, head_dim = (64, 96, 128, 8) if small else (512, 1024, 2048, 64)
    arch = replace(_llama(width, _STRESS_LAYERS, 4, ffn), vocab_size=words, num_heads=8, head_dim=head_dim)
    return replace(arch, moe=Moe(num_experts=8, top_k=2, d_expert=ffn // 4, global_loss=0.01)) if experts else arch


def stress_run(device: str, *, experts: bool, precision: str = "fp32", **layout: Any) -> RunConfig:
    """Return the run of a layout. On a CPU it is small: only the program is tried there."""
    small = device == "cpu"
    train = Train(
        steps=1,
        seq_len=32 if small else _STRESS_TOKENS,
        global_batch=_STRESS_BATCH,
        micro_batch=_micro_batch(Parallel(**layout)),
        precision=precision,
        device=device,
        compile="off",  # nothing of a layout depends on it, and it takes a minute for each one
    )
    model, data = stress_model(experts=experts, small=small), Data(tokens="")
    return RunConfig(name="stress", model=model, data=data, train=train, parallel=Parallel(**layout))


def _micro_batch(parallel: Parallel) -> int:
    """Return the largest micro-batch that leaves a pipeline 8 micro-batches, if there are enough sequences."""
    own = _STRESS_BATCH // parallel.data_ranks
    return max(own // _STRESS_MICRO_BATCHES, 1) if parallel.pp > 1 else own


def layouts(world: int) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Yield (name, has experts, settings of `Parallel`) for each legal layout of `world` ranks.

    pp, tp and cp are 1, 2 or 4, the rest is dp_shard. Every schedule of a pipeline; ring and Ulysses; ep of 1, 2 or 4,
    and a model without experts.
    """
    for pp, tp, cp in ((pp, tp, cp) for pp in _DEGREES for tp in _DEGREES for cp in _DEGREES):
        if world % (pp * tp * cp):
            continue
        for schedule in SCHEDULES if pp > 1 else (None,):
            for context in ("ring", "ulysses") if cp > 1 else (None,):
                for ep in (0, *_DEGREES):
                    settings: dict[str, Any] = {"pp": pp, "tp": tp, "cp": cp, "dp_shard": world // (pp * tp * cp)}
                    more = {"schedule": schedule, "context": context, "ep": ep}
                    settings |= {key: value for key, value in more.items() if value}
                    if not list(layout_problems(stress_run("cuda", experts=ep > 0, **settings))):
                        shown = {key: value for key, value in settings.items() if value != 1 or key == "ep"}
                        yield ", ".join(f"{key} {value}" for key, value in shown.items()), ep > 0, settings
