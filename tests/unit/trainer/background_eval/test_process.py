"""The process that evaluates a save: the numbers of the ranks, bit for bit, within its limits."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from ingot.config import to_toml
from ingot.events import read_events
from ingot.schema.evaluate import BackgroundEvaluation, tokens_within
from ingot.theory.rules import load_run
from ingot.trainer.background_eval.process import device_of
from ingot.trainer.loop import train
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.run import build_trainer

HEAD = "import ingot.trainer.background_eval.process as process, os, sys; "


def run_rank(rank, ranks, folder):
    place = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, attempt=0, device=torch.device("cpu"))
    run = build_trainer(load_run(folder.config), folder, place, say=lambda text: None)
    train(run)
    run.loader.close()


@pytest.fixture
def trained(fork_ranks, make_run):
    folder = make_run(steps=4, every_steps=2, weights_every="1 step", weights_keep=9)
    config = load_run(folder.config)
    folder.config.write_text(to_toml(replace(config, evaluate=replace(config.evaluate, every_steps=1))))
    fork_ranks(run_rank, 1, folder)
    return folder


def evaluated(folder, save, code="process.main(*sys.argv[1:])", limits=("200000", "1"), **settings):
    config = load_run(folder.config)
    background = BackgroundEvaluation(nice=0, **settings)  # a busy machine would keep a lower priority waiting
    folder.config.write_text(to_toml(replace(config, evaluate=replace(config.evaluate, background=background))))
    command = [sys.executable, "-c", HEAD + code, str(folder.root), str(save), str(os.getpid()), "1", *limits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return [json.loads(line) for line in done.stdout.splitlines()], done


def test_its_numbers_and_samples_are_those_of_the_ranks_bit_for_bit(trained):
    in_loop = {e["step"]: e for e in read_events(trained.events, "evaluation")}
    samples = [(e["prompt"], e["text"]) for e in read_events(trained.events, "sample")]
    assert sorted(in_loop) == [1, 2, 3, 4] and samples
    for save, step in ((trained.weights.checkpoint(3), 3), (trained.checkpoint(4), 4)):
        (found, *drawn, last), _ = evaluated(trained, save)
        for name in ("bpb", "loss", "tokens", "unigram_bpb", "by_source"):
            assert found[name] == in_loop[step][name], (step, name)
        assert last == {"reason": ""}
    assert [(e["prompt"], e["text"]) for e in drawn] == samples  # of the last step
    # The first evaluation chooses how much of the text is scored: in an hour, all of it.
    (size, found, *_), _ = evaluated(trained, trained.checkpoint(4), limits=("0", "3600"), share=1.0)
    assert size["kind"] == "evaluation_sized" and size["reason"] == "evaluate.max_tokens"
    assert size["tokens"] == size["max_tokens"] and size["seconds_per_token"] > 0 < size["start_seconds"]
    assert found["tokens"] == in_loop[4]["tokens"]
    (few, *_), _ = evaluated(trained, trained.checkpoint(4), limits=("1", "3600"))
    assert 0 < few["tokens"] < found["tokens"]


def test_how_many_tokens_fit_into_a_share_of_the_time():
    assert tokens_within(10.0, 2.0, 0.5, 100) == 16  # eight seconds are left
    assert tokens_within(3.0, 2.0, 0.5, 100) == 4  # the start is more than half: as long again
    assert tokens_within(10.0, 2.0, 0.5, 15) == 15 and tokens_within(1.0, 0.1, 1e9, 15) == 1


@pytest.mark.slow
def test_its_limits_hold_and_what_it_finds_is_its_reason(trained):
    save = trained.checkpoint(4)
    show = (
        "from ingot.schema.evaluate import BackgroundEvaluation as B; process.keep_limits(B(nice=7, threads=3)); "
        "print(os.nice(0) - int(sys.argv[-1]), os.environ['OMP_NUM_THREADS'], "
        "open('/proc/self/oom_score_adj').read().strip(), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", HEAD + show, str(os.nice(0))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600).stdout.split()
    assert found[0] == str(min(7, 19 - os.nice(0))) and found[1:] == ["3", "1000", "False"]

    answers, _ = evaluated(trained, save, memory_bytes=300 << 20, code=(
        "process._evaluate = lambda *_: bytearray(1 << 30); process.main(*sys.argv[1:])"
    ))  # fmt: skip
    assert answers == [{"reason": "it ran out of memory: its limit is 0.29 GiB (memory_bytes)"}]

    file = next(save.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    answers, done = evaluated(trained, save)
    assert len(answers) == 1 and str(file.name) in answers[0]["reason"] and "Traceback" in done.stderr
    assert evaluated(trained, trained.checkpoint(3))[0] == [{"gone": True}]
    orphan = "os.getppid = lambda: 1; process.main(*sys.argv[1:])"  # its launcher ended before it began
    answers, done = evaluated(trained, trained.checkpoint(2), orphan)
    assert answers == [] and done.returncode == 0


def test_a_gpu_is_taken_only_if_no_rank_uses_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert device_of("auto", "auto", 7) == ("cuda", 7)
    assert device_of("auto", "cuda", 8) == device_of("auto", "cpu", 1) == device_of("cpu", "cuda", 1) == ("cpu", 0)
    assert device_of("cuda:3", "cuda", 8) == ("cuda", 3)
