"""A checkpoint becomes a folder that torch.distributed.checkpoint loads, and that `ingot ckpt import` reads back."""

import gc
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from tests.expect import RecordedMeter, refused, reported
from tests.unit.trainer.convert.test_import import torchtitan

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ingot.cli.main import main  # noqa: E402
from ingot.schema.guard_record import LOWER, Measure  # noqa: E402
from ingot.schema.run_folder import RunFolder  # noqa: E402
from ingot.theory.rules import load_run  # noqa: E402
from ingot.trainer.checkpoint.folders import find_weights  # noqa: E402
from ingot.trainer.checkpoint.manifest import read_manifest  # noqa: E402
from ingot.trainer.checkpoint.reader import read_blocks  # noqa: E402
from ingot.trainer.checkpoint.state import StateBlock  # noqa: E402
from ingot.trainer.convert import dcp_out  # noqa: E402
from ingot.trainer.convert.dcp_out import export_dcp  # noqa: E402
from ingot.trainer.convert.names import naming_of  # noqa: E402
from ingot.trainer.export.model_folder import (  # noqa: E402
    TRAINING_ONLY,
    import_huggingface,
    to_huggingface,
)
from ingot.trainer.optim.schedule import learning_rate  # noqa: E402

GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.fixture
def run(tmp_path) -> Path:
    return golden(tmp_path, "dense-2-ranks")


def golden(tmp_path: Path, name: str) -> Path:
    shutil.copytree(GOLDEN / "data", tmp_path / "data")
    shutil.copytree(GOLDEN / name, tmp_path / name)
    return tmp_path / name


def stored(run: Path, kind: str = "model.") -> dict:
    """The tensors of the run's newest save whose names begin with `kind`, without it."""
    _, checkpoint = find_weights(run)
    manifest = read_manifest(checkpoint)
    blocks = [
        StateBlock(name, entry.shape, (0,) * len(entry.shape), torch.empty(entry.shape))
        for name, entry in manifest.tensors.items()
        if name.startswith(kind) and not name.endswith(TRAINING_ONLY)
    ]
    read_blocks(checkpoint, manifest, blocks)
    return {block.name.removeprefix(kind): block.tensor for block in blocks}


def loaded(folder: Path) -> dict:
    """All tensors of a folder, read by torch itself."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in metadata.items() if hasattr(m, "size")}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def theirs(arch, state: dict) -> dict:
    """The state under Hugging Face's names, as the module's own state_dict has it: a tied head is there, too."""
    found = to_huggingface(arch, state)
    return found | ({"lm_head.weight": found["model.embed_tokens.weight"]} if arch.tied_embeddings else {})


def imported(tmp_path: Path, folder: Path) -> dict:
    """Return the weights that the command which the export proposes makes of a folder."""
    assert main(["ckpt", "import", str(folder), str(tmp_path / "back"), "--model", str(folder), "--quiet"]) == 0
    return import_huggingface(tmp_path / "back")[1]


@pytest.mark.parametrize("name", ["dense-2-ranks", "experts-2-ranks"])
def test_torch_and_import_read_the_bits_of_the_checkpoint(tmp_path, name):
    run, meter = golden(tmp_path, name), RecordedMeter()
    found = export_dcp(run, tmp_path / "out", meter=meter)
    meter.require_whole("verifying", "writing", "comparing")
    arch = load_run(RunFolder(run).config).model
    assert (found.step, found.system, found.optimizer) == (4, "Hugging Face", False)
    same(loaded(tmp_path / "out"), theirs(arch, stored(run)))
    same(imported(tmp_path, tmp_path / "out"), stored(run))


def test_latent_attention_with_biases(tmp_path):
    from tests.unit.trainer.export.test_huggingface import DEEPSEEK, make_run

    run = make_run(tmp_path / "project", DEEPSEEK)
    export_dcp(run, tmp_path / "out", dtype="bfloat16")
    rounded = {n: t if n.endswith("router.bias") else t.bfloat16() for n, t in stored(run).items()}
    same(loaded(tmp_path / "out"), theirs(DEEPSEEK, rounded))
    back = imported(tmp_path, tmp_path / "out")
    same({n: back[n].to(t.dtype) for n, t in rounded.items()}, rounded)


def test_torchtitans_names(run, tmp_path):
    found = export_dcp(run, tmp_path / "out", names="torchtitan")
    arch = load_run(RunFolder(run).config).model
    expected = torchtitan(arch, stored(run))
    del expected["freqs_cis"]
    if arch.tied_embeddings:
        expected["output.weight"] = expected["tok_embeddings.weight"]
    assert found.system == "torchtitan"
    same(loaded(tmp_path / "out"), expected)
    same(imported(tmp_path, tmp_path / "out"), stored(run))


def module_of(state: dict) -> torch.nn.Module:
    """A module that has parameters of these names and shapes."""
    root = torch.nn.Module()
    for name, tensor in state.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        place.register_parameter(last, torch.nn.Parameter(torch.zeros_like(tensor)))
    return root


def test_the_optimizer_of_torch_takes_the_state(run, tmp_path):
    """torchtitan and scripts load a flat state of AdamW under "optimizer", with the settings of the checkpoint."""
    config, file = load_run(RunFolder(run).config), RunFolder(run).config
    later = "lr = 0.001\nbeta1 = 0.5\neps = 0.5\nweight_decay = 0.25"
    file.write_text(file.read_text().replace("lr = 0.005", later).replace("\nsteps = 6", "\nsteps = 60"))
    assert (load_run(file).optim.lr, load_run(file).train.steps) == (0.001, 60)
    export_dcp(run, tmp_path / "out", names="torchtitan", optimizer=True)
    state = torchtitan(config.model, stored(run))
    del state["freqs_cis"]
    model = module_of(state)
    adamw, options = torch.optim.AdamW(model.parameters()), StateDictOptions(flatten_optimizer_state_dict=True)
    flat = {"optimizer": get_optimizer_state_dict(model, adamw, options=options)}
    dcp.load(flat, checkpoint_id=tmp_path / "out", no_dist=True)
    set_optimizer_state_dict(model, adamw, flat["optimizer"], options=options)
    parameters = dict(model.named_parameters())
    for kind in ("exp_avg", "exp_avg_sq"):
        expected = torchtitan(config.model, stored(run, f"optim.{kind}."))
        same({n: adamw.state[p][kind] for n, p in parameters.items()}, {n: expected[n] for n in parameters})
    assert {float(adamw.state[p]["step"]) for p in parameters.values()} == {4.0}
    groups = [group for group in adamw.param_groups if group["params"]]
    assert {group["betas"] for group in groups} == {(config.optim.beta1, config.optim.beta2)}
    rate = learning_rate(config.train.steps, config.optim.lr, config.schedule)(4)
    assert {group["lr"] for group in groups} == {rate} and 0 < rate < config.optim.lr  # after the warm-up
    assert {group["weight_decay"] for group in groups} <= {0.0, config.optim.weight_decay}
    assert {group["eps"] for group in groups} == {config.optim.eps}


def test_the_rate_of_the_last_step_has_the_factor_of_the_guard(run):
    config, (_, checkpoint) = load_run(RunFolder(run).config), find_weights(run)
    manifest = read_manifest(checkpoint)
    lowered = Measure(action=LOWER, first=3, last=3, found=("loss spike",), lr_factor=0.25, lr_last=4)
    naming = naming_of(config.model, "torchtitan")
    weights = dcp_out._weights(checkpoint, manifest, config.model, naming, torch.float32)
    rates = []
    for measures in ((), (lowered,)):
        now = replace(manifest, guard=replace(manifest.guard, measures=measures))
        settings = dcp_out._settings(now, config, weights, naming)
        rates.append({value for name, value in settings.items() if name.endswith(".lr")})
    assert rates[1] == {0.25 * rate for rate in rates[0]} and len(rates[0]) == 1


def test_weights_with_the_optimizer_are_imported_without_it(run, tmp_path):
    found = export_dcp(run, tmp_path / "out", optimizer=True)
    assert found.optimizer and found.tensors > 3 * len(stored(run))
    same(imported(tmp_path, tmp_path / "out"), stored(run))


def test_one_tensor_is_in_memory_at_a_time(run, tmp_path, monkeypatch):
    alive, most = weakref.WeakSet(), []

    class Counted(dcp_out._Values):
        def read(self, name):
            value = super().read(name).clone()
            gc.collect(0)
            alive.add(value)
            most.append(len(alive))
            return value

    monkeypatch.setattr(dcp_out, "_Values", Counted)
    export_dcp(run, tmp_path / "out", optimizer=True)
    assert len(most) > 50 and max(most) <= 3


# -- refused --


def test_what_is_written_otherwise_is_found(run, tmp_path, monkeypatch):
    lookup = dcp_out._Planner.lookup_object

    def careless(self, index):
        value = lookup(self, index)
        return value + 1e-6 if index.fqn == "model.norm.weight" else value

    monkeypatch.setattr(dcp_out._Planner, "lookup_object", careless)
    with refused("E-CKPT-READ-BACK", tensor="model.norm.weight"):
        export_dcp(run, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_a_damaged_checkpoint_is_refused(run, tmp_path):
    file = RunFolder(run).checkpoint(4) / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    with refused("E-CKPT-HASH"):
        export_dcp(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_file_of_another_model_is_refused(run, tmp_path):
    config = RunFolder(run).config
    config.write_text(config.read_text().replace("num_layers = 2", "num_layers = 1"))
    with refused("E-CKPT-OTHER-MODEL"):
        export_dcp(run, tmp_path / "out")


def test_names_and_optimizers_that_the_other_side_lacks(tmp_path, capsys):
    run = golden(tmp_path, "experts-2-ranks")
    command = ["ckpt", "export", str(run), str(tmp_path / "out"), "--json"]
    assert main([*command, "--names", "torchtitan"]) == 2
    reported(capsys.readouterr().out, "E-DCP-NAMES", names="torchtitan")
    assert main([*command, "--optimizer"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["optimizer"] and found["step"] == 4
    assert main(command) == 2
    reported(capsys.readouterr().out, "E-CONVERT-FOLDER", path=str(tmp_path / "out"))


@pytest.mark.parametrize(("kind", "left_out"), [("lamb", ""), ("lion", ".exp_avg_sq."), ("adamw", ".exp_avg_sq.")])
def test_the_state_of_another_optimizer_is_refused(run, kind, left_out):
    """Also one that keeps tensors of the same names, or fewer."""
    config, (_, checkpoint) = load_run(RunFolder(run).config), find_weights(run)
    manifest = read_manifest(checkpoint)
    tensors = {name: entry for name, entry in manifest.tensors.items() if not left_out or left_out not in name}
    other = replace(manifest, tensors=tensors, settings=manifest.settings | {"optim.kind": kind})
    kinds = ["exp_avg", "step"] if left_out else ["exp_avg", "exp_avg_sq", "step"]
    with refused("E-DCP-OPTIMIZER", optimizer=kind, kinds=kinds):
        dcp_out._moments(checkpoint, other, config, naming_of(config.model, "huggingface"))
