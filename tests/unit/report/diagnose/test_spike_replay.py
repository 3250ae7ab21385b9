"""A real short run with three spikes, of the data, the weights and the hardware: each verdict is the one planted."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.unit.report.diagnose.test_slow_runs import ARCH

from ingot.cli.main import main
from ingot.config import to_dict, to_toml
from ingot.rehearse.replay.found import RecordedWay, ReplayedSpike, ReplayedStep
from ingot.report.diagnose.attempts import ChangedSetting, StepAttempt, attempt_of
from ingot.report.diagnose.batch_text import BatchText
from ingot.report.diagnose.spike import SpikeBatch
from ingot.report.diagnose.spike_verdict import judge_spike
from ingot.report.diagnose.troubled import TroubledStep, skipped_steps
from ingot.report.facts import RunData
from ingot.schema.arch import Moe
from ingot.schema.guard import Guard
from ingot.schema.guard_record import Measure, write_measures
from ingot.schema.run import Checkpoint, Data, Optim, RunConfig, Train, WatchSettings
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import DOCUMENT_DTYPE, Shard, TokenManifest, read_token_manifest
from ingot.storage import sha256_bytes, write_atomic, write_json
from ingot.trainer.loader.order import Order

SMALL = replace(ARCH, num_layers=2, d_model=32, head_dim=8, d_ffn=48)
SEQ_LEN, BATCH, STEPS, DOCUMENT = 32, 8, 62, 50
TOKENS = 12_000
NOISE = range(40, 52)  # documents of noise, among those of a slow walk
HARMED, BROKEN = 52, 57  # after these steps the weights are changed: before the save of one, after that of 56


def write_noisy_tokens(folder):
    folder.mkdir(parents=True)
    draw = np.random.default_rng(3)
    ids = (1 + np.cumsum(draw.integers(-1, 2, TOKENS)) % 255).astype("<u2")
    noise = slice(NOISE.start * DOCUMENT, NOISE.stop * DOCUMENT)
    ids[noise] = draw.integers(1, 256, DOCUMENT * len(NOISE))
    ids[DOCUMENT - 1 :: DOCUMENT] = 0
    index = np.zeros(TOKENS // DOCUMENT, DOCUMENT_DTYPE)
    index["start"], index["tokens"] = np.arange(len(index)) * DOCUMENT, DOCUMENT
    index["id"] = [np.void(number.to_bytes(16, "big")) for number in range(len(index))]
    data, block = ids.tobytes(), 4096
    digests = b"".join(hashlib.sha256(data[i : i + block]).digest() for i in range(0, len(data), block))
    for suffix, content in (("tokens", data), ("blocks", digests), ("documents", index.tobytes())):
        (folder / f"walk.{suffix}").write_bytes(content)
    shard = Shard(
        name="walk", source="walk", tokens=TOKENS, documents=len(index), text_bytes=TOKENS,
        blocks_sha256=sha256_bytes(digests), documents_sha256=sha256_bytes(index.tobytes()),
    )  # fmt: skip
    manifest = TokenManifest(
        dtype="uint16", vocab_size=256, eot_id=0, tokenizer_sha256="0" * 64, corpus_sha256="0" * 64, split="train",
        block_bytes=block, seed=0, shards=(shard,),
    )  # fmt: skip
    write_json(folder / "manifest.json", to_dict(manifest))


def noisy_step(folder) -> int:
    """Return the step with most windows of noise, among those after some training and before the weights change."""
    order = Order(read_token_manifest(folder), SEQ_LEN, 1234)

    def noise(step: int) -> int:
        starts = order.locate(order.step(step, BATCH))[1]
        return int(((starts >= NOISE.start * DOCUMENT) & (starts < (NOISE.stop - 1) * DOCUMENT)).sum())

    return max(range(36, HARMED), key=lambda step: noise(step) - noise(step + 1))


def train_rank(rank, ranks, folder, config):
    import torch

    from ingot.trainer.loop import train
    from ingot.trainer.mesh.start import RankInfo
    from ingot.trainer.run import build_trainer

    place = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, attempt=0, device=torch.device("cpu"))
    run = build_trainer(config, folder, place, say=lambda text: None)
    verdict = run.policy.verdict
    norm = next(shard.value for shard in run.model.shards if shard.name == "norm.weight")

    def planted(result):
        if result.step in (HARMED, BROKEN):
            norm.mul_(8.0)
        elif result.step in (HARMED + 1, BROKEN + 1):
            norm.div_(8.0)
        run.model.publish()
        return verdict(result)

    run.policy.verdict = planted
    try:
        train(run)
    finally:
        run.loader.close()


def test_data_weights_and_hardware_are_distinguished(tmp_path, fork_ranks, capsys):
    tokens, folder = tmp_path / "train", RunFolder(tmp_path / "run")
    write_noisy_tokens(tokens)
    config = RunConfig(
        name="planted",
        model=SMALL,
        data=Data(tokens=str(tokens)),
        train=Train(steps=STEPS, seq_len=SEQ_LEN, global_batch=BATCH, micro_batch=4, precision="fp32"),
        optim=Optim(lr=1e-2),
        checkpoint=Checkpoint(mode="sync", every_steps=4),
        guard=Guard(preset="off", hash_every=0, level=4),
        watch=WatchSettings(log_every=1),
    )
    write_atomic(folder.config, to_toml(config))
    fork_ranks(train_rank, 1, folder, config)
    before = {path: path.stat().st_mtime_ns for path in folder.root.rglob("*")}
    noisy, found = noisy_step(tokens), {}
    for step in (noisy, HARMED + 1, BROKEN + 1):
        capsys.readouterr()
        assert main(["explain", "spike", str(folder.root), "--step", str(step), "--replay", "--json"]) == 0
        found[step] = json.loads(capsys.readouterr().out)["replay"]
    assert {path: path.stat().st_mtime_ns for path in folder.root.rglob("*")} == before
    data, state, broken = found.values()
    assert data["verdict"]["cause"] in ("data", "data and state"), data["verdict"]
    first = data["documents"][0]
    assert int(first["document"], 16) in NOISE and first["loss"] > data["other_loss"] + 1
    shown = sum(one["excess"] for one in data["documents"] if int(one["document"], 16) in NOISE)
    assert shown > 0.4
    assert state["verdict"]["cause"] == "state" and state["checkpoint"] == HARMED
    assert broken["verdict"]["cause"] == "hardware" and broken["checkpoint"] == 56
    assert broken["verdict"]["departs"] == BROKEN + 1
    log = {one["step"]: one for one in map(json.loads, folder.events.read_text().splitlines()) if one["kind"] == "step"}
    assert data["own"]["loss"] == log[noisy]["loss"] and data["own"]["grad_norm"] == log[noisy]["grad_norm"]
    layers = {one["name"]: one for one in data["layers"]}
    assert layers.keys() >= {"embed", "blocks.0", "blocks.1", "norm"}
    whole = sum(one["gradient"] ** 2 for one in layers.values()) ** 0.5
    assert whole == pytest.approx(log[noisy]["grad_norm"], rel=1e-4)
    assert all(one["weights_before"] != one["weights_after"] for one in layers.values())
    harmed = {one["name"]: one["weights_before"] for one in state["layers"]}
    assert harmed["norm"] > 5 * layers["norm"]["weights_before"]
    assert main(["explain", "spike", str(folder.root), "--step", str(BROKEN + 1), "--replay"]) == 0
    out = capsys.readouterr().out
    assert "verdict   hardware or layout" in out and "ingot doctor" in out and "layers    " in out


def test_the_other_batch_does_not_balance_experts(tmp_path):
    from ingot.rehearse.replay.opened import open_replay
    from ingot.rehearse.replay.spike import _SpikePlayer
    from ingot.trainer.step import train_step

    write_noisy_tokens(tmp_path / "train")
    moe = Moe(num_experts=4, top_k=2, d_expert=16, bias_rate=1e-3, global_loss=1e-2)
    config = RunConfig(
        name="experts",
        model=replace(SMALL, moe=moe),
        data=Data(tokens=str(tmp_path / "train")),
        train=Train(steps=4, seq_len=SEQ_LEN, global_batch=BATCH, micro_batch=4, precision="fp32"),
    )
    write_atomic(RunFolder(tmp_path / "run").config, to_toml(config))
    loads = []
    for plays in (False, True):
        way = RecordedWay(rates={1: 0.25})
        with open_replay(tmp_path / "run", 1, skipped=(), device="cpu", say=lambda line: None, way=way) as opened:
            assert opened.rate_of(1) == 0.25 != opened.rate_of(2)
            if plays:
                assert _SpikePlayer(opened, 1, lambda line: None, lambda *_: None).play().other_step == 2
            else:
                train_step(opened.parts, opened.loader.part_of(1, 0), 1e-3)
            loads.append(opened.parts.balance.load_RE.tolist())
    assert loads[0] == loads[1] != [[1.0] * 4] * 2


MISSING = float("nan")
CASES = [
    # cause, logged (loss, norm), replayed (loss, norm), the other batch (loss, norm), loss of both on older weights
    ("data", (6.0, 1.0), (6.0, 1.0), (3.0, 1.0), (6.5, 3.4)),
    ("data and state", (6.0, 1.0), (6.0, 1.0), (3.0, 1.0), (3.5, 3.4)),
    ("state", (6.0, 1.0), (6.0, 1.0), (5.0, 1.0), (3.5, 3.4)),
    ("hardware", (6.0, 1.0), (3.1, 1.0), (3.0, 1.0), (3.5, 3.4)),
    ("hardware", (float("inf"), 1.0), (3.1, 1.0), (3.0, 1.0), (3.5, 3.4)),
    ("data", (3.0, 9.0), (3.0, 8.0), (3.0, 1.1), (3.0, 3.0)),
    ("state", (3.0, 9.0), (3.0, 8.0), (3.0, 7.0), (3.0, 3.0)),
    ("hardware", (3.0, 9.0), (3.0, 1.1), (3.0, 1.0), (3.0, 3.0)),
    ("data", (6.0, 1.0), (MISSING, 1.0), (3.0, 1.0), (9.0, 3.0)),
    ("data", (6.0, 1.0), (MISSING, 1.0), (3.0, 1.0), (MISSING, 3.0)),
    ("data and state", (6.0, 1.0), (MISSING, 1.0), (3.0, 1.0), (3.1, 3.0)),
    ("state", (3.0, 9.0), (3.0, 8.0), (3.0, MISSING), (3.0, 3.0)),
    ("none", (3.05, 1.2), (3.05, 1.2), (3.0, 1.0), (3.0, 3.0)),
    ("unknown", (6.0, 1.0), (6.0, 1.0), (MISSING, MISSING), (3.5, MISSING)),
    ("unknown", (MISSING, MISSING), (6.0, 1.0), (3.0, 1.0), (3.5, 3.4)),
]


def judged(
    folder, logged, own, other, early, before=3.0, checkpoint=30, found=("loss spike",), later=MISSING, way=None
):
    config = RunConfig(
        name="r",
        model=SMALL,
        data=Data(tokens="t"),
        train=Train(steps=99, seq_len=SEQ_LEN, global_batch=8, micro_batch=8),
    )
    steps = {step: {"step": step, "loss": 3.0, "grad_norm": 1.0, "lr": 1e-3} for step in range(1, 40)}
    data = RunData(folder=RunFolder(folder), run=config, steps=steps)
    text = BatchText(documents=0, tokens=0, shortest=0, median=0, longest=0, repeated=0.0, most_repeated=())
    step = TroubledStep(step=40, found=found, loss=logged[0], grad_norm=logged[1], later_loss=later)
    batch = SpikeBatch(
        step=step, documents=(), changes=(), sources={}, source_change=None, text=text, lr=1e-3, parts=()
    )

    def made(step, loss, norm):
        return ReplayedStep(step=step, loss=loss, grad_norm=norm, lr=1e-3, skipped=False, change=0.0)

    replayed = ReplayedSpike(
        checkpoint=checkpoint, unused=(), steps=(made(39, before, 1.0),), own=made(40, *own),
        nats=np.zeros((1, 1), np.float32), other_step=41 if other[0] == other[0] or own[0] != own[0] else 0,
        other_loss=other[0], other_grad_norm=other[1], other_nats=None, other_loss_after=other[0],
        early_loss=early[0], early_other_loss=early[1], layers=(), device="cpu", precision="fp32", notes=(),
    )  # fmt: skip
    return judge_spike(data, batch, replayed, way)


@pytest.mark.parametrize(("cause", "logged", "own", "other", "early"), CASES)
def test_the_verdict_follows_from_the_sizes(tmp_path, cause, logged, own, other, early):
    verdict = judged(tmp_path, logged, own, other, early)
    assert verdict.cause == cause, verdict
    assert bool(verdict.advice) == (cause not in ("none", "unknown"))
    assert not any("differ" in reason or "nan nats" in reason for reason in verdict.reasons)


def test_untrained_weights_do_not_show_whether_the_batch_is_bad_on_others(tmp_path):
    """To the first weights, every batch has the loss of a random guess."""
    verdict = judged(tmp_path, (6.0, 1.0), (6.0, 1.0), (3.0, 1.0), (5.5, 5.5), checkpoint=0)
    assert verdict.cause == "data" and "untrained" in verdict.reasons[-1]
    assert not any("learning rate" in text for text in verdict.advice)


@pytest.mark.parametrize(
    ("cause", "own", "other"),
    [
        ("hardware", (3.1, 1.0), (3.0, 1.0)),
        ("data", (MISSING, MISSING), (3.0, 1.0)),
        ("state", (MISSING, MISSING), (MISSING, MISSING)),
        ("data", (9.0, 9.0), (3.0, 1.0)),  # sums of the replay are rounded in another order
    ],
)
def test_a_loss_that_is_not_finite_has_a_verdict(tmp_path, cause, own, other):
    verdict = judged(
        tmp_path, (MISSING, MISSING), own, other, (3.4, 3.4), found=("loss not finite",), checkpoint=0, later=3.1
    )
    assert verdict.cause == cause, verdict
    assert any("nothing to undo: the run went back" in text for text in verdict.advice) == (cause == "hardware")


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3]])
def test_a_replay_that_leaves_the_log_before_the_step_is_no_replay_of_it(tmp_path, case):
    verdict = judged(tmp_path, *case[1:], before=4.0)
    assert verdict.departs == 39 and "from step 39 on" in verdict.reasons[-1]


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[3]])
@pytest.mark.parametrize(
    ("step", "key", "before", "after", "blamed"),
    [
        (38, "optim.lr", 1e-3, 0.1, True),
        (38, "optim.clip_norm", 1.0, 1e3, True),
        (38, "optim.lr", 1e-3, 1e-4, False),  # a lower rate makes no spike
        (38, "guard.preset", "guard", "strict", False),
        (20, "optim.lr", 1e-3, 0.1, False),  # before the checkpoint and the level of the guard
    ],
)
def test_an_accepted_change_is_weighed_before_hardware_is_blamed(tmp_path, case, step, key, before, after, blamed):
    changed = ChangedSetting(step=step, key=key, before=before, after=after)
    verdict = judged(tmp_path, *case[1:], way=StepAttempt(step=40, changes=(changed,)))
    assert verdict.cause == ("settings" if blamed else case[0])
    assert any(f"ingot ckpt rewind {tmp_path} --to 30" in text for text in verdict.advice) == blamed
    if blamed:
        assert "by an accepted change after step 38, 2 steps before" in verdict.reasons[-1]
        assert any(f"--set {key}={before}" in text for text in verdict.advice)


def test_the_way_to_a_step_is_that_of_the_training_with_the_finding(tmp_path):
    """Step 6 was trained with a rate that was raised after step 5; the run went back to step 4, and took it there."""
    lines, clock = [], iter(range(100))

    def log(kind, **facts):
        lines.append({"kind": kind, "time": float(next(clock))} | facts)

    def train(first, last, lr):
        for step in range(first, last + 1):
            log("step", step=step, loss=3.0, grad_norm=1.0, lr=lr)

    def change(step):
        log("setting_changed", key="optim.lr", old=1e-3, new=0.1, step=step)

    log("run_started", from_step=0)
    train(1, 5, 1e-3)
    for step in (4, 5):
        log("checkpoint", step=step)
    change(5)
    log("run_started", from_step=5)
    train(6, 7, 0.1)
    found = lines[-2]["time"] + 0.5
    log("guard", action="lower", first=7, last=7)
    change(4)
    log("rolled_back", from_step=7, to_step=4)
    train(5, 6, 0.05)
    log("checkpoint", step=5)
    folder = RunFolder(tmp_path)
    folder.events.write_text("".join(json.dumps(one) + "\n" for one in lines))
    data = RunData(folder=folder)
    way = attempt_of(data, 6, found)
    assert way.rates == dict.fromkeys(range(1, 6), 1e-3) | {6: 0.1}
    assert [(one.step, one.after) for one in way.changes] == [(5, 0.1)]
    assert (way.later_measures, way.foreign) == ((("lower", 7, 7),), {5})
    lowered = Measure(action="lower", first=7, last=7, found=("loss spike",), lr_factor=0.5, lr_last=99)
    write_measures(folder.guard, [lowered])
    last = attempt_of(data, 6)
    assert (way.measures(data), last.measures(data)) == ([], [lowered])
    assert (last.rates[5], last.foreign, [one.step for one in last.changes]) == (0.05, set(), [4])


def went(time, to, *, started=False):
    return {"time": time, "from_step": to} if started else {"time": time, "from_step": 999, "to_step": to}


@pytest.mark.parametrize(
    ("vetoes", "starts", "roll_backs", "skipped"),
    [
        ([(10, 80)], [went(0, 0, started=True), went(20, 100, started=True)], [], [80]),  # kept in a checkpoint
        ([(10, 80), (12, 110)], [went(0, 0, started=True), went(20, 100, started=True)], [], [80]),
        ([(10, 140)], [went(0, 0, started=True)], [went(20, 100)], []),  # trained again, without a skip
        ([(10, 140), (25, 140)], [went(0, 0, started=True)], [went(20, 100)], [140]),
        ([(10, 140), (30, 150)], [went(0, 0, started=True)], [went(40, 100)], [140, 150]),  # passed afterwards
        ([(10, 160), (50, 120)], [went(0, 0, started=True), went(40, 100, started=True)], [], []),
    ],
)
def test_updates_that_the_weights_of_a_step_lack_are_skipped(tmp_path, vetoes, starts, roll_backs, skipped):
    data = RunData(
        folder=RunFolder(tmp_path),
        steps={150: {"time": 30, "step": 150}},
        vetoes=[{"time": time, "steps": [step]} for time, step in vetoes],
        starts=starts,
        roll_backs=roll_backs,
    )
    assert skipped_steps(data, 150) == skipped
