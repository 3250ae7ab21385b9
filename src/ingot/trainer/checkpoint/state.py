"""Everything a rank holds of a run's state, as named blocks of whole tensors. The names are those on the disk.

    model.<parameter>              master weights, and what a model learns without an optimizer (biases of routers)
    optim.exp_avg.<parameter>      AdamW's moments, cut like the parameter
    optim.exp_avg_sq.<parameter>
    optim.step.<parameter>         a scalar, the same for every block
    extra.<name>                   small tensors that are the same on every rank, such as a loss scale

Nothing else of a layout is known here: loading on another one means asking for other blocks. Learning rates are not
state: they are a function of the step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import safetensors
import torch
from torch import Tensor

from ingot.errors import CheckpointError

MODEL, OPTIM, EXTRA = "model.", "optim.", "extra."
CPU, CUDA = "random.cpu", "random.cuda"
# The end of the names of experts' loads in the step before. Only a balance loss reads them, and a run may start or stop
# to have one; the model computes the same without them.
LOAD = ".router.load"
# The end of the names of the biases of routers; a model that never had any computes as one with zeros.
BIAS = ".router.bias"
Moments = Mapping[str, Mapping[str, Tensor]]  # parameter -> "exp_avg", "exp_avg_sq", "step" -> tensor


class SavedShard(Protocol):
    """A block of the parameter `name`: `value`, of shape `sizes`, at `offsets` in the whole of shape `shape`.

    owner: True on exactly one of the ranks that hold this block: it writes the block, all of them read it.
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

        Saving reads the tensors, loading writes into them. All are held at once meanwhile, so moments on a disk are
        best memory-mapped.
        """
        ...

    def put_moments(self, moments: Moments) -> None:
        """Take back the tensors that `moments` returned, after loading has filled them."""
        ...


@dataclass(frozen=True)
class StateBlock:
    """The block `tensor` of the stored tensor `name`, which has the shape `shape`; the block begins at `offsets`.

    written: True on the one rank that saves the block. optional: the block keeps its value where a checkpoint lacks it.
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
    """The tensors of this rank that a checkpoint holds: references, so loading fills them in place.

    pieces: the parameter shards of this rank; a pipeline stage has only its own parameters.
    extras: small tensors with the same names and values on every rank. optional_extras: the names of extras that a
    checkpoint may lack (they keep their value) or hold in addition (they are ignored).
    buffers: shards of the model that no optimizer updates. A checkpoint may lack them, for example if its run did not
    balance experts; then they begin as in a new run. Additional loads in a checkpoint are ignored. Additional biases
    make it a checkpoint of another model: without them a router chooses other experts.
    """

    pieces: Sequence[SavedShard]
    optimizer: MomentStore
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    optional_extras: frozenset[str] = frozenset()
    buffers: Sequence[SavedShard] = ()

    def blocks(self, moments: Moments, *, first_rank: bool) -> list[StateBlock]:
        """Return this rank's blocks. moments: of the optimizer. Raises CheckpointError if a tensor does not fit."""
        blocks = [block for piece in self.pieces for block in _blocks_of(piece, moments)]
        blocks += [_block(MODEL + piece.name, piece.value, piece, optional=True) for piece in self.buffers]
        for name, tensor in self.extras.items():
            optional = name in self.optional_extras
            place = tuple(tensor.shape), (0,) * tensor.dim()
            blocks.append(StateBlock(EXTRA + name, *place, tensor, written=first_rank, optional=optional))
        return blocks

    def is_skipped(self, name: str) -> bool:
        """Return whether loading ignores the stored tensor `name`. The answer is the same on every rank."""
        if name.startswith(MODEL):
            return name.endswith(LOAD)
        return name.startswith(EXTRA) and name.removeprefix(EXTRA) in self.optional_extras


def _block(name: str, tensor: Tensor, piece: SavedShard, *, optional: bool = False) -> StateBlock:
    if tuple(tensor.shape) != tuple(piece.sizes):
        raise CheckpointError(
            "E-STATE-SHAPE",
            f"{name} has the shape {list(tensor.shape)}, its parameter shard {list(piece.sizes)}",
            rule="the value and the moments of a parameter shard have one shape",
            fix="let `moments` of the optimizer return tensors of the shard's shape",
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
            fix="let `moments` of the optimizer return every parameter",
            tensor=piece.name,
        )
    # The scalar is on every rank that has a block; the owner of the block at the origin is one rank.
    first = piece.owner and not any(piece.offsets)
    for kind, tensor in moments[piece.name].items():
        name = f"{OPTIM}{kind}.{piece.name}"
        yield (
            StateBlock(name, (), (), tensor.reshape(()), written=first)
            if kind == "step"
            else _block(name, tensor, piece)
        )


def random_state() -> list[tuple[str, Tensor]]:
    """Return the state of this rank's random generators, as tensors of its own file."""
    states = [(CPU, torch.get_rng_state())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append((CUDA, torch.cuda.get_rng_state()))
    return states


def restore_random_state(file: Path) -> None:
    """Restore the random state from the verified safetensors file of this rank."""
    with safetensors.safe_open(file, framework="pt", device="cpu") as tensors:
        keys = set(tensors.keys())
        if CPU in keys:
            torch.set_rng_state(tensors.get_tensor(CPU))
        if CUDA in keys and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors.get_tensor(CUDA))


def restore_random_text(state: str) -> None:
    """Restore the random state from a version 1 manifest: hex of the CPU state, then a colon and the GPU state."""
    cpu, _, cuda = state.partition(":")
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(cpu), dtype=torch.uint8))
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(cuda), dtype=torch.uint8))
