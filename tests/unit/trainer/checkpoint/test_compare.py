"""The comparison of two checkpoints, however each is divided."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tests.expect import refused

from ingot.cli.main import main
from ingot.schema.checkpoint import WEIGHTS
from ingot.trainer.checkpoint import compare
from ingot.trainer.checkpoint.compare import blocks_of, compare_checkpoints
from ingot.trainer.checkpoint.manifest import read_manifest, write_manifest
from ingot.trainer.checkpoint.part import tiling_problem
from ingot.trainer.checkpoint.save import save_checkpoint
from ingot.trainer.checkpoint.state import TrainingState

from .conftest import WholePiece, facts, save, train_one


class Rows(WholePiece):
    """A part of the rows of a parameter."""

    def __init__(self, name, whole, first, last):
        super().__init__(name, whole[first:last])
        self._shape, self._first = tuple(whole.shape), first

    @property
    def shape(self):
        return self._shape

    @property
    def sizes(self):
        return tuple(self.value.shape)

    @property
    def offsets(self):
        return (self._first, *[0] * (self.value.dim() - 1))


@pytest.fixture
def pair(folder, training, monkeypatch):
    """Checkpoints of the steps 2 and 3, and what they hold: parameter -> (value, value)."""
    monkeypatch.setattr(compare, "_BLOCK_ELEMENTS", 4)
    model, optimizer = training
    save(folder, 2, model, optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train_one(model, optimizer)
    with torch.no_grad():
        model[2].weight[1, 2] += 1.0
    save(folder, 3, model, optimizer)
    return {name: (before[name], p.detach().clone()) for name, p in model.named_parameters()}


def test_the_changes_are_those_of_the_tensors(folder, pair):
    found = compare_checkpoints(folder.checkpoint(2), folder.checkpoint(3))
    assert (found.a.step, found.b.step, found.only_a, found.only_b, found.reshaped) == (2, 3, [], [], [])
    assert {one.name for one in found.parameters} == pair.keys()
    for one in found.parameters:
        a, b = (value.double() for value in pair[one.name])
        expected = float((b - a).norm() / a.norm()) if a.any() else None
        assert one.relative == (expected if expected is None else pytest.approx(expected, rel=1e-12)), one.name
        assert one.largest == float((b - a).abs().max())
    ranks = [math.inf if one.relative is None else one.relative for one in found.parameters]
    assert ranks == sorted(ranks, reverse=True)
    assert found.optimizer.keys() == {"exp_avg", "exp_avg_sq"} and all(found.optimizer.values())


def test_how_a_checkpoint_is_divided_makes_no_difference(folder, training, monkeypatch):
    monkeypatch.setattr(compare, "_BLOCK_ELEMENTS", 4)
    model, optimizer = training
    save(folder, 2, model, optimizer)
    whole = {name: p.detach() for name, p in model.named_parameters()}
    pieces = [Rows(name, value, *rows) for name, value in whole.items() for rows in ((0, 2), (2, len(value)))]
    save_checkpoint(folder, replace(facts(2), kind=WEIGHTS), TrainingState(pieces, None), (), keep=3)
    found = compare_checkpoints(folder.checkpoint(2), folder.weights.checkpoint(2))
    assert len(read_manifest(folder.weights.checkpoint(2)).cuts[0].offsets) == 2
    assert {(one.relative, one.largest) for one in found.parameters} == {(0.0, 0.0)} and len(found.parameters) == 5
    assert (found.b.kind, found.optimizer, found.optimizer_only) == ("weights", {}, "a")


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (1, 1, 9), (3, 4, 5)])
def test_blocks_are_small_and_divide_a_tensor(shape):
    blocks = list(blocks_of(shape, 4))
    assert tiling_problem(shape, blocks) == "" and all(math.prod(sizes) <= 4 for _, sizes in blocks)


def test_settings_data_names_and_shapes_that_differ_are_listed(folder, pair):
    path = folder.checkpoint(3)
    manifest = read_manifest(path)
    tensors = dict(manifest.tensors)
    tensors["model.new"] = tensors.pop("model.1.bias")
    first = tensors["model.0.bias"]
    tensors["model.0.bias"] = replace(tensors["model.1.weight"], shape=(5, 1), cut=len(manifest.cuts))
    cut = replace(manifest.cuts[first.cut], offsets=((0, 0),), sizes=((5, 1),))
    write_manifest(
        path,
        replace(
            manifest,
            tensors=tensors,
            cuts=(*manifest.cuts, cut),
            settings={"optim.lr": 0.02},
            data_fingerprint="e" * 64,
        ),
    )
    found = compare_checkpoints(folder.checkpoint(2), path)
    assert (found.only_a, found.only_b) == (["1.bias"], ["new"])
    assert found.reshaped == [("0.bias", (5,), (5, 1))]
    assert found.settings == [("optim.lr", 0.01, 0.02), ("data.tokens", "d" * 64, "e" * 64)]


def test_values_that_are_not_finite_come_first_and_leave_the_figures(folder, pair):
    for step in (2, 3):
        file = folder.checkpoint(step) / "rank-00000.safetensors"
        data = bytearray(file.read_bytes())
        header = int.from_bytes(data[:8], "little")
        at = 8 + header + json.loads(data[8 : 8 + header])["model.1.weight"]["data_offsets"][0]
        data[at : at + 4] = torch.tensor([math.nan]).numpy().tobytes()
        file.write_bytes(data)
    worst = compare_checkpoints(folder.checkpoint(2), folder.checkpoint(3)).parameters[0]
    assert (worst.name, worst.not_finite) == ("1.weight", 1)
    assert 0 < worst.largest < 1 and 0 < worst.relative < 1


def test_the_verb_shows_ten_parameters_or_all(folder, pair, capsys):
    (folder.root / "run.toml").write_text("")
    arguments = ["ckpt", "diff", str(folder.checkpoint(2)), str(folder.root)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["A", "2"], ["B", "3"]]
    assert "weights   5 of 5 parameters differ" in lines and lines[-1].startswith("optimizer exp_avg ")
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"][0].keys() == {"name", "shape", "relative", "largest", "not_finite"}
    same = ["ckpt", "diff", str(folder.checkpoint(2)), str(folder.checkpoint(2))]
    assert main(same) == 0
    assert "parameter " not in (shown := capsys.readouterr().out) and "0 of 5" in shown
    assert main([*same, "--all"]) == 0
    assert "parameter " in capsys.readouterr().out


def test_a_path_that_is_no_checkpoint_and_a_tensor_of_another_shape_are_refused(folder, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "_BLOCK_ELEMENTS", 1000)
    with refused("E-RUN-NOT-FOUND"):
        compare_checkpoints(folder.checkpoint(2), tmp_path)
    file = folder.checkpoint(3) / "rank-00000.safetensors"
    data = file.read_bytes()
    before = b'"model.0.weight":{"dtype":"F32","shape":[5,6]'
    assert data.count(before) == 1
    file.write_bytes(data.replace(before, before.replace(b"[5,6]", b"[6,5]")))
    with refused("E-CKPT-HEADER", tensor="model.0.weight"):
        compare_checkpoints(folder.checkpoint(2), folder.checkpoint(3))
