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
from typing import Protocol

from torch import Tensor

from ingot.errors import CheckpointError

MODEL, OPTIM, EXTRA = "model.", "optim.", "extra."
# The end of the names of experts' loads in the step before. Only a balance loss looks at them, which a run may begin or
# cease to have; what the model computes is the same without them.
LOAD = ".router.load"
# The end of the names of the biases of routers; a model that never had any computes as one with zeros.
BIAS = ".router.bias"
Moments = Mapping[str, Mapping[str, Tensor]]  # parameter -> "exp_avg", "exp_avg_sq", "step" -> tensor


class Piece(Protocol):
    """A block of the parameter `name`: `value`, of shape `sizes`, at `offsets` in the whole of shape `shape`.

    owner: True on exactly one of the ranks that hold this block; it writes the block, all of them read it.
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


class Optimizer(Protocol):
    def moments(self) -> Moments:
        """Of every piece that is not empty; zeros if it never stepped. Saving reads them, loading writes into them.

        All of them are held at once while a checkpoint is saved or loaded: moments on a disk are best mapped.
        """
        ...

    def put_moments(self, moments: Moments) -> None:
        """Called after loading with what `moments` gave, filled."""
        ...


@dataclass(frozen=True)
class Block:
    """`tensor` is the part that starts at `offsets` of the tensor `name`, whose whole shape is `shape`.

    written: this rank is the one that saves it. optional: it keeps its value where a checkpoint lacks it.
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
    """References, not copies: loading fills these tensors in place.

    pieces: of this rank; a pipeline stage has only its own parameters.
    extras: the same names and values on every rank. optional_extras: those that a checkpoint may lack (they keep their
    value) or hold in vain (they are not read), because the run may have been without them.
    buffers: more of the model, which no optimizer updates. A checkpoint may lack them, as that of a run whose experts
    were not balanced then: they begin as in a new run. It may hold loads in vain; one that holds biases in vain is of
    another model: without them a router chooses other experts.
    """

    pieces: Sequence[Piece]
    optimizer: Optimizer
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    optional_extras: frozenset[str] = frozenset()
    buffers: Sequence[Piece] = ()

    def blocks(self, moments: Moments, *, first_rank: bool) -> list[Block]:
        """This rank's blocks, `moments` being the optimizer's. Raises CheckpointError where a tensor does not fit."""
        blocks = [block for piece in self.pieces for block in _blocks_of(piece, moments)]
        blocks += [_block(MODEL + piece.name, piece.value, piece, optional=True) for piece in self.buffers]
        for name, tensor in self.extras.items():
            optional = name in self.optional_extras
            place = tuple(tensor.shape), (0,) * tensor.dim()
            blocks.append(Block(EXTRA + name, *place, tensor, written=first_rank, optional=optional))
        return blocks

    def is_skipped(self, name: str) -> bool:
        """Whether a checkpoint may hold it in vain. The same answer on every rank, whatever it has of the model."""
        if name.startswith(MODEL):
            return name.endswith(LOAD)
        return name.startswith(EXTRA) and name.removeprefix(EXTRA) in self.optional_extras


def _block(name: str, tensor: Tensor, piece: Piece, *, optional: bool = False) -> Block:
    if tuple(tensor.shape) != tuple(piece.sizes):
        raise CheckpointError(
            f"{name} has the shape {list(tensor.shape)}, its piece is {list(piece.sizes)}",
            rule="a piece's value and its moments are one block",
        )
    return Block(name, tuple(piece.shape), tuple(piece.offsets), tensor, written=piece.owner, optional=optional)


def _blocks_of(piece: Piece, moments: Moments) -> Iterator[Block]:
    yield _block(MODEL + piece.name, piece.value, piece)
    if piece.value.numel() == 0:
        return
    if piece.name not in moments:
        raise CheckpointError(
            f"the optimizer has no state of {piece.name}", rule="what was trained is saved with its moments"
        )
    # The scalar is on every rank that has a block; the owner of the block at the origin is one rank.
    first = piece.owner and not any(piece.offsets)
    for kind, tensor in moments[piece.name].items():
        name = f"{OPTIM}{kind}.{piece.name}"
        yield Block(name, (), (), tensor.reshape(()), written=first) if kind == "step" else _block(name, tensor, piece)
