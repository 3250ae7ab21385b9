"""The memory of an update of whole matrices, counted by the planner, against the real update and the traced program."""

import json
import runpy
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from ingot.cli.main import main  # noqa: E402
from ingot.plugins.piece import ParameterShard, PlacedBlock, PlacedParameter  # noqa: E402
from ingot.schema.arch import Arch  # noqa: E402
from ingot.schema.parallel import Parallel  # noqa: E402
from ingot.schema.run import Data, Optim, RunConfig, Train  # noqa: E402
from ingot.theory import update  # noqa: E402
from ingot.theory.layout import positions  # noqa: E402
from ingot.theory.memory import gradients_at_update  # noqa: E402
from ingot.theory.params import count_parameters, parameters_by_part  # noqa: E402
from ingot.trainer.model.transformer import Transformer  # noqa: E402
from ingot.trainer.optim import matrices  # noqa: E402
from ingot.trainer.optim.build import optimizer_rules  # noqa: E402
from ingot.trainer.optim.optimizer import zero_state  # noqa: E402

EXAMPLES = Path(__file__).parents[3] / "examples" / "extend"
ARCH = Arch(
    vocab_size=64, d_model=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=176, max_seq_len=64
)
MUON = Optim(kind="muon")
LARGEST, MATRICES = 176 * 64, 4 * (2 * 64 + 2 * 32 + 3 * 176) * 64


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside this mode have at a time."""

    live, most = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in before:
                storage = tensor.untyped_storage()
                self.live += storage.nbytes()
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return out

    def _freed(self, size: int) -> None:
        self.live -= size


def most_bytes_of_an_update() -> int:
    """The most bytes that the real update of all matrices of the model takes beside values, gradients and state."""
    rules = optimizer_rules(MUON)
    shards = [
        ParameterShard(name, tuple(p.shape), (0, 0), tuple(p.shape), p.detach(), True, torch.randn_like(p))
        for name, p in Transformer(ARCH).named_parameters()
        if name.startswith("blocks.") and p.ndim == 2
    ]
    placed = {p.name: PlacedParameter(p.shape, 1, (PlacedBlock(0, p.offsets, p.sizes),)) for p in shards}
    states = {p.name: zero_state(p, {"momentum": torch.zeros_like(p.value)}) for p in shards}
    whole = matrices.Matrices(placed, rules, [0], None, shards[0].value)
    with LiveBytes() as seen:
        whole.update(shards, states, 0.1, scale=torch.ones(()), found_inf=torch.zeros(()))
    return seen.most


def position(**settings):
    train = Train(steps=1, seq_len=16, global_batch=28, micro_batch=1)
    run = RunConfig(
        name="x", model=ARCH, data=Data(tokens=""), train=train, optim=MUON, parallel=Parallel(zero=1, **settings)
    )
    return positions(run)[0]


@pytest.mark.parametrize("in_a_round", [LARGEST, 2 * LARGEST, 5 * LARGEST, 1 << 26])
def test_a_round_is_billed_with_at_least_what_it_takes(process, monkeypatch, in_a_round):
    runpy.run_path(str(EXAMPLES / "muon.py"))
    for module in (update, matrices):
        monkeypatch.setattr(module, "ROUND_ELEMENTS", in_a_round)
    bill = update.matrix_update(position())
    assert bill is not None
    taken = most_bytes_of_an_update()
    assert taken <= 4 * bill.round_elements <= 1.2 * taken


def test_the_update_of_a_run_contains_a_round(process):
    """Beside the gradients: those of the matrices, or all if their buffers stay; a share of ZeRO-1 is freed."""
    runpy.run_path(str(EXAMPLES / "muon.py"))
    elements = parameters_by_part(ARCH)["attention"] + parameters_by_part(ARCH)["mlp"]
    for settings, gradients in (({}, count_parameters(ARCH)), ({"dp_shard": 4}, elements / 4)):
        of_run = position(**settings)
        bill = update.matrix_update(of_run)
        assert bill is not None and bill.elements == elements / of_run.parallel.shard_ranks
        assert gradients_at_update(of_run).value == 4 * (gradients + bill.round_elements)


@pytest.mark.parametrize(
    ("ranks", "elements"),
    [
        (1, 2 * MATRICES + 4 * 32 * 64),  # all matrices, all updates, and what the smallest one needs more
        (4, 3 * (MATRICES / 4 + LARGEST)),  # three copies of a round of the worker that has one matrix more
        (28, 6 * LARGEST),  # one matrix, and the five tensors of its update
    ],
)
def test_workers_share_28_matrices(process, ranks, elements):
    runpy.run_path(str(EXAMPLES / "muon.py"))
    bill = update.matrix_update(position(dp_shard=ranks))
    assert bill is not None and bill.round_elements == elements


RUN = f"""name = "x"
[model]
vocab_size = 64
d_model = 64
num_layers = 4
num_heads = 4
num_kv_heads = 2
head_dim = 16
d_ffn = 176
[data]
tokens = "tokens"
[train]
steps = 10
seq_len = 16
global_batch = 4
micro_batch = 1
[optim]
kind = "muon"
[parallel]
tp = 2
[plugins]
modules = ["muon"]
folder = "{EXAMPLES}"
"""


@pytest.mark.slow
def test_a_dry_run_agrees_with_the_memory_of_an_update_that_ranks_share(process, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run.toml").write_text(RUN)
    main(["check", str(tmp_path / "run.toml"), "--simulate", "--json"])
    found = json.loads(capsys.readouterr().out)["simulated"]
    step = found["ranks"][0]["moments"]["steady step"]
    assert step["place"] == "update"
    assert step["bytes"] <= found["planner_bytes"][0] <= 1.08 * step["bytes"]
