"""State that a model learns without an optimizer: biases and loads of routers, whole, by layer, on any layout."""

import pytest
import torch
from tests.checkpoints import ledger_of
from tests.expect import refused

from ingot.trainer.checkpoint.load import load_model, resume
from ingot.trainer.checkpoint.manifest import read_manifest
from ingot.trainer.checkpoint.save import save_checkpoint
from ingot.trainer.checkpoint.state import TrainingState

from .conftest import WholeOptimizer, WholePiece, facts, make_training, state_of

EXPERTS = 6
LAYERS = [1, 2, 3]


def name_of(layer: int) -> str:
    return f"blocks.{layer}.moe.router.bias"


def learned(layer: int) -> torch.Tensor:
    return torch.arange(EXPERTS) + 10.0 * layer


def routers(layers, owner=True, experts=EXPERTS) -> list[WholePiece]:
    return [WholePiece(name_of(layer), torch.zeros(experts), owner) for layer in layers]


def filled(buffers: list[WholePiece]) -> list[WholePiece]:
    for layer, piece in zip(LAYERS, buffers, strict=True):
        piece.value.copy_(learned(layer))
    return buffers


def load(folder, state):
    settings = {"optim.lr": 0.01}
    return resume(folder, state, settings=settings, data_fingerprint="d" * 64, on_refused=lambda *refused: None)


def save(folder, training, **more):
    return save_checkpoint(folder, facts(10), state_of(*training, **more), ledger_of(folder, 10), keep=2).path


def test_they_are_tensors_of_the_model_without_moments(folder, training):
    path = save(folder, training, buffers=filled(routers(LAYERS)))
    names = [name for name in read_manifest(path).tensors if "router" in name]
    assert sorted(names) == [f"model.{name_of(layer)}" for layer in LAYERS]


# Saved by ranks with these layers each, in a pipeline and as copies of it.
SAVED = {"one rank": [LAYERS], "pipeline": [[1], [2, 3]], "v-shape, and copies": [[1, 3], [2], [1, 3], [2]]}
LOADED = {"one rank": [LAYERS], "pipeline": [[], [1, 2], [3]], "copies": [LAYERS, LAYERS]}


@pytest.mark.parametrize("after", LOADED)
@pytest.mark.parametrize("before", SAVED)
def test_saved_on_one_layout_and_loaded_on_another(fork_ranks, folder, before, after):
    def saving(rank, world, layers_of_rank):
        model, adamw = make_training()
        first = [layers_of_rank.index(layers) for layers in layers_of_rank][rank] == rank
        buffers = routers(layers_of_rank[rank], owner=first)
        for layer, piece in zip(layers_of_rank[rank], buffers, strict=True):
            piece.value.copy_(learned(layer) if first else torch.full((EXPERTS,), -1.0))
        pieces = [WholePiece(name, p.detach(), owner=rank == 0) for name, p in model.named_parameters()]
        state = TrainingState(pieces, WholeOptimizer(model, adamw), buffers=buffers)
        save_checkpoint(folder, facts(10), state, ledger_of(folder, 10), keep=2)

    def loading(rank, world, layers_of_rank):
        buffers = routers(layers_of_rank[rank])
        assert load(folder, state_of(*make_training(seed=3), buffers=buffers)).step == 10
        return [piece.value.tolist() for piece in buffers]

    fork_ranks(saving, len(SAVED[before]), SAVED[before])
    found = fork_ranks(loading, len(LOADED[after]), LOADED[after])
    assert found == [[learned(layer).tolist() for layer in layers] for layers in LOADED[after]]


def test_a_checkpoint_from_before_they_were_leaves_their_first_values(folder, training):
    save(folder, training)
    buffers = routers(LAYERS)
    assert load(folder, state_of(*training, buffers=buffers)).step == 10
    assert all(not piece.value.any() for piece in buffers)


def test_none_of_those_that_a_checkpoint_holds_may_be_lost(folder, training):
    save(folder, training, buffers=filled(routers(LAYERS)))
    with refused("E-CKPT-NONE-USABLE"):
        load(folder, state_of(*training))


def test_loads_may_be_held_in_vain(folder, training):
    """A run may go on without its balance loss, and be scored by its present run file; what it computes is the same."""
    loads = [WholePiece(f"blocks.{layer}.moe.router.load", learned(layer)) for layer in LAYERS]
    path = save(folder, training, buffers=[*loads, *filled(routers(LAYERS))])
    buffers = routers(LAYERS)
    assert load(folder, state_of(*training, buffers=buffers)).step == 10
    assert [piece.value.tolist() for piece in buffers] == [learned(layer).tolist() for layer in LAYERS]
    with refused("E-CKPT-OTHER-MODEL"):
        load_model(path, make_training(seed=4)[0])


def test_a_model_alone_needs_no_loads_and_lacks_none(folder, training):
    path = save(folder, training, buffers=[WholePiece("0.router.load", learned(1))])
    load_model(path, make_training(seed=4)[0])
    with_load = make_training(seed=4)[0]
    with_load[0].router = torch.nn.Module()
    with_load[0].router.register_buffer("load", torch.ones(EXPERTS))
    load_model(path, with_load)
    assert torch.equal(with_load[0].weight, training[0][0].weight)


def test_a_model_alone_whose_biases_came_after_the_checkpoint_has_zeros(folder, training):
    def with_bias():
        model = make_training(seed=4)[0]
        model[0].router = torch.nn.Module()
        model[0].router.register_buffer("bias", torch.zeros(EXPERTS))
        return model

    path = save(folder, training)
    model = with_bias()
    load_model(path, model)
    assert not model[0].router.bias.any() and torch.equal(model[0].weight, training[0][0].weight)
    state = state_of(*training, buffers=[WholePiece("2.router.bias", learned(1))])
    path = save_checkpoint(folder, facts(20), state, ledger_of(folder, 20), keep=2).path
    with refused("E-CKPT-OTHER-MODEL"):
        load_model(path, with_bias())


def test_another_number_of_experts_is_refused(folder, training):
    save(folder, training, buffers=filled(routers(LAYERS)))
    with refused("E-CKPT-NONE-USABLE"):
        load(folder, state_of(*training, buffers=routers(LAYERS, experts=8)))


def test_a_model_alone_finds_them_among_its_buffers(folder, training):
    model, _ = training
    path = save(folder, training, buffers=[WholePiece("0.bias_of_router", learned(1))])
    alone, _ = make_training(seed=4)
    alone[0].register_buffer("bias_of_router", torch.zeros(EXPERTS))
    load_model(path, alone)
    assert torch.equal(alone[0].bias_of_router, learned(1))
    assert torch.equal(alone[0].weight, model[0].weight)
