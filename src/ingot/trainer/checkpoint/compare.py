"""Two checkpoints compared: settings, layout, and how much each parameter changed. `ingot ckpt diff`.

The weights are read block by block, each a few MiB, so the memory does not grow with the model. The two checkpoints may
be divided among ranks in different ways.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ingot.errors import EXIT_OK
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.run import setting_changes
from ingot.trainer.checkpoint.accepted import DATA
from ingot.trainer.checkpoint.folders import find_weights
from ingot.trainer.checkpoint.manifest import MANIFEST, read_manifest
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.checkpoint.reader import read_blocks
from ingot.trainer.checkpoint.rules import DTYPES, damaged, tensor_bytes
from ingot.trainer.checkpoint.state import MODEL, OPTIM, StateBlock

_BLOCK_ELEMENTS = 1 << 20  # 8 MiB in float64, for each of both
STEP = f"{OPTIM}step."


@dataclass(frozen=True, kw_only=True)
class ComparedCheckpoint:
    """One of the two checkpoints. layout: the degrees of its mesh, by axis."""

    path: str
    step: int
    kind: str
    tokens: int
    layout: dict[str, int]
    world: int
    epoch: int
    health: str


@dataclass(frozen=True, kw_only=True)
class TensorChange:
    """The change of a parameter from A to B.

    relative: the L2 norm of the difference, divided by that of A; None if A is all zeros and B is not. largest: the
    largest absolute difference of an element. not_finite: the number of elements that are NaN or infinite in A or B;
    the other figures leave them out.
    """

    name: str
    shape: tuple[int, ...]
    relative: float | None
    largest: float
    not_finite: int = 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference between two checkpoints. settings: (dotted name, value in A, value in B). parameters: all of both,
    the largest relative change first. only_a, only_b: parameters that one of them has. reshaped: (name, shape in A,
    shape in B). optimizer: kind of state, like "exp_avg" -> relative change of all parameters together; optimizer_only:
    "a" or "b" if only that one has any."""

    a: ComparedCheckpoint
    b: ComparedCheckpoint
    settings: list[tuple[str, Any, Any]] = field(default_factory=list)
    parameters: list[TensorChange] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    reshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    optimizer: dict[str, float | None] = field(default_factory=dict)
    optimizer_only: str = ""

    def as_dict(self) -> dict:
        return asdict(self) | {"exit_code": EXIT_OK}


def compare_checkpoints(a: Path, b: Path, meter: Meter = SILENT) -> Comparison:
    """Compare the saves at `a` and `b`: checkpoints, saves of the weights alone, or run folders (their newest save).

    The bytes are not compared with their hashes, which `ingot ckpt verify` does. meter: counts the bytes. Raises
    UsageError for another path, CheckpointError for a save that cannot be read.
    """
    pair = _Save(_find(a)), _Save(_find(b))
    first, second = (save.manifest for save in pair)
    settings = [(c.key, c.before, c.after) for c in setting_changes(first.settings, second.settings)]
    if first.data_fingerprint != second.data_fingerprint:
        settings = [one for one in settings if one[0] != DATA]
        settings.append((DATA, first.data_fingerprint, second.data_fingerprint))
    both, only_a, only_b, reshaped = _sorted_names(first, second)
    weights = [name for name in both if name.startswith(MODEL)]
    state = [name for name in both if name.startswith(OPTIM) and not name.startswith(STEP)]
    meter.begin("comparing", sum(tensor_bytes(m.tensors[name]) for m in (first, second) for name in weights + state))
    changes = {name: _change(name, pair, meter) for name in weights + state}
    parameters = [
        TensorChange(
            name=name.removeprefix(MODEL),
            shape=first.tensors[name].shape,
            relative=changes[name].relative,
            largest=changes[name].largest,
            not_finite=changes[name].not_finite,
        )
        for name in weights
    ]
    kinds: dict[str, _Sums] = {}
    for name in state:
        kinds.setdefault(name.split(".")[1], _Sums()).include(changes[name])
    has = [any(name.startswith(OPTIM) for name in manifest.tensors) for manifest in (first, second)]
    return Comparison(
        a=pair[0].facts(),
        b=pair[1].facts(),
        settings=settings,
        parameters=sorted(parameters, key=_rank, reverse=True),
        only_a=only_a,
        only_b=only_b,
        reshaped=reshaped,
        optimizer={kind: sums.relative for kind, sums in sorted(kinds.items())},
        optimizer_only="" if has[0] == has[1] else "a" if has[0] else "b",
    )


class _Save:
    """A save and its manifest."""

    def __init__(self, path: Path):
        self.path, self.manifest = path, read_manifest(path)

    def facts(self) -> ComparedCheckpoint:
        found = self.manifest
        return ComparedCheckpoint(
            path=str(self.path),
            step=found.step,
            kind=found.kind,
            tokens=found.tokens,
            layout=dict(found.layout),
            world=found.world,
            epoch=found.epoch,
            health=found.health.state,
        )

    def read(self, blocks: list[StateBlock]) -> None:
        """Fill the blocks. Raises CheckpointError if the files are not as the manifest says."""
        try:
            read_blocks(self.path, self.manifest, blocks)
        except RuntimeError as error:  # a tensor of another shape in the file
            problem = f"{blocks[0].name} cannot be read ({error})"
            raise damaged(self.path, problem, "E-CKPT-HEADER", tensor=blocks[0].name) from None


def _find(path: Path) -> Path:
    """Return the save that `path` names. A copy outside of a run is one, too."""
    return path if (path / MANIFEST).is_file() else find_weights(path)[1]


def _sorted_names(
    first: CheckpointManifest, second: CheckpointManifest
) -> tuple[list[str], list[str], list[str], list[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """Return the tensors that both have in the same shape, and of weights alone: those only in the first, only in the
    second, and in another shape."""
    both, reshaped = [], []
    for name in sorted(first.tensors.keys() & second.tensors.keys()):
        shapes = first.tensors[name].shape, second.tensors[name].shape
        if shapes[0] == shapes[1]:
            both.append(name)
        elif name.startswith(MODEL):
            reshaped.append((name.removeprefix(MODEL), *shapes))
    only_a, only_b = (
        [name.removeprefix(MODEL) for name in sorted(one.tensors.keys() - other.tensors.keys()) if _is_weight(name)]
        for one, other in ((first, second), (second, first))
    )
    return both, only_a, only_b, reshaped


def _is_weight(name: str) -> bool:
    return name.startswith(MODEL)


@dataclass
class _Sums:
    """The sums of squares of a difference, of A and of B, over the finite elements; the largest absolute difference."""

    difference: float = 0.0
    a: float = 0.0
    b: float = 0.0
    largest: float = 0.0
    not_finite: int = 0

    def include(self, other: "_Sums") -> None:
        self.difference += other.difference
        self.a += other.a
        self.b += other.b
        self.largest = max(self.largest, other.largest)
        self.not_finite += other.not_finite

    @property
    def relative(self) -> float | None:
        if self.difference == 0.0:
            return 0.0
        return math.sqrt(self.difference / self.a) if self.a else None


def _change(name: str, pair: tuple[_Save, _Save], meter: Meter) -> _Sums:
    """Compare the tensor `name` of both saves, one block after the other."""
    sums, shape = _Sums(), pair[0].manifest.tensors[name].shape
    for offsets, sizes in blocks_of(shape, _BLOCK_ELEMENTS):
        values = []
        for save in pair:
            block = torch.zeros(sizes, dtype=torch.float64)
            save.read([StateBlock(name, shape, offsets, block)])
            values.append(block)
            meter.add(math.prod(sizes) * DTYPES[save.manifest.tensors[name].dtype][0])
        sums.include(_sums(*values))
    return sums


def _sums(a: torch.Tensor, b: torch.Tensor) -> _Sums:
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not bool(finite.all()):
        a, b = a[finite], b[finite]
    difference = a - b
    return _Sums(
        difference=float(difference.square().sum()),
        a=float(a.square().sum()),
        b=float(b.square().sum()),
        largest=float(difference.abs().max()) if difference.numel() else 0.0,
        not_finite=int((~finite).sum()),
    )


def blocks_of(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of blocks of at most `most` elements that divide a tensor: halves of halves, along the
    first dimension that is longer than 1."""
    waiting = [((0,) * len(shape), shape)]
    while waiting:
        offsets, sizes = waiting.pop()
        if math.prod(sizes) <= most:
            yield offsets, sizes
            continue
        dim = next(i for i, size in enumerate(sizes) if size > 1)
        half = sizes[dim] // 2
        rest = (*offsets[:dim], offsets[dim] + half, *offsets[dim + 1 :])
        waiting.append((rest, (*sizes[:dim], sizes[dim] - half, *sizes[dim + 1 :])))
        waiting.append((offsets, (*sizes[:dim], half, *sizes[dim + 1 :])))


def _rank(change: TensorChange) -> tuple[bool, float, float]:
    """Order changes: values that are not finite, then what was zero, then by the relative change."""
    return change.not_finite > 0, math.inf if change.relative is None else change.relative, change.largest
