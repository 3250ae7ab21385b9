"""`ingot eval` and `ingot sample` on a run that was just trained."""

import json
import shutil

import pytest
import torch

from ingot.cli.main import main
from ingot.config import load
from ingot.dist.start import Place
from ingot.events import read_events
from ingot.schema.run import RunConfig
from ingot.train.build import build
from ingot.train.loop import train


def run_rank(rank, ranks, folder):
    place = Place(rank=0, world_size=1, local_rank=0, local_world_size=1, attempt=0, device=torch.device("cpu"))
    run = build(load(RunConfig, folder.config), folder, place, say=lambda text: None)
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
    "words, code, message",
    [
        (("eval", "nowhere"), 2, "neither a run folder nor a checkpoint"),
        (("eval", "RUN", "--max-tokens", "0"), 2, "max_tokens is 0"),
        (("sample", "RUN", "--temperature", "-1"), 2, "temperature=-1"),
        (("sample", "RUN", "--max-tokens", "1000"), 2, "positions"),
        (("eval", "RUN", "--tokens", "nowhere"), 3, "nowhere"),
    ],
    ids=str,
)
def test_bad_requests(trained, capsys, words, code, message):
    got, _, err = call(capsys, *(trained.root if w == "RUN" else w for w in words))
    assert (got, message in err) == (code, True), err


def test_a_run_without_checkpoints(trained, capsys):
    shutil.rmtree(trained.checkpoints)
    code, _, err = call(capsys, "sample", trained.root)
    assert code == 21 and "no checkpoint yet" in err
