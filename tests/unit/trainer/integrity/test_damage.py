"""Bits that flip in the state of a whole run: the rank is named, and the run ends as if nothing had been."""

from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from tests.dist.steps import run_of

from ingot.config import to_toml
from ingot.errors import IngotError
from ingot.events import read_events
from ingot.plugins.callback import StepCallback, StepNumbers
from ingot.schema import events
from ingot.theory.rules import load_run
from ingot.trainer import damage, loop
from ingot.trainer.build import build_parts
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.integrity.verdict import Damage, Trust
from ingot.trainer.integrity.watch import StateHashes
from ingot.trainer.loop import train
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.run import build_trainer

WEIGHT, MOMENT = "blocks.1.mlp.up.weight", "exp_avg_sq"
NORM = "blocks.0.attention_norm.weight"
BITS = (0, 3, 22, 30)
POINTS = ("on_gradients", "on_update", "on_line", "after_step")


@dataclass(frozen=True)
class Flip:
    """A bit that flips on a rank in a step, at a method of the callback: when the step is trained for the `visit`-th
    time, or `always`. elements: of the last so many elements of the tensor."""

    step: int
    rank: int
    bit: int
    kind: str = "weight"
    point: str = "on_gradients"
    name: str = WEIGHT
    visit: int = 1
    always: bool = False
    elements: int = 1


class Flips(StepCallback):
    """Flips the bits of `plan`. "after_step" is after the optimizer's step, before anything else sees the result."""

    plan: tuple[Flip, ...] = ()
    trainer = None
    own = None

    def __init__(self, run, options):
        Flips.own = self
        self.rank, self.step, self.visits = run.rank, 0, Counter()

    def on_gradients(self, step):
        self.step = step
        self.flip("on_gradients")

    def on_update(self, step):
        self.flip("on_update")

    def on_line(self, steps):
        self.flip("on_line")
        return {}

    def flip(self, point):
        self.visits[self.step, point] += 1
        for flip in [f for f in Flips.plan if (f.step, f.rank, f.point) == (self.step, self.rank, point)]:
            if not flip.always and flip.visit != self.visits[self.step, point]:
                continue
            words = self.tensor(flip).view(-1).view(torch.int32)
            words[-flip.elements :] ^= torch.tensor(1, dtype=torch.int32) << flip.bit

    def tensor(self, flip):
        parts = Flips.trainer
        if flip.kind == "copy":
            return next(tensor for (name, _), tensor in parts.model.data.published().items() if name == flip.name)
        if flip.kind == "weight":
            return next(piece.value for piece in parts.model.shards if piece.name == flip.name)
        return parts.optimizer.moments()[flip.name][flip.kind]


def run_rank(rank, ranks, folder, plan):
    """Train as run.py does, with flips. Returns the code and the facts of an error of ingot."""
    Flips.plan = plan
    place = RankInfo(
        rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, attempt=0, device=torch.device("cpu")
    )
    run = Flips.trainer = build_trainer(load_run(folder.config), folder, place, say=lambda line: None)
    step = run.optimizer.step

    def flipped_step(*args, **kwargs):
        step(*args, **kwargs)
        Flips.own.flip("after_step")

    run.optimizer.step = flipped_step
    try:
        train(run)
    except IngotError as error:
        return error.code, error.facts
    finally:
        run.loader.close()


@pytest.fixture
def trained(make_run, fork_ranks, register):
    """trained(name, ranks, plan, *settings) -> folder of a run with these flips."""
    register(Flips)

    def train_run(name, ranks, plan, *settings, steps=14, ending=None):
        folder = make_run(name, steps=steps, log_every=1, every_steps=3, prompts=(), heldout="")
        text = to_toml(load_run(folder.config, ("guard.hash_every=1", *settings))) + "\n[callbacks.probe]\n"
        folder.config.write_text(text)
        endings = fork_ranks(run_rank, ranks, folder, tuple(plan))
        assert endings == [ending] * ranks
        return folder

    return train_run


def found(folder):
    return sorted(read_events(folder.events, events.STATE_DAMAGED), key=lambda e: (e["step"], e["rank"]))


def signs(folder):
    return [(e["step"], e["rank"], e["tensor"], e["bit"], e["sign"]) for e in found(folder)]


def verdicts(folder):
    return [(e["verdict"], e["ranks"], e["named"]) for e in read_events(folder.events, events.STATE_REPLAYED)]


def files_of(folder):
    return list_checkpoints(folder.checkpoints)[0].manifest.files


LAYOUTS = {
    "two copies": (2, ("parallel.dp_replicate=2",)),
    "shards alone": (2, ("parallel.dp_shard=2", "parallel.zero=3")),
}


@pytest.mark.parametrize("layout", [pytest.param("two copies", marks=pytest.mark.slow), "shards alone"])
def test_every_bit_names_its_rank_at_once_and_the_run_keeps_its_bits(trained, layout):
    ranks, settings = LAYOUTS[layout]
    weights = [Flip(5 + i, i % 2, bit) for i, bit in enumerate(BITS)]
    moments = [Flip(9 + i, 1 - i % 2, bit, kind=MOMENT) for i, bit in enumerate(BITS)]
    plain, folder = trained("plain", ranks, (), *settings), trained("flips", ranks, weights + moments, *settings)
    names = [f"model.{WEIGHT}"] * 4 + [f"optim.{MOMENT}.{WEIGHT}"] * 4
    assert signs(folder) == [
        (flip.step, flip.rank, name, flip.bit, "own_hash") for flip, name in zip(weights + moments, names, strict=True)
    ]
    assert verdicts(folder) == [("transient", [flip.rank], True) for flip in weights + moments]
    assert files_of(folder) == files_of(plain)


def test_of_two_copies_the_one_that_the_replay_changes_is_named(trained):
    """After the update, before the state is hashed: both ranks have hashed what they have, and neither saw a change."""
    flip = Flip(5, 1, 0, point="after_step")
    settings = ("parallel.dp_replicate=2", "guard.hash_every=5")
    plain, folder = trained("plain", 2, (), *settings), trained("flips", 2, [flip], *settings)
    assert signs(folder) == [(5, rank, f"model.{WEIGHT}", 0, "undecided") for rank in (0, 1)]
    assert verdicts(folder) == [("transient", [1], True)]
    assert files_of(folder) == files_of(plain)


@pytest.mark.parametrize(("shards", "recomputes"), [(1, 0), (1, 60), pytest.param(2, 0, marks=pytest.mark.slow)])
def test_of_two_copies_that_are_both_spoiled_the_one_whose_gradients_changed_first_is_named(
    trained, shards, recomputes
):
    """The copies are compared some steps after a flip: the gradients of both, and so their weights, are others by then.
    With gradients that two ranks compute, each rank also computes parts of the other one, which are not sampled."""
    flips = [Flip(8 + 6 * i, i % 2, bit, point=point) for i, (bit, point) in enumerate(zip(BITS, POINTS, strict=True))]
    flips[0] = replace(flips[0], elements=16)  # the rounding of the next update may undo the last bit of one element
    settings = ("parallel.dp_replicate=2", "guard.hash_every=6", "checkpoint.every_steps=6")
    settings = (*settings, f"guard.recompute_every={recomputes}", f"parallel.dp_shard={shards}")
    settings = (*settings, "parallel.zero=3") if shards > 1 else settings
    plain = trained("plain", 2 * shards, (), *settings, steps=32)
    folder = trained("flips", 2 * shards, flips, *settings, steps=32)
    assert {sign for *_, sign in signs(folder)} == {"undecided"}
    assert verdicts(folder) == [("transient", [flip.rank], True) for flip in flips]
    assert files_of(folder) == files_of(plain)


@pytest.mark.slow
def test_of_three_copies_the_one_that_differs_is_named_at_once(trained):
    flips = [Flip(5, 2, 30, point="after_step"), Flip(7, 0, 22, point="after_step", kind=MOMENT)]
    settings = ("parallel.dp_replicate=3", "guard.hash_every=5", "train.global_batch=6")
    plain, folder = trained("plain", 3, (), *settings), trained("flips", 3, flips, *settings)
    weight, moment = f"model.{WEIGHT}", f"optim.{MOMENT}.{WEIGHT}"
    assert signs(folder)[0] == (5, 2, weight, 30, "minority")
    (_, later) = found(folder)
    assert (later["step"], later["rank"], later["tensor"] in (weight, moment)) == (9, 0, True)
    assert verdicts(folder) == [("transient", [2], True), ("transient", [0], True)]
    assert files_of(folder) == files_of(plain)


@pytest.mark.slow
def test_norms_are_compared_over_tensor_ranks_and_copies_of_masters_over_those_that_share_them(trained):
    flips = [Flip(5, 1, 22, point="after_step", name=NORM), Flip(8, 0, 3, kind="copy", point="on_gradients")]
    settings = ("parallel.tp=2", "parallel.dp_shard=2", "parallel.zero=1")
    plain, folder = trained("plain", 4, (), *settings), trained("flips", 4, flips, *settings)
    assert signs(folder)[:2] == [(5, rank, f"model.{NORM}", 22, "undecided") for rank in (0, 1)]
    assert [(e["step"], e["rank"], e["tensor"], e["bit"]) for e in found(folder)[2:]] == [
        (8, rank, f"copy of model.{WEIGHT}", 3) for rank in (0, 2)
    ]
    assert verdicts(folder) == [("transient", [1], True), ("transient", [0], True)]
    assert files_of(folder) == files_of(plain)


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_nothing_damaged_is_saved(trained, mode):
    """Bits flip in steps that are saved: after the hash of the update, and after that before the save."""
    flips = [
        Flip(6, 0, 30, point="on_update"),
        Flip(9, 0, 3, point="on_line", kind=MOMENT),
        Flip(14, 0, 0, point="on_line"),
    ]
    settings = (f"checkpoint.mode={mode}",)
    plain, folder = trained("plain", 1, (), *settings), trained("flips", 1, flips, *settings)
    # In the background, a save goes on until the next line, or is left out: then the next hash finds it.
    assert [(e["step"] - (e["step"] == 10), e["bit"]) for e in found(folder)] == [(6, 30), (9, 3), (14, 0)]
    back = [e["from_step"] for e in read_events(folder.events, events.ROLLED_BACK)]
    assert back == ([6, 9, 14] if mode == "sync" else [6, 10, 14])
    assert files_of(folder) == files_of(plain)


def test_damage_that_comes_again_ends_the_run(trained):
    ending = "E-STATE-DAMAGED", {"ranks": [1], "step": 5}
    folder = trained("flips", 2, [Flip(5, 1, 3, always=True)], "parallel.dp_replicate=2", ending=ending)
    assert verdicts(folder) == [("persistent", [1], True)]


@pytest.mark.parametrize(("has_copies", "shown"), [(True, "no damage"), (False, "nothing is compared")])
def test_a_suspicion_has_a_result_or_the_reason_why_it_has_none(monkeypatch, has_copies, shown):
    lines, finding = [], SimpleNamespace(kinds=("suspected corruption",))
    hashes = SimpleNamespace(
        has_copies=has_copies,
        gradients=None,
        suspect_damage=lambda step: None,
        compare=lambda: None,
        read=lambda: False,
    )
    monkeypatch.setattr(damage, "any_rank", bool)
    run = SimpleNamespace(hashes=hashes, loss_scale=None, say=lines.append)
    assert not damage.look_closer(run, [SimpleNamespace(step=131, finding=finding, loss=3.0)])
    assert "step 131" in lines[0] and shown in lines[-1] and len(lines) == 1 + has_copies


def test_an_overflow_that_the_loss_scale_explains_compares_nothing():
    asked, own = [], SimpleNamespace(kinds=("gradient not finite",))
    hashes = SimpleNamespace(has_copies=True, hash_now=asked.append)
    one = StepNumbers(7, 3.0, float("inf"), True, finding=own)
    assert not damage.look_closer(SimpleNamespace(hashes=hashes, loss_scale=object()), [one]) and not asked


def test_what_was_compared_in_an_abandoned_pass_is_forgotten(monkeypatch, fork_ranks):
    """The run goes back from 20 to 10; copies that were equal after 15 then say nothing of the pass that comes."""

    def sound(rank, ranks):
        parts = build_parts(run_of(), torch.device("cpu"), None)
        hashes = StateHashes(parts.state, parts.model.data.published(), parts.mesh, 5)
        hashes._checked = [5, 10, 15, 20]
        monkeypatch.setattr(loop, "reload", lambda *_: 10)
        monkeypatch.setattr(loop, "report_roll_back", lambda *_: None)
        loop.roll_back(SimpleNamespace(hashes=hashes), 20)
        hashes.replay(Damage(18, Trust.UNDECIDED, (0,)), 5)
        return hashes._sound, hashes._checked

    assert fork_ranks(sound, 1) == [(10, [5])]


SUSPICIOUS = (
    *("guard.window=8", "guard.ready=4", "guard.settle_steps=0", "guard.sigmas=3.0"),
    *("guard.loss_spread=10.0", "guard.corruption_factor=1.3", "watch.log_every=11", "guard.hash_every=20"),
)


def test_a_step_that_looks_like_damage_is_followed_by_a_comparison(trained):
    """Half of the embedding of one copy is damaged in step 7, and the gradient norms of the next steps show it. At
    their log line the rank is named, and the guard takes no measure against the row of skipped steps."""
    flip = Flip(7, 2, 25, name="embed.weight", elements=4800)
    settings = (*SUSPICIOUS, "parallel.dp_replicate=3", "train.global_batch=6", "checkpoint.every_steps=6")
    plain, folder = trained("plain", 3, (), *settings), trained("flips", 3, [flip], *settings)
    first = next(read_events(folder.events, events.FINDING))
    assert (first["step"], first["found"]) == (8, ["gradient spike", "suspected corruption"])
    assert signs(folder) == [(11, 2, "model.embed.weight", None, "minority")]
    back = [(e["from_step"], e["to_step"], e["reason"]) for e in read_events(folder.events, events.ROLLED_BACK)]
    assert back == [(11, 6, "damage")] and not folder.guard.exists()
    assert not list(read_events(plain.events, events.FINDING))
    assert verdicts(folder) == [("transient", [2], True)]
    assert files_of(folder) == files_of(plain)


def test_after_a_loss_spike_copies_are_compared_before_the_guard_takes_a_measure(trained):
    """A flipped high bit of a weight makes the loss large, and no norm: the guard would go back and name nobody."""
    own = ("guard.corruption_factor=1e6", "guard.loss_spread=0.05", "guard.level=2", "watch.log_every=1")
    settings = (*SUSPICIOUS, *own, "parallel.dp_replicate=2", "checkpoint.every_steps=6")
    folder = trained("flips", 2, [Flip(8, 1, 30)], *settings)
    assert [event["found"] for event in read_events(folder.events, events.FINDING)][:1] == [["loss spike"]]
    assert verdicts(folder) == [("transient", [1], True)] and not folder.guard.exists()


@pytest.mark.slow
def test_damage_in_other_steps_each_time_ends_the_run(trained, fork_ranks):
    """Each goes away when its steps are trained again; the limit holds for all attempts of the run together."""
    plan, facts = [Flip(step, 0, 3) for step in range(5, 10)], {"ranks": [0], "step": 8, "times": 3}
    folder = trained("flips", 1, plan, "guard.max_damages=3", ending=("E-DAMAGE-LIMIT", facts))
    assert verdicts(folder) == [("transient", [0], True)] * 3
    ((code, facts),) = fork_ranks(run_rank, 1, folder, (Flip(8, 0, 3),))
    assert (code, facts["step"], facts["times"]) == ("E-DAMAGE-LIMIT", 8, 3)
    folder.config.write_text(to_toml(load_run(folder.config, ("guard.max_damages=0",))))
    assert fork_ranks(run_rank, 1, folder, tuple(plan)) == [None]


def test_between_two_hashes_copies_find_damage_and_all_steps_that_are_trained_again_are_hashed(trained):
    """No rank sees its own change at step 7, and the gradients of all are spoiled until the copies differ at step 9:
    nobody is named for sure. When the steps are trained again, a flip names its rank at once."""
    settings = ("parallel.dp_replicate=2", "guard.hash_every=100")
    flips = [Flip(7, 1, 22), Flip(8, 1, 3, visit=2)]
    folder = trained("flips", 2, flips, *settings, ending=("E-STATE-DAMAGED", {"ranks": [1], "step": 8}))
    assert [(e["step"], e["rank"], e["sign"]) for e in found(folder)] == [
        (8, 1, "own_hash"),
        (9, 0, "undecided"),
        (9, 1, "undecided"),
    ]
    assert verdicts(folder) == [("persistent", [1], True)]
