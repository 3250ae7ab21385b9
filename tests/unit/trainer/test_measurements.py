"""Measurements within steps: the same numbers in every layout, those of plain references, and no step counts twice."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ingot.config import to_toml
from ingot.events import read_events
from ingot.plugins.callback import Verdict
from ingot.schema import events
from ingot.schema.arch import Moe
from ingot.schema.metric_settings import MetricSettings
from ingot.schema.metrics import read_series
from ingot.schema.parallel import Parallel
from ingot.theory.rules import load_run
from ingot.trainer import log, record
from ingot.trainer.loop import RunLoop
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.mesh.step_times import StepTimes
from ingot.trainer.run import build_trainer
from ingot.trainer.step import train_step

from .test_record import run_rank, values_of

MOE = Moe(num_experts=4, top_k=2, d_expert=8, scores="sigmoid", bias_rate=0.003)
LAYOUTS = {
    "dp": (2, {"dp_replicate": 2}),
    "zero 3": (2, {"dp_shard": 2, "zero": 3}),
    "tp": (2, {"tp": 2, "sequence": False}),
    "tp, sequence": (2, {"tp": 2}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2}),
    "offload": (1, {"offload": "cpu", "zero": 3, "offload_parameters": True}),
}
OF_EXPERTS = {"experts": (2, {"dp_shard": 2, "ep": 2})}
NAMES = ("train/loss", "train/grad_norm", "train/param_norm", "train/update_ratio")
BY_SOURCE = tuple(f"data/{source}/{kind}" for kind in ("loss", "share") for source in ("metal", "stone"))
BY_LAYER = tuple(f"layers/{layer}/{kind}" for kind in ("grad_norm", "activation_rms") for layer in (0, 1, "other"))[:-1]
STEPS = 4


def configured(folder, parallel, moe=None):
    """Let a run be in float64, in a layout, and measure its layers at every second step."""
    config = load_run(folder.config)
    settings = replace(config.train, precision="fp64", steps=STEPS)
    model = config.model if moe is None else replace(config.model, moe=moe)
    metrics = MetricSettings(layers_every=2)
    text = to_toml(replace(config, train=settings, parallel=Parallel(**parallel), model=model, metrics=metrics))
    folder.config.write_text(text)
    return folder


def numbers(folder):
    return {name: values_of(folder, name) for name in (*NAMES, *BY_SOURCE, *BY_LAYER)}


@pytest.fixture(scope="module")
def alone():
    """The numbers of one process, by model."""
    return {}


def reference(alone, fork_ranks, make_run, moe):
    if bool(moe) not in alone:
        folder = configured(make_run("alone", log_every=2, keep=1), {}, moe)
        fork_ranks(run_rank, 1, folder)
        alone[bool(moe)] = numbers(folder)
    return alone[bool(moe)]


@pytest.mark.parametrize("layout", [*LAYOUTS, *OF_EXPERTS])
def test_every_layout_records_the_numbers_of_one_process(fork_ranks, make_run, alone, layout):
    ranks, parallel = (LAYOUTS | OF_EXPERTS)[layout]
    moe = MOE if layout in OF_EXPERTS else None
    expected = reference(alone, fork_ranks, make_run, moe)
    folder = configured(make_run(log_every=2, keep=1), parallel, moe)
    fork_ranks(run_rank, ranks, folder)
    found = numbers(folder)
    assert list(expected["train/update_ratio"]) == list(expected["layers/0/grad_norm"]) == [2, 4]
    sent = {event["step"]: {**event["values"]} for event in read_events(folder.events, events.MEASURED)
            if "layers/0/grad_norm" in event["values"]}  # fmt: skip
    assert {name: {step: own[name] for step, own in sent.items()} for name in BY_LAYER} == {
        name: found[name] for name in BY_LAYER
    }
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-9), name


class Reference:
    """Plain references in one process: the nats of each micro-batch, which is one sequence, and the hidden states that
    blocks return, by step."""

    def __init__(self, run):
        self.run, self.nats, self.squares = run, {}, {}
        backward = run.program._execute["B"]

        def seen(action, step):
            before = step.loss
            backward(action, step)
            windows = run.loader.samples(step.batch.step)
            self.nats[int(windows[action.micro_batch]), step.batch.step] = float(step.loss - before)

        run.program._execute["B"] = seen
        for layer, block in run.model.stages[0].blocks.named_children():
            block.register_forward_hook(lambda _, __, output, layer=layer: self.look(layer, output))

    def look(self, layer, output):
        if torch.is_grad_enabled():  # in training
            self.squares.setdefault((layer, self.run.loader.next_step - 1), []).append(float(output.square().mean()))

    def loss(self, source, steps):
        """The mean loss of the sequences of a source; and the number of all sequences per step."""
        manifest, order = self.run.loader.manifest, self.run.loader.order
        of_source = [
            nats
            for (window, step), nats in self.nats.items()
            if step in steps and manifest.shards[int(order.locate(np.array([window]))[0][0])].source == source
        ]
        return np.mean(of_source) * self.run.config.train.global_batch if of_source else None


def with_reference(rank, ranks, folder):
    place = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, attempt=0, device=torch.device("cpu"))
    run = build_trainer(load_run(folder.config), folder, place, say=lambda line: None)
    (folder.root / "measure-layers").touch()
    seen, loop = Reference(run), RunLoop(run)
    try:
        for _ in range(5):
            batch = loop.next_batch()
            loop.judge(batch, train_step(run, batch, 1e-3))
            if loop.save_is_due:
                loop.save()
            loop.finish_step()
        loop.stop()
        loop.end()
    finally:
        run.close()
    losses = {source: [seen.loss(source, steps) for steps in ((1, 2, 3), (4, 5))] for source in ("metal", "stone")}
    return losses, {key: np.mean(squares) ** 0.5 for key, squares in seen.squares.items()}


def test_losses_of_sources_and_sizes_of_layers_are_those_of_plain_code(fork_ranks, make_run):
    """A program stops the run after step 5, between two log lines; the layers are measured in the step after the line
    that saw the request."""
    folder = make_run(log_every=3, every_steps=100)
    ((losses, sizes),) = fork_ranks(with_reference, 1, folder)
    for source, each in losses.items():
        found = values_of(folder, f"data/{source}/loss")
        assert found == pytest.approx({s: loss for s, loss in zip((3, 5), each, strict=True) if loss}, rel=1e-6)
    shares = [values_of(folder, f"data/{source}/share") for source in losses]
    assert {step: sum(one.get(step, 0.0) for one in shares) for step in (3, 5)} == {3: 1.0, 5: 1.0}
    for layer in range(2):
        found = values_of(folder, f"layers/{layer}/activation_rms")
        assert found == pytest.approx({4: sizes[str(layer), 4]}, rel=1e-5)
    norms = [values_of(folder, f"layers/{layer}/grad_norm")[4] for layer in (0, 1, "other")]
    assert np.linalg.norm(norms) == pytest.approx(values_of(folder, "train/grad_norm")[4], rel=1e-5)
    assert not (folder.root / "measure-layers").exists()
    assert list(values_of(folder, "memory/peak_bytes", 0)) == [3, 5]  # the line of the stop, too


def test_a_part_that_is_computed_once_more_counts_once(fork_ranks, make_run):
    """Every rank also computes the part of the other one, and in the first step its own part twice."""
    folder = make_run(dp_replicate=2, guard={"recompute_every": 1})
    plain = make_run("plain", dp_replicate=2)

    def count(rank, ranks, folder):
        phases, phase = [], StepTimes.phase
        StepTimes.phase = lambda times, name: phases.append(name) or phase(times, name)
        run_rank(rank, ranks, folder)
        return phases.count("forward"), phases.count("backward")

    accumulation = load_run(folder.config).accumulation
    assert fork_ranks(count, 2, folder) == [(12 * accumulation,) * 2] * 2
    fork_ranks(run_rank, 2, plain)
    for name in BY_SOURCE:
        assert values_of(folder, name) == values_of(plain, name)


def test_sources_add_no_column_to_the_numbers_of_every_rank(fork_ranks, make_run):
    """Only their sums are used, so their traffic does not grow with the number of ranks."""

    def widths(rank, ranks, folder, sources):
        seen, gather = set(), log.gather_from
        log.gather_from = lambda ranks, array: seen.add(len(array)) or gather(ranks, array)
        if not sources:
            record.recorded_sources = lambda manifest: ([], np.zeros(len(manifest.shards), np.int64))
        run_rank(rank, ranks, folder, 2)
        return seen

    ((with_sources,),) = fork_ranks(widths, 1, make_run(), True)
    ((without,),) = fork_ranks(widths, 1, make_run("without"), False)
    assert with_sources == without


def test_the_routes_of_experts_change_from_check_to_check(fork_ranks, make_run):
    """After a roll-back there is no check to compare with: the one before may be of void steps."""
    folder = make_run(guard={"sanity_every": 1}, every_steps=3)
    config = load_run(folder.config)
    folder.config.write_text(to_toml(replace(config, model=replace(config.model, moe=MOE))))
    fork_ranks(run_rank, 1, folder, None, {8: Verdict.ROLL_BACK})
    checks = [int(step) for one in read_series(folder.metrics, None, "eval/sanity_loss") for step in one.first]
    flips = values_of(folder, "experts/route_flips")
    sent = [event for event in read_events(folder.events, events.MEASURED) if "experts/route_flips" in event["values"]]
    assert {event["step"]: event["values"]["experts/route_flips"] for event in sent} == flips
    assert checks == [3, 6, 9, 12] and list(flips) == [6, 12] and 0 < max(flips.values()) < 1
