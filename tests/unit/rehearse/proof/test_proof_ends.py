"""The processes of a proof: no port is chosen before it is bound, and none outlives its case or the folder."""

import multiprocessing
import os
import socket
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from tests.expect import refused

from ingot.api.checking import CheckResult, add_proof
from ingot.rehearse.proof import proof, ranks
from ingot.rehearse.proof.cases import LayoutCase
from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train

ARCH = Arch(vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ffn=48)
RUN = RunConfig(
    name="x", model=ARCH, data=Data(tokens=""), train=Train(steps=1, seq_len=16, global_batch=4, micro_batch=1)
)
# A program in the place of the ranks. A process that it forks is in no group that a signal to the ranks reaches; after
# the program's end it notes whether the folder is still there.
PROGRAM = """
import json, os, sys, time
folder, program = json.load(sys.stdin)["folder"], os.getpid()
child = os.fork()
if child == 0:
    os.dup2(2, 1)
    os.setsid()
    while os.getppid() == program:
        time.sleep(0.01)
    time.sleep(0.3)
    with open({mark!r}, "w") as mark:
        mark.write(str(os.path.isdir(folder)))
    sys.exit()
while os.getpgid(child) == os.getpgrp():
    time.sleep(0.01)
print(json.dumps({{"error": {error!r}}}), flush=True)
time.sleep(60)
"""


def run_on(world: int) -> RunConfig:
    return replace(RUN, parallel=Parallel(dp_shard=world))


@pytest.fixture
def no_group(monkeypatch):
    """Ranks do not join a group."""
    monkeypatch.setattr(ranks, "start", lambda *_: None)


@pytest.fixture
def program(monkeypatch, tmp_path):
    """A function that puts PROGRAM in the place of the ranks. Returns the path of its note."""

    def place(error: str):
        mark = tmp_path / "mark"
        monkeypatch.setattr(proof, "_RANKS", ("-c", PROGRAM.format(mark=str(mark), error=error)))
        return mark

    return place


def test_the_folder_stays_until_all_processes_have_ended_after_an_error(program):
    mark = program("raised")
    with refused("E-PROOF-ONE-PROCESS", cause="raised"):
        list(proof.prove_layouts(RUN))
    assert mark.read_text() == "True"


def test_the_folder_stays_until_all_processes_have_ended_after_an_interrupt(program, monkeypatch):
    mark = program("")

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(proof.Expected, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(proof.prove_layouts(RUN))
    assert mark.read_text() == "True"


def test_the_processes_end_when_a_line_cannot_be_shown(program, monkeypatch):
    mark = program("")
    monkeypatch.setattr(proof.Expected, "read", lambda _: None)
    monkeypatch.setattr(proof, "cases", lambda run: [LayoutCase("tp 3", None, "does not fit")])

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        add_proof(cast(CheckResult, SimpleNamespace(config=RUN)), interrupt)
    # The error keeps the frames, which keep the iterator: it was closed on purpose, not with its last reference.
    assert caught.tb and mark.read_text() == "True"


def test_a_program_that_ends_before_it_reads_is_reported(monkeypatch):
    monkeypatch.setattr(proof, "_RANKS", ("-c", "import sys; sys.exit('no memory')"))
    with refused("E-PROOF-DIED") as caught:
        list(proof.prove_layouts(replace(RUN, name="x" * 10_000)))  # more than a pipe holds
    assert "no memory" in caught.value.found


def test_an_error_of_one_rank_ends_the_others(no_group, monkeypatch, tmp_path):
    def train(run, folder, rank):
        if rank == 1:
            raise ValueError("on purpose")
        time.sleep(60)

    monkeypatch.setattr(ranks, "train", train)
    assert "on purpose" in ranks.run_case(run_on(2), tmp_path / "case")
    assert multiprocessing.active_children() == []


def test_an_interrupt_ends_the_ranks(no_group, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "train", lambda *_: time.sleep(60))
    monkeypatch.setattr(ranks, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ranks.run_case(run_on(2), tmp_path / "case")
    assert multiprocessing.active_children() == []


def test_the_port_of_the_ranks_is_bound_before_they_start(monkeypatch, tmp_path):
    def bind(*_):
        with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
            pass

    monkeypatch.setattr(ranks, "start", bind)
    monkeypatch.setattr(ranks, "train", lambda *_: None)
    assert "Address already in use" in ranks.run_case(run_on(1), tmp_path / "case")


def test_ranks_meet_on_that_port_also_inside_another_job(monkeypatch, tmp_path):
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3", "INGOT_STORE_FD": "0"}
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "_SECONDS", 10.0)
    monkeypatch.setattr(ranks, "train", lambda run, folder, rank: (folder / f"{rank}").touch())
    assert ranks.run_case(run_on(2), tmp_path / "case") == ""
    assert sorted(path.name for path in (tmp_path / "case").iterdir()) == ["0", "1"]
