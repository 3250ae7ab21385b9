"""A row of models with more state than a dense one: a node is lost, and the run goes on with fewer ranks."""

import os
import shutil
import signal

from ingot.drill.oracles import Verdicts, read_facts
from ingot.events import read_events
from ingot.schema import events

from .bench import Bench, options
from .row import Row, judge_recovered, random_of, resumed_from
from .rows_launchers import CANONICAL, SHRINKS, Launchers

_STEPS = "train.steps=120"
_LAUNCH = (*SHRINKS, "launch.node_seconds=3", "checkpoint.keep=99")
# Experts with biases that the loads change, a balance loss on the loads of the step before, and latent attention.
_EXPERTS = (
    *("model.num_kv_heads=4", "model.norm_eps=1e-6", "model.moe.num_experts=4", "model.moe.d_expert=16"),
    *("model.moe.shared_experts=1", "model.moe.first_dense=1", "model.moe.scores=sigmoid", "model.moe.bias_rate=0.01"),
    *("model.moe.global_loss=0.01", "model.mla.q_rank=10", "model.mla.kv_rank=6", "model.mla.nope_dim=4"),
    *("model.mla.rope_dim=4", "model.mla.v_dim=6"),
)
# Layouts whose sums are the same on one and two ranks: the run has the bits of an undisturbed one.
_SAME = {
    "experts": _EXPERTS,
    "offload": ("parallel.offload=cpu",),
}
# The state of one rank goes to the other: from there on, the run has the bits of one that continues in this layout. In
# fp16 canonical sums are no help: small gradients are lost by the weight of a token's loss, which depends on the ranks.
_DIVIDED = {
    "experts divided": (*_EXPERTS, "parallel.dp_shard=2", "parallel.ep=2", "parallel.zero=1"),
    "loss scale": ("train.precision=fp16", "parallel.dp_shard=2", "parallel.zero=1"),
    "offload divided": ("parallel.dp_shard=2", "parallel.zero=3", "parallel.offload=cpu"),
}


def rs07_models(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Lose one of two nodes for good, once per model and layout."""
    random = random_of("RS07 models", seed)
    for case, own in _SAME.items():
        settings = (*CANONICAL, _STEPS, *own)
        name, where = _shrink(bench, verdicts, f"{case}-{seed}", case, settings, random.randrange(9, 40))
        judge_recovered(bench, verdicts, name, where, bench.reference(*settings), all_layouts=True)
    for case, own in _DIVIDED.items():
        settings = (_STEPS, *own)
        name, where = _shrink(bench, verdicts, f"{case}-{seed}", case, settings, random.randrange(9, 40))
        _judge_as_continued(bench, verdicts, name, where, settings)


def _shrink(
    bench: Bench, verdicts: Verdicts, name: str, case: str, settings: tuple[str, ...], step: int
) -> tuple[str, str]:
    """Lose node 1 at `step`, and train to the end without it. Returns the name of the run, and the case for people."""
    name, where = name.replace(" ", "-"), f"{case} at step {step}"
    with Launchers(bench, name, (*settings, *_LAUNCH)) as nodes:
        nodes.start(2)
        nodes.wait_for_step(step)
        for pid in nodes.of_node(nodes.started[1]):
            os.kill(pid, signal.SIGKILL)
        codes = nodes.ends(without=1)
        verdicts.judge("o6", where, f"exit codes {codes}" if any(codes) else "")
        log = nodes.folder.events
        found = [(e["rank"], e["failure"]) for e in read_events(log, events.FAULT)]
        verdicts.judge("o6", where, "" if found == [(1, "node")] else f"faults {found}")
        sizes = [event["world_size"] for event in read_events(log, events.RUN_STARTED)]
        verdicts.judge("o6", where, "" if sizes == [2, 1] else f"trained on {sizes} ranks")
    return name, where


def _judge_as_continued(bench: Bench, verdicts: Verdicts, name: str, where: str, settings: tuple[str, ...]) -> None:
    """Continue a copy of the run, in the layout of fewer ranks, from the checkpoint that the run took: losses, norms
    and the last state have to have the same bits."""
    folder = bench.folder(name)
    start, other = resumed_from(folder), bench.copy(name, f"{name}-continued")
    layout = [event["overrides"] for event in read_events(folder.events, events.LAYOUT)][-1]
    rewound = bench.ingot("ckpt", "rewind", str(other.root), "--to", str(start))
    verdicts.judge("o6", where, "" if rewound.code == 0 else f"not rewound: {rewound.output[-300:]}")
    alone = (*settings, *_LAUNCH, "launch.min_ranks=0", *layout)
    ended = bench.train(other.root.name, *options(alone))
    verdicts.judge("o6", where, "" if ended.code == 0 else f"continued: exit code {ended.code}: {ended.output[-300:]}")
    shutil.rmtree(other.set_aside, ignore_errors=True)
    one, two = read_facts(folder), read_facts(other)
    steps = range(start + 1, max(one.trace) + 1)
    wrong = [step for step in steps if one.trace[step][-1] != two.trace[step][-1] or len(two.trace[step]) < 2]
    verdicts.judge(
        "o1", where, f"steps {wrong[:5]} differ from a run that continued from step {start}" if wrong else ""
    )
    verdicts.judge("o2", where, "" if one.state == two.state else "the last states differ")


ROWS = (
    Row("RS07 models", "a node is lost: experts, latent attention, offload, loss scale go to one rank", rs07_models),
)
