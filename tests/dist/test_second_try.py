"""The second try of a step in real steps of forms of parallelism: it has the bits of a step without the fault."""

from dataclasses import replace

import pytest

from ingot.drill.planted import flip_bit
from ingot.schema.arch import Moe
from ingot.schema.guard import Guard
from ingot.trainer.build import build_parts
from ingot.trainer.guard.step_judge import StepJudge
from ingot.trainer.retry import StepRetry
from ingot.trainer.step import train_step

from .steps import ARCH, CPU, batch_of, keep, run_of, state_of

EXPERTS = replace(ARCH, moe=Moe(num_experts=4, top_k=2, d_expert=8, bias_rate=0.25, global_loss=0.01))
CASES = {
    "copies of masters": (2, {"dp_shard": 2, "zero": 2, "precision": "bf16"}),
    "units": (2, {"dp_shard": 2, "zero": 3, "precision": "bf16"}),
    "stages and experts": (2, {"arch": EXPERTS, "pp": 2, "micro_batch": 2, "precision": "fp32"}),
}


def plant(parts, rank):
    """Let the last rank have a wrong bit in the next try: in a copy of a master that the forward reads, just before it
    does, or, where there is none, in a gradient."""
    if rank != parts.mesh.devices.size() - 1:
        return
    module = parts.model.stages[max(parts.model.stages)].blocks["3"].attention.o
    if parts.model.data.published():

        def flip(module, _):
            flip_bit(module.weight, 0, 8 * module.weight.itemsize - 2)
            hook.remove()

        hook = module.register_forward_pre_hook(flip)
        return
    reduce = parts.model.reduce

    def reduced():
        reduce()
        del parts.model.reduce
        shard = [one for one in parts.model.shards if one.grad is not None and one.grad.numel()][-1]  # no tied one
        flip_bit(shard.grad, 0, 8 * shard.grad.itemsize - 2)

    parts.model.reduce = reduced


def both(rank, ranks, run):
    """Return what three steps give without a fault, and with one in the first try of the second step."""
    return three_steps(rank, ranks, run, is_spoiled=False), three_steps(rank, ranks, run, is_spoiled=True)


def three_steps(rank, ranks, run, *, is_spoiled):
    parts = build_parts(run, CPU, None)
    parts.step_judge = StepJudge(Guard(), CPU)
    retry = StepRetry(parts.model.stages, CPU, scaled_loss=False, data_rank=parts.mesh.data_rank, ranks=ranks)
    results = []
    for step in (1, 2, 3):
        parts.retry = retry if is_spoiled and step == 2 else None
        if parts.retry is not None:
            retry.is_needed = lambda judged: True
            plant(parts, rank)
        result = train_step(parts, batch_of(run, parts.mesh, step), 1e-2)
        experts = None if result.experts is None else result.experts.tolist()
        results.append((float(result.loss), float(result.grad_norm), experts))
    state = [(*block[:3], block[3].tobytes()) for block in keep(state_of(parts))]
    return results, state, [one.same for one in retry.take()]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "units" else ()) for case in CASES]
)
def test_a_fault_of_the_first_try_leaves_no_trace(fork_ranks, case):
    ranks, settings = CASES[case]
    plain, spoiled = zip(*fork_ranks(both, ranks, run_of(**settings)), strict=True)
    assert [one[:2] for one in spoiled] == [one[:2] for one in plain]
    assert [one[2] for one in spoiled] == [[False]] * ranks and not any(one[2] for one in plain)
