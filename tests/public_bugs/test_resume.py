"""Runs that continue from the wrong place: other data than was left, a half-written checkpoint, step 0, other layers.

Each other trainer is a function of a few lines, with the choice that its report describes.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.board.bench import Bench, options
from tests.dist.steps import ARCH
from tests.e2e.conftest import write_tokens
from tests.expect import refused
from tests.unit.trainer.checkpoint.conftest import make_training, save, state_of
from torch import nn

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.checkpoint import file_of
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.load import resume
from ingot.trainer.checkpoint.manifest import MANIFEST
from ingot.trainer.loader.loader import Loader
from ingot.trainer.model.transformer import Transformer
from ingot.trainer.parallel.pipeline import cut_stage

from .runs import planted

# -- data --


def saved_iterator(data: list[int], position: int) -> itertools.cycle:
    """litgpt issue 1712: the loader is moved to its saved position, and an iterator that begins anew at the end of each
    epoch takes that for the beginning."""
    return itertools.cycle(data[position:])


def first_epoch_again(epochs: list[list[int]], position: int) -> list[int]:
    """accelerate pull request 4071: the position in the epoch is restored, and the number of the epoch is 0."""
    return epochs[0][position:]


def test_the_rest_of_an_epoch_is_read_once_and_the_next_one_is_whole(tmp_path):
    found = list(itertools.islice(saved_iterator(list(range(10)), 9), 4))
    assert found == [9, 9, 9, 9]
    write_tokens(tmp_path / "tokens", 3_201)  # 100 windows of 32 tokens, and the target of the last
    size = {"seq_len": 32, "global_batch": 5, "micro_batch": 5, "seed": 7, "last_step": 60}  # 20 steps an epoch

    def samples(first_step: int) -> list[list[int]]:
        with Loader(tmp_path / "tokens", first_step=first_step, **size) as loader:
            return [batch.sample_ids.tolist() for batch in loader]

    undisturbed = samples(1)
    epochs = [list(itertools.chain(*undisturbed[first : first + 20])) for first in (0, 20, 40)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(100))] * 3
    assert first_epoch_again(epochs, 90) != epochs[1][90:]  # epochs differ in their order
    for step in (19, 39):  # at 90% of the first epoch, and of the second
        assert samples(step) == undisturbed[step - 1 :]


# -- checkpoints --


def half_written(checkpoint: Path) -> None:
    """RLinf pull request 1469: killed between the weights and the state of the loader, which is written last."""
    (checkpoint / MANIFEST).unlink()


def truncated(checkpoint: Path) -> None:
    """speculators pull request 739."""
    file = checkpoint / file_of(0)
    file.write_bytes(file.read_bytes()[:-40])


def empty(checkpoint: Path) -> None:
    """metaseq issue 53."""
    (checkpoint / file_of(0)).write_bytes(b"")


def highest_step(folder: RunFolder) -> tuple[int, bool]:
    """Load the weights of the checkpoint with the highest number. Returns its step, and whether its place in the data
    is there: RLinf warned if not, and began the data again. Raises what the reader of its file raises."""
    newest = max(folder.checkpoints.glob("step-*"))
    load_file(newest / file_of(0))
    position = newest / MANIFEST
    return int(newest.name.removeprefix("step-")), position.exists() and bool(json.loads(position.read_text()))


def load_or_initialize(folder: RunFolder) -> int:
    """marin pull request 8760: what cannot be loaded counts as not there. Returns the step to begin after."""
    try:
        return highest_step(folder)[0]
    except (SafetensorError, OSError):
        return 0


@pytest.fixture
def saved(tmp_path) -> RunFolder:
    """A run with checkpoints of the steps 2 and 4."""
    folder = RunFolder(tmp_path / "run")
    model, optimizer = make_training()
    for step in (2, 4):
        save(folder, step, model, optimizer)
    return folder


def resumed(folder: RunFolder) -> tuple[int, list[int]]:
    """Return the step from which ingot continues, and the checkpoints that it refused."""
    found: list[int] = []
    manifest = resume(
        folder,
        state_of(*make_training(seed=5, steps=1)),
        settings={"optim.lr": 0.01},
        data_fingerprint="d" * 64,
        on_refused=lambda step, path, reason, again: found.append(step),
    )
    assert manifest is not None
    return manifest.step, found


@pytest.mark.parametrize("damage", [half_written, truncated, empty], ids=lambda damage: damage.__name__)
def test_a_torn_newest_checkpoint_is_passed_over(saved, damage: Callable[[Path], None]):
    damage(saved.checkpoint(4))
    if damage is half_written:
        assert highest_step(saved) == (4, False)  # the weights of step 4 on the data of step 0, without an error
    else:
        with pytest.raises(SafetensorError):
            highest_step(saved)  # and in every start after this one
        assert load_or_initialize(saved) == 0
    assert resumed(saved) == (2, [4])


def test_checkpoints_that_cannot_be_read_are_no_reason_to_begin_again(saved):
    for step in (2, 4):
        truncated(saved.checkpoint(step))
    before = {path: path.stat().st_mtime_ns for path in saved.checkpoints.rglob("*")}
    assert load_or_initialize(saved) == 0
    with refused("E-CKPT-NONE-USABLE", checkpoints=2):
        resumed(saved)
    assert {path: path.stat().st_mtime_ns for path in saved.checkpoints.rglob("*")} == before


# -- snapshots of a peer --


def steps_until_not_finite(weight: torch.Tensor) -> int:
    """Train on `weight`, and return the first step whose loss is not finite; 0 if there is none within ten."""
    weight = weight.clone().requires_grad_()
    for step in range(1, 11):
        loss = (weight**2).sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        if not loss.isfinite():
            return step
        weight = (weight - 0.1 * gradient * weight.abs()).detach().requires_grad_()
    return 0


def test_a_copy_with_a_wrong_bit_loads_trains_and_fails_at_the_same_step_every_time():
    """Megatron-LM issue 5281: the copy of a peer is loaded as it is. Three steps later the loss is not a number, and
    again after each restart, which takes the same copy: 44 times, because nothing shows whether copy or device is bad.

    ingot compares a copy with its hash where it arrives and where it is lent (tests/unit/trainer/test_replicas.py)."""
    state = torch.tensor([2.5, -0.25, 0.125])
    copy = state.clone()
    copy.view(torch.int32)[0] ^= 1 << 26  # a bit of an exponent: 640
    assert copy.isfinite().all() and steps_until_not_finite(state) == 0
    failed = [steps_until_not_finite(copy) for _ in range(3)]
    assert failed[0] > 1 and len(set(failed)) == 1


@pytest.mark.slow
def test_a_state_that_fails_after_each_restart_ends_the_run_and_is_not_saved(bench: Bench):
    """A hash does not show what was wrong before it was taken. The second attempt continues after step 12, and its
    weights are no numbers after its third step: the run ends, with the documents to look at, in place of a loop. (The
    guard would go back.)"""
    settings = (*planted(bench, "public_bugs/planted_poison.py"), "checkpoint.every_steps=12", 'guard.preset="watch"')
    ended = bench.train("poisoned", *options(settings))
    assert ended.code == 93 and "E-LOSS-NOT-FINITE" in ended.output, ended.output
    folder = bench.folder("poisoned")
    assert [event["from_step"] for event in read_events(folder.events, events.RUN_STARTED)] == [0, 12]
    newest = max(folder.checkpoints.glob("step-*"))
    assert newest == folder.checkpoint(12)
    assert all(t.isfinite().all() for t in load_file(newest / file_of(0)).values() if t.is_floating_point())


# -- layers --


def test_a_stage_keeps_the_numbers_of_its_layers():
    """Megatron-LM issue 7452, finding 12: each stage of a pipeline numbers its layers from 0, so a strict load on
    another number of stages finds every name, and takes the first layers for the last. Any checkpoint of ingot loads
    into any layout, bit for bit: tests/dist/test_reshard.py."""
    whole = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    stage = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    state = whole.state_dict()
    stage.load_state_dict({name: state[name] for name in stage.state_dict()}, strict=True)
    assert torch.equal(stage[0].weight, whole[0].weight) and not torch.equal(stage[0].weight, whole[2].weight)
    with torch.device("meta"):
        model = cut_stage(Transformer(ARCH), 1, (2, 2))
    assert {name.split(".")[1] for name, _ in model.named_parameters() if name.startswith("blocks.")} == {"2", "3"}
