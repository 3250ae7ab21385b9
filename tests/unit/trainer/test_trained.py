"""`ingot eval` and `ingot sample` on a run that was just trained."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from tests.expect import reported

from ingot.cli.main import main
from ingot.config import to_toml
from ingot.events import read_events
from ingot.schema.arch import Moe
from ingot.theory.rules import load_run
from ingot.trainer.loop import train
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.run import build_trainer
from ingot.trainer.trained import load_trained


def run_rank(rank, ranks, folder):
    place = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, attempt=0, device=torch.device("cpu"))
    run = build_trainer(load_run(folder.config), folder, place, say=lambda text: None)
    train(run)
    run.loader.close()


@pytest.fixture
def trained(fork_ranks, make_run):
    folder = make_run(steps=6)
    fork_ranks(run_rank, 1, folder)
    return folder


def call(capsys, *words):
    code = main([*map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_eval_gives_what_training_logged(trained, capsys):
    logged = next(read_events(trained.events, "evaluation"))
    code, out, _ = call(capsys, "eval", trained.root, "--json")
    found = json.loads(out)
    assert code == 0 and found["step"] == 6
    assert found["bpb"] == pytest.approx(logged["bpb"], rel=1e-6)
    assert found["by_source"].keys() == {"metal", "stone"}
    code, out, _ = call(capsys, "eval", trained.checkpoint(5))
    assert code == 0 and "step 5" in out and "unigram" in out


def test_the_newest_weights_are_read_and_those_that_are_named(fork_ranks, make_run, capsys):
    """Checkpoints of the steps 4 and 6, the weights alone of the steps 3 and 5."""
    folder = make_run(steps=6, every_steps=4, weights_every="1 step", keep=9, weights_keep=9)
    fork_ranks(run_rank, 1, folder)
    shutil.rmtree(folder.checkpoint(6))
    code, out, _ = call(capsys, "eval", folder.root, "--json")
    assert code == 0 and json.loads(out)["step"] == 5
    code, out, _ = call(capsys, "eval", folder.weights.checkpoint(3), "--json")
    assert code == 0 and json.loads(out)["step"] == 3
    shutil.rmtree(folder.weights.checkpoint(5))
    code, out, _ = call(capsys, "export", folder.root, "--out", folder.root / "hf", "--json")
    assert code == 0 and json.loads(out)["step"] == 4
    code, out, _ = call(capsys, "export", folder.weights.checkpoint(3), "--out", folder.root / "hf", "--json")
    assert code == 0 and json.loads(out)["step"] == 3


def test_a_number_of_threads_that_is_none_is_refused(trained, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "x")
    for verb in (["eval", trained.root], ["sample", trained.root, "--prompt", "a"]):
        reported(call(capsys, *verb, "--json")[1], "E-ENVIRONMENT-NUMBER", variable="OMP_NUM_THREADS")


def test_biases_of_routers_are_as_wide_as_in_training(fork_ranks, make_run, capsys):
    """Multiples of 0.003 are no bfloat16 numbers."""
    folder = make_run(steps=6, precision="bf16")
    config = load_run(folder.config)
    moe = Moe(num_experts=4, d_expert=8, scores="sigmoid", bias_rate=0.003, bias_steps=5)
    folder.config.write_text(to_toml(replace(config, model=replace(config.model, moe=moe))))
    fork_ranks(run_rank, 1, folder)
    buffers = dict(load_trained(folder.root).model.named_buffers())
    before = dict(load_trained(folder.checkpoint(5)).model.named_buffers())
    assert all(torch.equal(before[name], bias) for name, bias in buffers.items()), "they rest after step 5"
    assert sorted(buffers) == ["blocks.0.moe.router.bias", "blocks.1.moe.router.bias"]
    for bias in buffers.values():
        moved = torch.round(bias / 0.003)
        assert moved.any() and torch.allclose(bias, moved * 0.003, rtol=1e-5)
    logged = next(read_events(folder.events, "evaluation"))
    found = json.loads(call(capsys, "eval", folder.root, "--json")[1])
    assert found["bpb"] == pytest.approx(logged["bpb"], rel=1e-6)


def test_eval_scores_other_tokens(trained, token_folders, capsys):
    code, out, _ = call(capsys, "eval", trained.root, "--tokens", token_folders / "train", "--max-tokens", 50, "--json")
    whole = json.loads(call(capsys, "eval", trained.root, "--tokens", token_folders / "train", "--json")[1])
    assert code == 0 and 0 < json.loads(out)["tokens"] < whole["tokens"]


def test_sample_repeats_by_seed(trained, capsys):
    words = ("sample", trained.root, "--prompt", "Stone", "--prompt", "Bar", "--max-tokens", 12, "--json")
    first, again = json.loads(call(capsys, *words)[1]), json.loads(call(capsys, *words)[1])
    other = json.loads(call(capsys, *words, "--seed", 1, "--temperature", 2)[1])
    assert first == again != other
    assert [s["prompt"] for s in first["samples"]] == ["Stone", "Bar"]


@pytest.mark.parametrize(
    "words, exit_code, code, facts",
    [
        (("eval", "nowhere"), 2, "E-RUN-NOT-FOUND", {"path": "nowhere"}),
        (("eval", "RUN", "--max-tokens", "0"), 2, "E-OPTION-RANGE", {"option": "max-tokens"}),
        (("sample", "RUN", "--temperature", "-1"), 2, "E-OPTION-RANGE", {"option": "temperature"}),
        (("sample", "RUN", "--max-tokens", "1000"), 2, "E-CONTEXT-EXCEEDED", {"max_tokens": 1000}),
        (("eval", "RUN", "--tokens", "nowhere"), 3, "E-TOKENS-MISSING", {"folder": "nowhere"}),
    ],
    ids=str,
)
def test_bad_requests(trained, capsys, words, exit_code, code, facts):
    got, out, _ = call(capsys, *(trained.root if w == "RUN" else w for w in words), "--json")
    assert got == exit_code
    reported(out, code, **facts)


def test_a_run_without_checkpoints(trained, capsys):
    shutil.rmtree(trained.checkpoints)
    code, out, _ = call(capsys, "sample", trained.root, "--json")
    assert code == 21
    reported(out, "E-CKPT-VANISHED", folder=str(trained.checkpoints))
