"""Real short runs, each made slow in one way: the first cause that is named is the one that was planted."""

import dataclasses
import hashlib
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ingot.config import to_dict, to_toml
from ingot.report.diagnose.evidence import Cause
from ingot.report.diagnose.slow import Slowness, explain_slow
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.run import Checkpoint, Data, Evaluate, Parallel, RunConfig, Train, WatchSettings
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import DOCUMENT_DTYPE, Shard, TokenManifest
from ingot.storage import sha256_bytes, write_atomic, write_json

# A core as calibration finds it. What is asked for are ratios, so its own figures matter little.
CORE = Cluster(
    name="here", device="cpu", devices_per_node=2, memory_bytes=16 << 30, memory_bandwidth=8e9,
    peak_flops={"bf16": 4e10, "fp32": 3e10}, op_seconds=8e-6, step_overhead_seconds=1e-3, runtime_bytes=350 << 20,
    link_bandwidth=1e9, link_seconds=1e-4, measured="2026-11-22",
)  # fmt: skip
ARCH = Arch(
    vocab_size=256, d_model=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=176, max_seq_len=256
)


def write_tokens(folder: Path, tokens: int = 200_000) -> None:
    """One shard of a random walk over the vocabulary, in documents of 100 tokens."""
    folder.mkdir(parents=True)
    ids = (1 + np.cumsum(np.random.default_rng(3).integers(-2, 3, tokens)) % 255).astype("<u2")
    ids[99::100] = 0
    index = np.zeros(tokens // 100, DOCUMENT_DTYPE)
    index["start"], index["tokens"] = np.arange(len(index)) * 100, 100
    data, block = ids.tobytes(), 4096
    digests = b"".join(hashlib.sha256(data[i : i + block]).digest() for i in range(0, len(data), block))
    for suffix, content in (("tokens", data), ("blocks", digests), ("documents", index.tobytes())):
        (folder / f"walk.{suffix}").write_bytes(content)
    shard = Shard(
        name="walk", source="walk", tokens=tokens, documents=len(index), text_bytes=tokens,
        blocks_sha256=sha256_bytes(digests), documents_sha256=sha256_bytes(index.tobytes()),
    )  # fmt: skip
    manifest = TokenManifest(
        dtype="uint16", vocab_size=256, eot_id=0, tokenizer_sha256="0" * 64, corpus_sha256="0" * 64, split="train",
        block_bytes=block, seed=0, shards=(shard,),
    )  # fmt: skip
    write_json(folder / "manifest.json", to_dict(manifest))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    write_tokens(folder / "train")
    write_tokens(folder / "heldout", 2_000)
    return folder


@pytest.fixture
def trained(tmp_path, tokens, fork_ranks):
    """trained(parallel={}, train={}, ..., spoil=function) -> the explanation of a run that was really made."""

    def run(*, spoil=None, checkpoint: int = 1000, heldout: int = 0, parallel=None, **train) -> Slowness:
        from ingot.planner.run.plan import make_plan

        settings = {"steps": 24, "seq_len": 64, "global_batch": 8, "micro_batch": 8, "precision": "fp32"} | train
        config = RunConfig(
            name="planted",
            model=ARCH,
            data=Data(tokens=str(tokens / "train"), heldout=str(tokens / "heldout") if heldout else ""),
            train=Train(**settings),
            parallel=Parallel(**(parallel or {})),
            checkpoint=Checkpoint(mode="sync", every_steps=checkpoint),
            evaluate=Evaluate(every_steps=heldout),
            watch=WatchSettings(log_every=4),
        )
        folder = RunFolder(tmp_path / "run")
        write_atomic(folder.config, to_toml(config))
        write_json(folder.plan, to_dict(make_plan(config, CORE)))
        fork_ranks(train_rank, config.parallel.world_size, folder, config, spoil)
        return explain_slow(folder.root)

    return run


def train_rank(rank, ranks, folder, config, spoil):
    import torch

    from ingot.trainer.loop import train
    from ingot.trainer.mesh.start import RankInfo
    from ingot.trainer.run import build_trainer

    if spoil:
        spoil(rank)
    place = RankInfo(
        rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, attempt=0, device=torch.device("cpu")
    )
    run = build_trainer(config, folder, place, say=lambda text: None)
    try:
        train(run)
    finally:
        run.loader.close()


def first(found: Slowness) -> Cause:
    """Return the first cause that does not depend on other programs on the machine."""
    return next(cause for cause in found.causes if cause.name != "no free core")


@pytest.mark.slow
def test_a_loader_that_sleeps(trained):
    def spoil(rank):
        from ingot.trainer.loader.reader import TokenReader

        read, began = TokenReader.read, []

        def slow_read(self, ids, out):
            began.append(time.monotonic())
            if rank == 1 and len(began) > 6:
                # By then reads are a step apart, on this machine under its load; the log leaves the first steps out.
                apart = max(after - before for before, after in pairwise(began[3:7]))
                time.sleep(min(max(0.05, 5 * apart), 3.0))
            return read(self, ids, out=out)

        TokenReader.read = slow_read

    found = trained(spoil=spoil, parallel={"dp_replicate": 2}, micro_batch=4)
    assert first(found).name == "data stall"
    assert first(found).seconds > 0.5 * found.measured.step_seconds
    assert "rank 1 most" in first(found).evidence  # rank 0 does not wait for data, but for rank 1
    assert found.measured.waits["data"].least < first(found).seconds / 2


def test_a_checkpoint_at_every_step(trained):
    found = trained(checkpoint=1)
    assert first(found).name == "checkpoint stall"
    remedy = first(found).remedies[0]
    assert remedy.settings["checkpoint.every_steps"] > 1
    assert 0 < remedy.seconds <= first(found).seconds


@pytest.mark.slow
def test_micro_batches_of_one(trained):
    found = trained(micro_batch=1, global_batch=16)
    assert first(found).name == "small micro-batches"
    (remedy,) = first(found).remedies
    assert remedy.settings["train.micro_batch"] > 8
    assert remedy.seconds > 0.2 * found.measured.step_seconds


@pytest.mark.slow
def test_recomputation_that_nobody_needs(trained):
    found = trained(parallel={"recompute": "full"}, seq_len=256)
    assert first(found).name == "recompute"
    assert first(found).remedies[0].settings == {"parallel.recompute": "none"}
    assert "would fit" in first(found).evidence


@pytest.mark.slow
def test_a_pipeline_without_micro_batches(trained):
    found = trained(parallel={"pp": 2}, micro_batch=16, global_batch=16, seq_len=128)
    assert first(found).name == "pipeline bubble"
    assert first(found).seconds > 0.2 * found.measured.step_seconds
    assert first(found).remedies[0].settings["train.micro_batch"] < 16


def test_evaluation_after_every_step(trained):
    found = trained(heldout=1)
    assert first(found).name == "evaluation"
    assert found.measured.evaluations == 23 and not found.measured.untimed_evaluations


def test_everything_can_be_written_as_json(trained):
    import json

    found = trained()
    assert json.loads(json.dumps(dataclasses.asdict(found)))["measured"]["steps"] == 20
