"""Everything that a rank holds of a run's state, as named blocks of whole tensors. The names are those in the files.

    model.<parameter>              master weights, and buffers that training changes (biases and loads of routers)
    optim.exp_avg.<parameter>      AdamW's moments, cut like the parameter
    optim.exp_avg_sq.<parameter>
    optim.step.<parameter>         a scalar, the same for every block
    extra.<name>                   small tensors that are the same on every rank, such as a loss scale
    callback.<name>.<key>          tensors of a callback: one that is the same on every rank, or
    callback.<name>.<key>.<parameter>  one that is cut like the parameter

Nothing else here depends on the layout: another layout loads the same tensors in different blocks. Learning rates are
not part of the state, because they are a function of the step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import safetensors
import torch
from torch import Tensor

from ingot.errors import CheckpointError

MODEL, OPTIM, EXTRA, CALLBACK = "model.", "optim.", "extra.", "callback."
CPU, CUDA = "random.cpu", "random.cuda"
GENERATORS = (CPU, CUDA)
# The suffix of the names of experts' loads in the previous step. Only a balance loss reads them, and a run may add or
# remove the loss; the model's outputs do not depend on them.
LOAD = ".router.load"
# The suffix of the names of router biases. A model that never had biases computes the same as with zeros.
BIAS = ".router.bias"
Moments = Mapping[str, Mapping[str, Tensor]]  # parameter -> "exp_avg", "exp_avg_sq", "step" -> tensor


class SavedShard(Protocol):
    """A block of the parameter `name`: `value`, of shape `sizes`, at `offsets` in the parameter, of shape `shape`.

    owner: True on exactly one of the ranks that hold this block. The owner writes the block, and all of them read it.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def value(self) -> Tensor: ...
    @property
    def owner(self) -> bool: ...


class MomentStore(Protocol):
    """The part of an optimizer that checkpoints use."""

    def moments(self) -> Moments:
        """Return the moments of every shard that is not empty; zeros before the first step.

        Saving reads the tensors, and loading writes into them. All are held at once, so moments on a disk should be
        memory-mapped.
        """
        ...

    def put_moments(self, moments: Moments) -> None:
        """Store the tensors that `moments` returned, after loading has filled them."""
        ...


@dataclass(frozen=True)
class StateBlock:
    """The block `tensor` of the stored tensor `name`, which has the shape `shape`; the block begins at `offsets`.

    written: True on the rank that saves the block. optional: the block keeps its value if the checkpoint lacks it.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    written: bool = False
    optional: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass(frozen=True)
class TrainingState:
    """The tensors of this rank that a checkpoint holds. Loading fills the same tensors in place.

    pieces: the parameter shards of this rank; a pipeline stage has only its own parameters.
    extras: small tensors with the same names and values on every rank. optional_extras: the names of extras that a
    checkpoint may lack (they keep their value) or hold in addition (they are ignored).
    buffers: shards of the model that no optimizer updates. A checkpoint may lack them, for example if its run did not
    balance experts; then they begin as in a new run. If only the checkpoint has loads, they are ignored; if only the
    checkpoint has biases, it is of another model, because without them a router chooses other experts.
    callbacks: "NAME.key" -> a tensor with the same value on every rank, or parameter -> a tensor cut like it. A
    checkpoint may lack them or have others: callbacks come and go.
    """

    pieces: Sequence[SavedShard]
    optimizer: MomentStore
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    optional_extras: frozenset[str] = frozenset()
    buffers: Sequence[SavedShard] = ()
    callbacks: Mapping[str, Tensor | Mapping[str, Tensor]] = field(default_factory=dict)

    def blocks(self, moments: Moments, *, first_rank: bool) -> list[StateBlock]:
        """Return this rank's blocks. moments: the optimizer's. Raises CheckpointError if a tensor's shape is wrong."""
        blocks = [block for piece in self.pieces for block in _blocks_of(piece, moments)]
        blocks += [_block(MODEL + piece.name, piece.value, piece, optional=True) for piece in self.buffers]
        for name, tensor in self.extras.items():
            blocks.append(_everywhere(EXTRA + name, tensor, first_rank, optional=name in self.optional_extras))
        for name, tensor in self.callbacks.items():
            if isinstance(tensor, Tensor):
                blocks.append(_everywhere(CALLBACK + name, tensor, first_rank, optional=True))
                continue
            by_piece = [(piece, tensor[piece.name]) for piece in self.pieces if piece.name in tensor]
            blocks += [_block(f"{CALLBACK}{name}.{p.name}", own, p, optional=True) for p, own in by_piece]
        return blocks

    def weights(self) -> list[StateBlock]:
        """Return this rank's blocks of master weights and buffers, which a save of the weights alone holds."""
        return [_block(MODEL + piece.name, piece.value, piece) for piece in (*self.pieces, *self.buffers)]

    def is_skipped(self, name: str) -> bool:
        """Return whether loading may ignore the stored tensor `name`. The answer is the same on every rank."""
        if name.startswith(MODEL):
            return name.endswith(LOAD)
        if name.startswith(CALLBACK):
            return True
        return name.startswith(EXTRA) and name.removeprefix(EXTRA) in self.optional_extras


def _everywhere(name: str, tensor: Tensor, first_rank: bool, *, optional: bool) -> StateBlock:
    """Return the block of a tensor that every rank has with the same value."""
    return StateBlock(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor, written=first_rank, optional=optional)


def _block(name: str, tensor: Tensor, piece: SavedShard, *, optional: bool = False) -> StateBlock:
    if tuple(tensor.shape) != tuple(piece.sizes):
        raise CheckpointError(
            "E-STATE-SHAPE",
            f"{name} has the shape {list(tensor.shape)}, but its parameter shard has {list(piece.sizes)}",
            rule="the value and the moments of a parameter shard have the same shape",
            fix="change `moments` of the optimizer to return tensors of the shard's shape",
            tensor=name,
            shape=list(tensor.shape),
            expected=list(piece.sizes),
        )
    return StateBlock(name, tuple(piece.shape), tuple(piece.offsets), tensor, written=piece.owner, optional=optional)


def _blocks_of(piece: SavedShard, moments: Moments) -> Iterator[StateBlock]:
    yield _block(MODEL + piece.name, piece.value, piece)
    if piece.value.numel() == 0:
        return
    if piece.name not in moments:
        raise CheckpointError(
            "E-STATE-MOMENTS",
            f"the optimizer has no state for {piece.name}",
            rule="a trained parameter is saved with its moments",
            fix="change `moments` of the optimizer to return the moments of every parameter",
            tensor=piece.name,
        )
    # Every rank with a block has the scalar `step`; only the owner of the block at the origin writes it.
    first = piece.owner and not any(piece.offsets)
    for kind, tensor in moments[piece.name].items():
        name = f"{OPTIM}{kind}.{piece.name}"
        yield (
            StateBlock(name, (), (), tensor.reshape(()), written=first)
            if kind == "step"
            else _block(name, tensor, piece)
        )


def random_state() -> list[tuple[str, Tensor]]:
    """Return the states of this rank's random generators, as (key, tensor) for the rank's own file."""
    states = [(CPU, torch.get_rng_state())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append((CUDA, torch.cuda.get_rng_state()))
    return states


def restore_random_state(file: Path) -> None:
    """Restore the states of the random generators from this rank's verified safetensors file."""
    with safetensors.safe_open(file, framework="pt", device="cpu") as tensors:
        keys = set(tensors.keys())
        if CPU in keys:
            torch.set_rng_state(tensors.get_tensor(CPU))
        if CUDA in keys and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors.get_tensor(CUDA))


def restore_random_text(state: str) -> None:
    """Restore the random states from a version 1 manifest's text: hex of the CPU state, ":", hex of the GPU state."""
    cpu, _, cuda = state.partition(":")
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(cpu), dtype=torch.uint8))
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(cuda), dtype=torch.uint8))
