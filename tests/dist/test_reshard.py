"""Checkpoints written on some layout, loaded on another: weights and Adam's moments are the same bits.

The pieces are made by hand, cut as a layout would: pipeline stages hold different parameters, tensor parallelism cuts
rows (`q`) or columns (`o`), data parallelism cuts rows inside of that, replicas hold the same block.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.checkpoints import ledger_of

from ingot.errors import CheckpointError, DataError, ResourceError
from ingot.schema.checkpoint import file_of
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.load import load_model, resume
from ingot.trainer.checkpoint.manifest import verify_checkpoint
from ingot.trainer.checkpoint.save import CheckpointFacts, save_checkpoint
from ingot.trainer.checkpoint.state import TrainingState

# Name -> shape, the dim that tensor parallelism cuts, the layer. Rows that no number of ranks divides, and too few.
MODEL = {
    "embed.weight": ((11, 6), 0, 0),
    "blocks.0.q.weight": ((6, 7), 0, 0),
    "blocks.0.o.weight": ((7, 6), 1, 0),
    "blocks.0.norm.weight": ((7,), None, 0),
    "blocks.1.q.weight": ((6, 7), 0, 1),
    "blocks.1.o.weight": ((7, 6), 1, 1),
    "blocks.1.norm.weight": ((1,), None, 1),
}


@dataclass(frozen=True)
class Layout:
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp


@dataclass
class Piece:
    name: str
    shape: tuple
    offsets: tuple
    sizes: tuple
    value: torch.Tensor
    owner: bool


class MappedOptimizer:
    """Keeps its moments out of sight, as on a disk: `moments` gives copies, what counts is what is put back.

    An empty piece has no moments.
    """

    def __init__(self, pieces):
        zeros = {p.name: torch.zeros(p.sizes) for p in pieces if p.value.numel()}
        self.kept = {n: {"exp_avg": z, "exp_avg_sq": z, "step": torch.zeros(1)} for n, z in zeros.items()}

    def moments(self):
        return {name: {kind: t.clone() for kind, t in kinds.items()} for name, kinds in self.kept.items()}

    def put_moments(self, moments):
        self.kept = {name: dict(kinds) for name, kinds in moments.items()}


def part(start: int, size: int, parts: int, index: int) -> tuple[int, int]:
    """torch.chunk's parts: large ones first, the last ones may be empty. (offset, size)."""
    step = -(-size // parts)
    first = min(index * step, size)
    return start + first, min(step, size - first)


def empty_state(rank: int, layout: Layout, model=MODEL) -> TrainingState:
    """Return the part of `model` that `rank` holds, all zero."""
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    pp, replica, shard, tp = (int(i) for i in np.unravel_index(rank, sizes))
    pieces = []
    for name, (shape, cut, layer) in model.items():
        if layer * layout.pp // 2 != pp:
            continue
        block = [(0, size) for size in shape]
        if cut is not None:
            block[cut] = part(*block[cut], layout.tp, tp)
        block[0] = part(*block[0], layout.dp_shard, shard)
        offsets, sizes = tuple(b[0] for b in block), tuple(b[1] for b in block)
        owner = replica == 0 and (cut is not None or tp == 0)
        pieces.append(Piece(name, shape, offsets, sizes, torch.zeros(sizes), owner))
    return TrainingState(pieces, MappedOptimizer(pieces), {"loss_scale": torch.tensor(0.0)})


def whole(name: str, shape) -> np.ndarray:
    """The values that every element of the tensor `name` has, on every layout."""
    return np.random.default_rng(list(name.encode())).standard_normal(shape, np.float32)


def expected(piece, kind: str) -> torch.Tensor:
    """The values of a block of `piece`."""
    where = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
    return torch.from_numpy(whole(f"{kind} {piece.name}", piece.shape)[where].copy())


def fill(state: TrainingState) -> TrainingState:
    for piece in state.pieces:
        piece.value.copy_(expected(piece, "value"))
        for kind in state.optimizer.kept.get(piece.name, ()):
            state.optimizer.kept[piece.name][kind] = torch.tensor([7.0]) if kind == "step" else expected(piece, kind)
    state.extras["loss_scale"].fill_(1024)
    return state


def assert_filled(state: TrainingState) -> int:
    """All bits are those of `fill`. Returns the number of blocks compared."""
    compared = 0
    for piece in state.pieces:
        assert torch.equal(piece.value, expected(piece, "value")), piece.name
        for kind, tensor in state.optimizer.kept.get(piece.name, {}).items():
            assert torch.equal(tensor, torch.tensor([7.0]) if kind == "step" else expected(piece, kind)), piece.name
            compared += 1
    assert state.extras["loss_scale"] == 1024
    return compared


def facts(step: int, layout: Layout) -> CheckpointFacts:
    sizes = {name: getattr(layout, name) for name in layout.__dataclass_fields__}
    return CheckpointFacts(step=step, tokens=0, settings={}, config_sha256="c", data_fingerprint="d", layout=sizes)


def save(root, step, layout, state):
    return save_checkpoint(RunFolder(root), facts(step, layout), state, ledger_of(RunFolder(root), step), keep=9)


def load(root, state, refused=None, settings=None):
    note = refused.append if refused is not None else lambda fact: None
    return resume(
        RunFolder(root),
        state,
        settings=settings or {},
        data_fingerprint="d",
        on_refused=lambda step, path, reason, again: note((step, reason)),
    )


def load_and_save(rank, ranks, root, step, layout):
    """Load what is there, or make it; compare; save it from this layout."""
    state = empty_state(rank, layout)
    manifest = load(root, state)
    if manifest is None:
        fill(state)
    compared = assert_filled(state)
    save(root, step, layout, state)
    return manifest.step if manifest else 0, compared, min(p.value.numel() for p in state.pieces)


LAYOUTS = [
    Layout(dp_shard=4),
    Layout(dp_shard=2),
    Layout(),
    Layout(dp_shard=2, tp=2),
    Layout(tp=4),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(pp=2, tp=2),
    Layout(pp=2, dp_shard=2),
    Layout(dp_shard=3),
    Layout(dp_replicate=3),
    Layout(),
]


def test_any_layout_loads_any_other(fork_ranks, tmp_path):
    """Each saves what it loaded from the one before, so the bits of the first arrive in the last."""
    empty = 0
    for number, layout in enumerate(LAYOUTS):
        results = fork_ranks(load_and_save, layout.world, tmp_path, 10 * (number + 1), layout)
        for step, compared, smallest in results:
            assert step == 10 * number and compared > 0
            empty += smallest == 0
        manifest = verify_checkpoint(RunFolder(tmp_path).checkpoint(10 * (number + 1)))
        assert manifest.layout["tp"] == layout.tp and manifest.world == layout.world
        assert len(manifest.files) == layout.world
        assert len(manifest.tensors) == 4 * len(MODEL) + 1
    assert empty > 0


def test_rows_inside_columns_are_stored_as_they_lie(fork_ranks, tmp_path):
    layout = Layout(dp_shard=2, tp=2)
    fork_ranks(load_and_save, 4, tmp_path, 10, layout)
    manifest = verify_checkpoint(RunFolder(tmp_path).checkpoint(10))
    blocks = [(c.offsets, c.sizes) for c in manifest.chunks("optim.exp_avg.blocks.0.o.weight")]
    assert blocks == [((0, 0), (4, 3)), ((0, 3), (4, 3)), ((4, 0), (3, 3)), ((4, 3), (3, 3))]
    norm = [(c.file, c.sizes) for c in manifest.chunks("model.blocks.0.norm.weight")]
    assert norm == [("rank-00000.safetensors", (4,)), ("rank-00002.safetensors", (3,))]
    assert [c.file for c in manifest.chunks("extra.loss_scale")] == ["rank-00000.safetensors"]


def drawn_after_save_or_load(rank, ranks, root, layout):
    """The numbers that this rank draws after it saved the first checkpoint, or loaded it with another seed."""
    if RunFolder(root).checkpoint(10).exists():
        torch.manual_seed(99)
        load(root, empty_state(rank, layout))
    else:
        torch.manual_seed(rank)
        save(root, 10, layout, fill(empty_state(rank, layout)))
    return torch.rand(2).tolist()


def test_replicas_write_their_random_state_only_and_every_rank_gets_its_own(fork_ranks, tmp_path):
    layout = Layout(dp_replicate=2, dp_shard=2)
    drawn = fork_ranks(drawn_after_save_or_load, 4, tmp_path, layout)
    assert len(set(map(tuple, drawn))) == 4
    assert fork_ranks(drawn_after_save_or_load, 4, tmp_path, layout) == drawn
    manifest = verify_checkpoint(RunFolder(tmp_path).checkpoint(10))
    assert {rank for cut in manifest.cuts for rank in cut.ranks} == {0, 1}
    for rank in (2, 3):
        with safe_open(RunFolder(tmp_path).checkpoint(10) / file_of(rank), framework="np") as file:
            assert list(file.keys()) == ["random.cpu"]


class Whole(torch.nn.Module):
    """Parameters called as in MODEL, in one process."""

    def __init__(self):
        super().__init__()
        self.tensors = {name: torch.zeros(shape) for name, (shape, _, _) in MODEL.items()}

    def state_dict(self):
        return self.tensors


def test_one_process_loads_the_model_of_many(fork_ranks, tmp_path):
    fork_ranks(load_and_save, 4, tmp_path, 10, Layout(dp_shard=2, tp=2))
    model = Whole()
    load_model(RunFolder(tmp_path).checkpoint(10), model)
    for name, tensor in model.tensors.items():
        assert np.array_equal(tensor.numpy(), whole(f"value {name}", tensor.shape))


def try_to_load(rank, ranks, root, layout, model, settings=None):
    """The step that was loaded, what was refused, or the error of this rank: why each checkpoint was refused."""
    refused = []
    try:
        return load(root, empty_state(rank, layout, model), refused, settings).step, refused
    except CheckpointError as error:
        return (error.code, error.facts["causes"]), refused
    except DataError as error:
        return error.code, refused


def of_another_model(root, tensor, **facts):
    """The error when the only checkpoint, of step 10, is of another model."""
    path = str(RunFolder(root).checkpoint(10))
    return "E-CKPT-NONE-USABLE", [{"code": "E-CKPT-OTHER-MODEL", "path": path, "tensor": tensor, **facts}]


def test_parameters_of_a_missing_stage_are_refused_on_all_ranks(fork_ranks, tmp_path):
    """No rank sees it alone: each of them finds all of its own parameters."""
    fork_ranks(load_and_save, 4, tmp_path, 10, Layout(pp=2, tp=2))
    model = {n: v for n, v in MODEL.items() if n != "blocks.1.o.weight"}
    results = fork_ranks(try_to_load, 2, tmp_path, Layout(pp=2), model)
    assert results[0] == results[1]
    assert results[0][0] == of_another_model(tmp_path, "model.blocks.1.o.weight", lacking="model")


def test_parameters_that_one_stage_lacks_are_refused_on_all_ranks(fork_ranks, tmp_path):
    fork_ranks(load_and_save, 2, tmp_path, 10, Layout(pp=2))
    model = MODEL | {"blocks.1.gate.weight": ((4, 4), None, 1)}
    results = fork_ranks(try_to_load, 2, tmp_path, Layout(pp=2), model)
    assert results[0] == results[1]
    assert results[0][0] == of_another_model(tmp_path, "model.blocks.1.gate.weight", lacking="checkpoint")


def test_another_shape_on_one_stage_is_refused_on_all_ranks(fork_ranks, tmp_path):
    fork_ranks(load_and_save, 2, tmp_path, 10, Layout(pp=2))
    model = MODEL | {"blocks.1.q.weight": ((8, 7), 0, 1)}
    results = fork_ranks(try_to_load, 2, tmp_path, Layout(pp=2), model)
    assert results[0] == results[1]
    shapes = {"found": "float32[6, 7]", "wanted": "float32[8, 7]"}
    assert results[0][0] == of_another_model(tmp_path, "model.blocks.1.q.weight", **shapes)


def test_all_ranks_fall_back_to_the_same_checkpoint(fork_ranks, tmp_path):
    """Only the rank that hashes the file sees the damage; all of them hear of it. Two ranks hash the files of four."""
    for step in (10, 20):
        fork_ranks(load_and_save, 4, tmp_path, step, Layout(dp_shard=4))
    layout = Layout(dp_shard=2)
    file = RunFolder(tmp_path).checkpoint(20) / "rank-00003.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    results = fork_ranks(try_to_load, 2, tmp_path, layout, MODEL)
    assert results[0] == results[1]
    step, refused = results[0]
    assert step == 10 and refused[0][0] == 20 and "rank-00003.safetensors" in refused[0][1]


def test_what_only_rank_0_reads_fails_on_all(fork_ranks, tmp_path):
    fork_ranks(load_and_save, 2, tmp_path, 10, Layout(dp_shard=2))
    RunFolder(tmp_path).accepted.write_text("torn")
    results = fork_ranks(try_to_load, 2, tmp_path, Layout(dp_shard=2), MODEL, {"optim.lr": 1.0})
    assert results[0] == results[1] == ("E-RUN-CHANGES-READ", [])


def save_with_trouble(rank, ranks, root, trouble):
    import errno

    import ingot.trainer.checkpoint.files as writer
    from ingot.trainer.checkpoint.verified_file import VerifiedFile

    layout = Layout(dp_shard=2)
    state = fill(empty_state(rank, layout))
    q = next(i for i, piece in enumerate(state.pieces) if piece.name == "blocks.0.q.weight")
    if trouble == "disk fills up on rank 1" and rank == 1:

        def full(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        VerifiedFile._write = full
    if trouble == "no space on rank 0" and rank == 0:

        def no_space(*_):
            raise ResourceError("E-DISK-SPACE", "no space", free_bytes=0)

        writer.require_free = no_space
    if trouble == "NaN on rank 1" and rank == 1:
        state.pieces[q].value[0, 0] = float("nan")
    if trouble == "a bug on rank 1" and rank == 1:
        state.optimizer.kept = None
    if trouble == "no moments on rank 1" and rank == 1:
        del state.optimizer.kept["blocks.0.q.weight"]
    if trouble == "nobody owns a block" and rank == 1:
        state.pieces[q] = replace(state.pieces[q], owner=False)
    if trouble == "nobody owns a parameter":
        state.pieces[q] = replace(state.pieces[q], owner=False)
    if trouble == "a block at a wrong place" and rank == 1:
        state.pieces[q] = replace(state.pieces[q], offsets=(2, 0))
    if trouble == "ranks disagree on a shape" and rank == 1:
        state.pieces[q] = replace(state.pieces[q], shape=(12, 7))
    if trouble == "moments of another shape on rank 1" and rank == 1:
        state.optimizer.kept["blocks.0.q.weight"]["exp_avg"] = torch.zeros(6, 7)
    try:
        save(root, 5, layout, state)
    except (CheckpointError, ResourceError) as error:
        return error.code, error.facts
    except RuntimeError as error:
        return str(error), {}
    return "saved", {}


Q = {"tensor": "model.blocks.0.q.weight"}


@pytest.mark.parametrize(
    ("trouble", "code", "facts"),
    [
        ("disk fills up on rank 1", "E-CKPT-WRITE", {"cause": "No space left on device"}),
        ("no space on rank 0", "E-DISK-SPACE", {"free_bytes": 0}),
        ("NaN on rank 1", "E-STATE-NOT-FINITE", {"tensor": "model.blocks.0.q.weight@3,0"}),
        ("a bug on rank 1", "rank 1: AttributeError", {}),
        ("no moments on rank 1", "E-STATE-MOMENTS", {"tensor": "blocks.0.q.weight"}),
        ("nobody owns a block", "E-STATE-OWNERS", Q | {"shape": [6, 7], "elements": 21}),
        ("nobody owns a parameter", "E-STATE-OWNERS", Q | {"shape": [6, 7], "elements": 0}),
        ("a block at a wrong place", "E-STATE-OWNERS", Q | {"shape": [6, 7], "elements": 42}),  # two overlap
        ("ranks disagree on a shape", "E-STATE-RANKS", Q | {"rank": 1, "shape": [12, 7]}),
        ("moments of another shape on rank 1", "E-STATE-SHAPE", {"shape": [6, 7], "expected": [3, 7]}),
    ],
)
def test_trouble_on_one_rank_is_an_error_on_all(fork_ranks, tmp_path, trouble, code, facts):
    for found, its_facts in fork_ranks(save_with_trouble, 2, tmp_path, trouble):
        assert found.startswith(code)
        assert {name: its_facts.get(name) for name in facts} == facts
    assert not list(RunFolder(tmp_path).checkpoints.glob("step-*"))
