"""Real short runs, each spoiled in one way: `ingot explain nan` names the operation and the cause that were planted."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from tests.expect import reported
from tests.unit.report.diagnose.test_slow_runs import ARCH, write_tokens

from ingot.cli.main import main
from ingot.config import to_toml
from ingot.errors import RunFailed
from ingot.schema.accepted import AcceptedChanges, write_accepted
from ingot.schema.guard import Guard
from ingot.schema.run import Checkpoint, Data, Optim, Parallel, RunConfig, Train, WatchSettings
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import read_token_manifest
from ingot.storage import write_atomic

PLANTED = 4  # the step after which a plant changes the weights, before its checkpoint
SMALL = replace(ARCH, num_layers=2, d_model=32, head_dim=8, d_ffn=48)
UNTIED = replace(SMALL, tied_embeddings=False)
RECOMPUTED = Parallel(recompute="full")


def train_rank(rank, ranks, folder, config, plant):
    """Train as a rank. plant(run, step) changes masters after a step. Returns the code of an error."""
    import torch

    from ingot.trainer.checkpoint import tensor_file
    from ingot.trainer.loop import train
    from ingot.trainer.mesh.start import RankInfo
    from ingot.trainer.run import build_trainer

    tensor_file._require_finite = lambda part, data: None  # or a spoiled state could not be saved
    place = RankInfo(
        rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, attempt=0, device=torch.device("cpu")
    )
    run = build_trainer(config, folder, place, say=lambda text: None)
    verdict = run.policy.verdict

    def planted(result):
        plant(run, result.step)
        run.model.publish()
        return verdict(result)

    run.policy.verdict = planted
    try:
        train(run)
    except RunFailed as error:
        return error.code
    finally:
        run.loader.close()
    return ""


def weight(run, name: str):
    """Return this rank's master weights of a parameter."""
    return next(shard.value for shard in run.model.shards if shard.name == name)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nan") / "train"
    write_tokens(folder, 20_000)
    return folder


@pytest.fixture
def spoiled(tmp_path, tokens, fork_ranks):
    """spoiled(plant, train={}, ...) -> the folder of a run that was really made, and the code with which it ended."""

    def run(plant=lambda run, step: None, *, data=tokens, arch=SMALL, sections=None, **train):
        settings = {"steps": 8, "seq_len": 32, "global_batch": 8, "micro_batch": 4, "precision": "fp32"} | train
        config = RunConfig(
            name="planted",
            model=arch,
            data=Data(tokens=str(data)),
            train=Train(**settings),
            **(sections or {}),
            checkpoint=Checkpoint(mode="sync", every_steps=2),
            guard=Guard(preset="off", hash_every=0),  # what is planted shall stay
            watch=WatchSettings(log_every=1),
        )
        folder = RunFolder(tmp_path / "run")
        write_atomic(folder.config, to_toml(config))
        return folder, fork_ranks(train_rank, config.parallel.world_size, folder, config, plant)[0]

    return run


def explained(folder: RunFolder, capsys, *options: str) -> dict:
    capsys.readouterr()
    assert main(["explain", "nan", str(folder.root), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def causes(facts: dict) -> list[str]:
    return [cause["name"] for cause in facts["causes"] if cause["found"]]


def evidence(facts: dict, name: str) -> str:
    return next(cause["evidence"] for cause in facts["causes"] if cause["name"] == name)


def contents(folder: RunFolder) -> dict:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.root.rglob("*")}


def test_norm_of_a_zero_vector(spoiled, capsys):
    def plant(run, step):
        if step == PLANTED:
            weight(run, "embed.weight")[0] = 0.0  # of the end of text, which most samples have

    folder, code = spoiled(plant, arch=replace(SMALL, norm_eps=1e-30))
    assert code == "E-LOSS-NOT-FINITE"
    before = contents(folder)
    facts = explained(folder, capsys)
    assert contents(folder) == before
    origin = facts["replay"]["origin"]
    assert (facts["wanted"], facts["replay"]["step"], facts["replay"]["checkpoint"]) == (5, 5, 4)
    assert origin["module"] == "blocks.0.attention_norm" and origin["phase"] == "backward"
    assert origin["operation"] == "aten.pow" and origin["node"] == "RsqrtBackward0"
    assert origin["module_input"]["zero_rows"] > 0
    assert causes(facts)[0] == "norm of a zero vector" and "1e-30" in facts["causes"][0]["evidence"]


@pytest.mark.slow
def test_logits_beyond_fp16_on_two_ranks_of_tensor_parallelism(spoiled, capsys):
    def plant(run, step):
        if step == PLANTED:
            weight(run, "norm.weight").mul_(3000)
            weight(run, "head.weight").mul_(1000)

    folder, _ = spoiled(plant, arch=UNTIED, sections={"parallel": Parallel(tp=2)}, precision="fp16")
    facts = explained(folder, capsys)
    origin = facts["replay"]["origin"]
    assert (origin["module"], origin["operation"], origin["phase"]) == ("readout", "aten.mm", "forward")
    assert origin["output"]["dtype"] == "float16" and origin["output"]["infinite"]
    assert causes(facts)[0] == "overflow" and facts["replay"]["finite_unscaled"] is None
    assert "the run has 2 ranks" in facts["replay"]["notes"][0]


def test_a_checkpoint_with_nan_in_a_tensor(spoiled, capsys):
    def plant(run, step):
        if step == PLANTED:
            weight(run, "blocks.1.mlp.up.weight")[3, 5] = float("nan")

    folder, code = spoiled(plant)
    assert code == "E-LOSS-NOT-FINITE"
    facts = explained(folder, capsys)
    (bad,) = facts["replay"]["bad_state"]
    assert bad["name"] == "model.blocks.1.mlp.up.weight" and bad["nan"] == 1
    assert facts["replay"]["finite_at"] == 2 and facts["replay"]["checkpoint"] == 4
    origin = facts["replay"]["origin"]
    assert (origin["kind"], origin["module"]) == ("tensor", "blocks.1.mlp.up")
    assert origin["tensor"] == "blocks.1.mlp.up.weight" and causes(facts) == ["corrupted load"]


def test_a_learning_rate_that_is_far_too_large(spoiled, capsys):
    folder, _ = spoiled(sections={"optim": Optim(lr=100.0)})
    facts = explained(folder, capsys)
    assert causes(facts)[0] == "learning rate" and "times the weights" in facts["causes"][0]["evidence"]
    assert not facts["replay"]["loaded_bad"]
    command = f"ingot train {folder.root} --set optim.lr=10.0 --accept-change optim.lr"
    assert facts["causes"][0]["command"] == command and facts["causes"][0]["fix"].endswith(command)
    record = AcceptedChanges(step=2, config_sha256="", data_fingerprint="", changes={"optim.lr": (0.003, 100.0)})
    write_accepted(folder.accepted, [record])
    assert main(["explain", "nan", str(folder.root)]) == 0
    assert capsys.readouterr().out.split()[-7:] == command.replace("=10.0", "=0.003").split()


def test_the_line_of_a_replayed_step_beyond_the_wanted_one():
    from ingot.rehearse.replay.found import ReplayedStep
    from ingot.rehearse.replay.replay import _step_line

    step = ReplayedStep(step=84, loss=7.0, grad_norm=1.0, lr=0.1, skipped=False, change=0.0)
    assert _step_line(step, 82, 0.0) == "replay    step 84, beyond 82  loss 7"
    assert _step_line(step, 90, 12.0) == "replay    step 84 of 90  loss 7  12 s left"


def test_a_fault_of_the_machine_is_not_in_the_replay(spoiled, capsys):
    def plant(run, step):
        if step == PLANTED + 1:  # no checkpoint follows
            weight(run, "norm.weight")[0] = float("inf")

    folder, code = spoiled(plant)
    assert code == "E-LOSS-NOT-FINITE"
    facts = explained(folder, capsys)
    assert facts["replay"]["step"] == 0 and facts["replay"]["origin"] is None
    assert causes(facts) == ["hardware or layout"]
    assert "steps 5 to 8 are finite" in evidence(facts, causes(facts)[0])


def test_an_exponential_that_overflows(spoiled, capsys):
    from torch import nn

    from ingot.plugins.layers import FEED_FORWARDS, FeedForwardPart

    class Exponential(nn.Module):
        """A feed-forward down(exp(up(x))) of a plug-in."""

        def __init__(self, d_model, d_ffn):
            super().__init__()
            self.up, self.down = nn.Linear(d_model, d_ffn, bias=False), nn.Linear(d_ffn, d_model, bias=False)

        def forward(self, x):
            return self.down(self.up(x).exp())

    def plant(run, step):
        if step == PLANTED:
            weight(run, "blocks.1.mlp.up.weight").mul_(1e3)

    def make(width, ffn, options):
        return Exponential(width, ffn)

    roles = {"up.weight": "column", "down.weight": "row"}
    made = FeedForwardPart(name="exponential", make=make, sharding=roles, matrices=2, saved=2)
    FEED_FORWARDS.register(made)
    folder, code = spoiled(plant, arch=replace(SMALL, feed_forward="exponential"), sections={"parallel": RECOMPUTED})
    assert code == "E-LOSS-NOT-FINITE"
    facts = explained(folder, capsys)
    origin = facts["replay"]["origin"]
    assert (origin["module"], origin["operation"]) == ("blocks.1.mlp", "aten.exp")
    assert origin["module_class"] == "Exponential"
    assert causes(facts)[0] == "exp overflow" and "88.7" in facts["causes"][0]["evidence"]


def test_gradients_whose_squares_overflow(spoiled, capsys):
    def plant(run, step):
        if step == PLANTED:
            weight(run, "norm.weight").mul_(1e20)

    folder, code = spoiled(plant, arch=UNTIED)
    assert code == "E-LOSS-NOT-FINITE"
    facts = explained(folder, capsys)
    assert facts["replay"]["phase"] == "gradient norm" and causes(facts)[0] == "huge gradients"
    assert facts["replay"]["origin"]["operation"] == "aten._foreach_norm"


def test_a_loss_scale_that_is_too_large(spoiled, capsys):
    def plant(run, step):
        if step == PLANTED:
            run.loss_scale.scale.fill_(2.0**30)

    folder, code = spoiled(plant, precision="fp16")
    assert not code  # the run skips the step, and halves the scale
    facts = explained(folder, capsys)
    assert facts["replay"]["loss_scale"] == 2.0**30 and facts["replay"]["finite_unscaled"]
    assert causes(facts)[0] == "loss scale" and facts["replay"]["phase"] == "backward"


def test_an_update_that_a_callback_spoils(spoiled, capsys):
    from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback

    class Spoil(StepCallback):
        """A callback that changes a gradient after its norm was taken."""

        def __init__(self, run, options):
            self.pieces = run.pieces

        def on_gradients(self, step):
            if step == PLANTED + 1:
                self.pieces[0].grad.fill_(float("nan"))

    CALLBACKS.register(CallbackPart(name="spoil", make=Spoil))
    folder, code = spoiled(sections={"callbacks": {"spoil": {}}})
    assert code == "E-LOSS-NOT-FINITE"
    facts = explained(folder, capsys)
    assert (facts["wanted"], facts["replay"]["step"], facts["replay"]["phase"]) == (6, 5, "update")
    assert causes(facts) == ["optimizer update"]


def test_a_machine_with_too_little_memory_refuses_at_once(spoiled, capsys, monkeypatch):
    from ingot.rehearse.replay import config

    folder, _ = spoiled(steps=2)
    small = replace(config.read_machine(), available_bytes=1 << 20, gpus=())
    monkeypatch.setattr(config, "read_machine", lambda: small)
    assert main(["explain", "nan", str(folder.root), "--step", "2", "--json"]) == 3
    reported(capsys.readouterr().out, "E-REPLAY-MEMORY", free=1 << 20, device="cpu")


def test_a_log_without_such_a_step_asks_for_one(spoiled, capsys):
    folder, code = spoiled(steps=2)
    assert not code and main(["explain", "nan", str(folder.root)]) == 3
    assert "E-NAN-NO-STEP" in capsys.readouterr().err
    facts = explained(folder, capsys, "--step", "2")
    assert facts["reason"] == "named with --step" and causes(facts) == [] and facts["agreement"] == 0


def test_a_token_of_one_batch_names_its_documents(spoiled, tmp_path, capsys):
    """A token of one document is trained too far: fp32 holds its embedding, fp16 does not."""
    pytest.importorskip("tokenizers")
    import numpy as np

    from ingot.trainer.loader.order import Order
    from ingot.trainer.loader.reader import TokenReader

    words, draw = ["river", "stone", "light", "paper", "winter", "garden", "copper"], np.random.default_rng(1)
    texts = [" ".join(draw.choice(words, 100)) + f" {chr(0x2460 + number)} end" for number in range(40)]
    rows = [json.dumps({"text": text, "url": f"http://a.example/{n}"}) for n, text in enumerate(texts)]
    (tmp_path / "pages.jsonl").write_text("\n".join(rows))
    build = ["data", "build", "--source", "pages", str(tmp_path / "pages.jsonl"), "--out", str(tmp_path / "data")]
    kept = ["--set", "source.pages.preset=none", "--vocab-size", "300", "--runner", "inline", "--quiet"]
    assert main([*build, *kept]) == 0
    data = tmp_path / "data" / "tokens" / "train"
    manifest = read_token_manifest(data)
    order, reader = Order(manifest, 32, 1234), TokenReader(data, 32, manifest=manifest)
    before, batch = (reader.read(order.step(step, 8))[:, :-1] for step in (PLANTED + 1, PLANTED + 2))
    token, sample = next(
        (token, int(rows[0]))
        for token in np.unique(batch).tolist()
        if len(rows := np.unique(np.nonzero(batch == token)[0])) == 1 and token not in before
    )

    def plant(run, step):
        if step == PLANTED:
            weight(run, "embed.weight")[token] = 1e6

    folder, _ = spoiled(plant, data=data, arch=replace(UNTIED, vocab_size=300), precision="fp16")
    facts = explained(folder, capsys)
    replayed = facts["replay"]
    assert (facts["wanted"], replayed["step"], replayed["samples"]) == (6, 6, [sample])
    assert facts["agreement"] == 0  # step 5, with the bits of the run
    assert token in replayed["own_tokens"] and causes(facts) == ["bad batch", "overflow"]
    assert replayed["origin"]["module"] == "embed" and replayed["origin"]["operation"] == "aten.embedding"
    assert facts["documents"] and {one["sample"] for one in facts["documents"]} == {sample}
    urls = {one["url"] for one in facts["documents"]}
    assert urls <= {f"http://a.example/{n}" for n in range(40)}
    assert main(["explain", "nan", str(folder.root)]) == 0
    out = capsys.readouterr().out
    assert all(url in out for url in urls) and f"ingot data trace --run {folder.root} --step 6" in out
