"""Gradients and activations with a wrong bit, in whole runs that recompute them on another rank."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from ingot.config import to_toml
from ingot.errors import IngotError
from ingot.events import read_events
from ingot.schema import events
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.integrity.recompute import is_chosen, unnoticed
from ingot.trainer.loop import train
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.run import build_trainer

BITS = (3, 12, 22, 30)


@dataclass(frozen=True)
class Flip:
    """A bit that flips on a rank in a step, the `visit`-th time that it is trained or `always`: of a gradient before it
    is reduced, or of an activation. other: another element each time."""

    step: int
    rank: int
    bit: int
    kind: str = "gradient"
    visit: int = 1
    always: bool = False
    other: bool = False


def plant(run, plan):
    """Let the bits of `plan` flip on this rank, when its own part of the batch is computed."""
    rank, gradients, visits = run.place.rank, run.gradients, {}
    take, recompute, step = gradients.take, gradients.recompute, [0]

    def due(kind):
        for flip in plan:
            if (flip.step, flip.rank, flip.kind) != (step[0], rank, kind) or gradients.apart:
                continue
            visits[flip, step[1]] = visits.get((flip, step[1]), 0) + 1
            if visits[flip, step[1]] == 1 and (flip.always or step[1] == flip.visit):
                yield flip

    def planted_recompute(number, scale):
        times[number] = times.get(number, 0) + 1
        step[:] = number, times[number]
        recompute(number, scale)

    def planted_take(number, buffer):
        for flip in due("gradient"):
            buffer.view(-1).view(torch.int32)[5 + (step[1] if flip.other else 0)] ^= 1 << flip.bit
        take(number, buffer)

    def planted_forward(module, inputs, output):
        for flip in due("activation"):
            with torch.no_grad():
                output.view(-1).view(torch.int32)[7] ^= 1 << flip.bit

    times = {}
    gradients.take, gradients.recompute = planted_take, planted_recompute
    run.model.stages[0].get_submodule("blocks.1").register_forward_hook(planted_forward)


def run_rank(rank, ranks, folder, plan, noise):
    """Train as run.py does, with flips. Returns the code and the facts of an error of ingot."""
    place = RankInfo(
        rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, attempt=0, device=torch.device("cpu")
    )
    run = build_trainer(load_run(folder.config), folder, place, say=lambda line: None)
    if plan:
        plant(run, plan)
    if noise:
        run.model.stages[0].get_submodule("blocks.1").register_forward_hook(lambda m, i, y: y + torch.randn(1))
        torch.random.fork_rng = lambda *_: torch.enable_grad()
    try:
        train(run)
    except IngotError as error:
        return error.code, error.facts
    finally:
        run.loader.close()


@pytest.fixture
def trained(make_run, fork_ranks):
    """trained(name, ranks, plan, *settings) -> folder of a run with these flips."""

    def train_run(name, ranks, plan, *settings, steps=14, ending=None, noise=False):
        folder = make_run(name, steps=steps, log_every=1, every_steps=3, prompts=(), heldout="")
        folder.config.write_text(to_toml(load_run(folder.config, settings)))
        assert fork_ranks(run_rank, ranks, folder, tuple(plan), noise) == [ending] * ranks
        return folder

    return train_run


def found(folder):
    damaged = sorted(read_events(folder.events, events.STATE_DAMAGED), key=lambda e: (e["step"], e["rank"]))
    return [(e["step"], e["rank"], e["bit"], e["sign"]) for e in damaged]


def verdicts(folder):
    return [(e["verdict"], e["ranks"], e["named"]) for e in read_events(folder.events, events.STATE_REPLAYED)]


def files_of(folder):
    return list_checkpoints(folder.checkpoints)[0].manifest.files


TWO = ("parallel.dp_replicate=2", "guard.recompute_every=1")
THREE = ("parallel.dp_replicate=3", "guard.recompute_every=1", "train.global_batch=6")


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_every_flip_before_the_reduction_is_found_and_the_run_keeps_the_bits_of_one_that_recomputes_nothing(
    trained, zero
):
    layout = ("parallel.dp_shard=2", "parallel.zero=3") if zero else TWO[:1]
    flips = [Flip(5 + 2 * i, i % 2, bit) for i, bit in enumerate(BITS)]  # the run saves steps 6 and 9
    plain = trained("plain", 2, (), *layout)
    folder = trained("flips", 2, flips, *layout, TWO[1])
    assert found(folder) == [(flip.step, rank, flip.bit, "recomputed") for flip in flips for rank in (0, 1)]
    assert verdicts(folder) == [("transient", [flip.rank], True) for flip in flips]
    back = [(e["from_step"], e["to_step"]) for e in read_events(folder.events, events.ROLLED_BACK)]
    assert back == [(5, 3), (7, 6), (9, 6), (11, 9)]  # step 9 was not saved when it was trained first
    assert files_of(folder) == files_of(plain)


@pytest.mark.slow
def test_a_flip_in_an_activation_names_all_ranks_of_its_copy_of_the_model(trained):
    layout = ("parallel.dp_replicate=2", "parallel.tp=2", "parallel.sequence=true")
    plain, folder = (
        trained("plain", 4, (), *layout),
        trained("flips", 4, [Flip(5, 3, 22, "activation")], *layout, TWO[1]),
    )
    assert {(step, sign) for step, _, _, sign in found(folder)} == {(5, "recomputed")}
    assert verdicts(folder) == [("transient", [2, 3], True)]
    assert files_of(folder) == files_of(plain)


def test_after_a_step_that_looks_like_damage_the_next_one_is_computed_twice(trained):
    """A flip in step 8, which is not chosen, makes a norm that its log line shows; so that of step 9 is found, and
    not at the line of step 12."""
    settings = (TWO[0], "guard.recompute_every=1000", "watch.log_every=4", "checkpoint.every_steps=6")
    assert not any(is_chosen(1234, step, 1000) for step in range(1, 15))
    flips = [Flip(8, 1, 30), Flip(9, 1, 22)]
    plain, folder = trained("plain", 2, (), *settings), trained("flips", 2, flips, *settings)
    assert found(folder) == [(9, 1, 22, "recomputed_alone")]  # in the first check, ranks compute their own part twice
    assert verdicts(folder) == [("transient", [1], True)]
    assert [e["from_step"] for e in read_events(folder.events, events.ROLLED_BACK)] == [9]
    assert files_of(folder) == files_of(plain)


def test_only_chosen_steps_are_computed_twice_until_there_is_damage(trained):
    """A flip in a step that is not chosen stays; after one that is found, every step up to it is computed twice."""
    chosen = [step for step in range(1, 15) if is_chosen(7, step, 4)]
    first, second = chosen[1:3]
    missed = next(step for step in range(first + 1, second))
    settings = (TWO[0], "guard.recompute_every=4", "seed=7")
    folder = trained("flips", 2, [Flip(missed, 0, 12), Flip(second, 1, 3)], *settings)
    assert found(folder) == [(second, rank, 3, "recomputed") for rank in (0, 1)]
    again = [Flip(second, 1, 3), Flip(second - 1, 1, 3, always=True)]
    trained("again", 2, again, *settings, ending=("E-GRADIENTS-DAMAGED", {"ranks": [0, 1], "step": second - 1}))


def test_each_block_of_steps_has_one_chosen_step():
    chosen = [step for step in range(1, 801) if is_chosen(11, step, 8)]
    assert [(step - 1) // 8 for step in chosen] == list(range(100))
    assert len({(step - 1) % 8 for step in chosen}) == 8
    assert chosen != [step for step in range(1, 801) if is_chosen(12, step, 8)]
    assert all(is_chosen(11, step, 1) for step in range(1, 20))


def test_counts_of_routers_sums_of_loss_terms_and_random_states_stay():
    stage, sums = torch.nn.Linear(2, 2), torch.ones(2)
    stage.seen, stage.terms, random = None, [SimpleNamespace(sums=sums)], torch.get_rng_state()
    with unnoticed({0: stage}, torch.device("cpu")):
        assert stage.terms[0].sums is None
        stage.seen, stage.terms[0].sums = torch.rand(2), torch.rand(2)
    assert stage.seen is None and stage.terms[0].sums is sums
    assert torch.equal(torch.get_rng_state(), random)


def test_of_three_ranks_the_one_that_is_damaged_again_is_named(trained):
    ending = "E-GRADIENTS-DAMAGED", {"ranks": [1], "step": 5}
    folder = trained("flips", 3, [Flip(5, 1, 22, always=True)], *THREE, ending=ending)
    assert found(folder)[-1] == (5, 1, 22, "recomputed_alone")
    assert verdicts(folder) == [("persistent", [1], True)]


@pytest.mark.parametrize("other", [True, False])
def test_of_two_ranks_the_one_whose_gradients_change_is_named(trained, other):
    """If the same bit flips each time, nobody knows which of the two results is right."""
    ranks = [1] if other else [0, 1]
    ending = "E-GRADIENTS-DAMAGED", {"ranks": ranks, "step": 5}
    folder = trained("flips", 2, [Flip(5, 1, 22, always=True, other=other)], *TWO, ending=ending)
    assert verdicts(folder) == [("persistent", ranks, other)]


def test_of_two_ranks_the_one_that_computes_otherwise_than_the_first_time_is_named(trained):
    flips, ending = [Flip(5, 1, 22), Flip(4, 1, 3, visit=2)], ("E-GRADIENTS-DAMAGED", {"ranks": [1], "step": 4})
    folder = trained("flips", 2, flips, *TWO, ending=ending)
    assert found(folder)[0] == (4, 1, 3, "recomputed_alone") and verdicts(folder) == [("persistent", [1], True)]


def test_kernels_that_find_other_bits_each_time_are_no_fault_of_a_machine(trained):
    trained("noise", 2, (), *TWO, ending=("E-GRADIENTS-VARY", {"step": 1}), noise=True)
