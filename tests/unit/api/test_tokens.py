"""TokenDataset reads the samples of training, in their order, on any number of ranks and workers."""

import json
import pickle
import shutil

import numpy as np
import pytest
from tests.expect import refused

import ingot

SHAPE = {"seq_len": 16, "global_batch": 4, "seed": 7}


def batches(dataset, steps) -> list[np.ndarray]:
    return [dataset.batch(step).inputs for step in steps]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("weights", [None, {"web": 1.0}])
def test_the_samples_are_those_of_training(golden, ranks, weights):
    pytest.importorskip("torch")
    from ingot.trainer.loader.loader import Loader

    folder = golden / "data" / "tokens" / "train"
    for rank in range(ranks):
        options = {**SHAPE, "weights": weights, "rank": rank, "ranks": ranks}
        dataset = ingot.TokenDataset(golden / "data", **options)
        with Loader(folder, micro_batch=1, first_step=1, last_step=100, **options) as loader:
            for theirs in loader:
                ours = dataset.batch(theirs.step)
                assert (ours.window_ids == theirs.sample_ids).all()
                assert (ours.inputs == theirs.inputs.reshape(-1, 16).numpy()).all()
                assert (ours.targets == theirs.targets.reshape(-1, 16).numpy()).all()


def test_targets_that_are_masked_leave_inputs_alone(golden):
    dataset = ingot.TokenDataset(golden / "data", **SHAPE)
    batch = dataset.batch(1)
    before = batch.inputs.copy()
    batch.targets[batch.targets > 0] = -100
    assert (batch.inputs == before).all()
    pytest.importorskip("torch")
    (batch,) = dataset.torch(last_step=1)
    batch.targets.fill_(-100)
    assert (batch.inputs.numpy() == before).all()


def test_the_samples_are_those_in_the_ledger_of_a_run(golden):
    consumed = np.fromfile(golden / "dense-1-rank" / "ledger" / "steps-00000001-00000004.i64", "<i8").reshape(4, 4)
    dataset = ingot.TokenDataset(golden / "data", **SHAPE)
    assert [dataset.batch(step).window_ids.tolist() for step in range(1, 5)] == consumed.tolist()


def test_a_loop_is_a_pass_and_the_next_loop_the_next(golden):
    dataset = ingot.TokenDataset(golden / "data", **SHAPE)
    first, second = list(dataset), list(dataset)
    assert len(first) == len(second) == len(dataset) > 10
    assert [batch.step for batch in first + second] == list(range(1, 2 * len(dataset) + 1))
    seen = np.concatenate([batch.window_ids for batch in first])
    assert len(set(seen.tolist())) == len(seen), "no window of an epoch comes twice"
    assert (first[0].targets[:, :-1] == first[0].inputs[:, 1:]).all()
    assert (first[0].inputs.dtype, first[0].inputs.shape) == (np.int64, (4, 16))


def test_a_position_continues_in_another_process_and_on_other_ranks(golden):
    dataset = ingot.TokenDataset(golden / "data", **SHAPE)
    for batch in dataset:
        if batch.step == 5:
            break
    state = json.loads(json.dumps(dataset.state_dict()))
    assert state["step"] == 5 and dataset.state_dict(step=3)["step"] == 3
    halves = [ingot.TokenDataset(golden / "data", **SHAPE, rank=rank, ranks=2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    whole, parts = next(iter(dataset)), [next(iter(half)) for half in halves]
    assert whole.step == parts[0].step == 6
    assert (np.concatenate([part.inputs for part in parts]) == whole.inputs).all()
    copy = pickle.loads(pickle.dumps(halves[1]))
    assert (next(iter(copy)).inputs == next(iter(halves[1])).inputs).all() and "rank 1 of 2" in repr(copy)


def test_a_state_of_another_order_is_refused(golden):
    state = ingot.TokenDataset(golden / "data", **SHAPE).state_dict()
    for other in ({"seed": 8}, {"seq_len": 8}, {"global_batch": 8}, {"weights": {"web": 1.0}}):
        with refused("E-DATASET-STATE", changed=list(other)):
            ingot.TokenDataset(golden / "data", **SHAPE | other).load_state_dict(state)
    with refused("E-DATASET-STATE", changed=["tokens"]):
        ingot.TokenDataset(golden / "data" / "tokens" / "heldout", **SHAPE).load_state_dict(state)


def test_wrong_ranks_batches_and_steps_are_refused(golden):
    with refused("E-DATASET-RANK", rank=2, ranks=2):
        ingot.TokenDataset(golden / "data", **SHAPE, rank=2, ranks=2)
    with refused("E-DATASET-BATCH", global_batch=4, ranks=3):
        ingot.TokenDataset(golden / "data", **SHAPE, ranks=3)
    with refused("E-DATASET-STEP", step=0):
        ingot.TokenDataset(golden / "data", **SHAPE).batch(0)
    with refused("E-TOKENS-MISSING"):
        ingot.TokenDataset(golden / "nowhere", **SHAPE)


def test_damaged_tokens_are_refused_when_they_are_read(golden, tmp_path):
    folder = shutil.copytree(golden / "data" / "tokens" / "train", tmp_path / "train")
    (shard,) = folder.glob("*.tokens")
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with refused("E-SHARD-HASH"):
        list(ingot.TokenDataset(folder, **SHAPE))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_of_a_data_loader_share_the_steps_in_order(golden, workers):
    torch = pytest.importorskip("torch")
    dataset = ingot.TokenDataset(golden / "data", **SHAPE, rank=1, ranks=2)
    dataset.step = 2
    loader = torch.utils.data.DataLoader(dataset.torch(last_step=9), batch_size=None, num_workers=workers)
    for _ in range(2):  # every pass over the loader begins at the same position
        found = list(loader)
        assert [batch.step for batch in found] == list(range(3, 10)) and len(loader) == 7
        for batch, inputs in zip(found, batches(dataset, range(3, 10)), strict=True):
            assert batch.inputs.dtype == torch.int64 and (batch.inputs.numpy() == inputs).all()
    assert dataset.step == 2 and len(dataset.torch()) == len(dataset) - 2
