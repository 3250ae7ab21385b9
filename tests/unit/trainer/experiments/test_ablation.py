import json
import math
import multiprocessing
import statistics
import traceback

import pytest
from tests.expect import refused

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import read_token_manifest
from ingot.theory.rules import load_run
from ingot.trainer.experiments.ablation import ablate, compare, student_t95
from ingot.trainer.experiments.proxy import proxy_run

MIXTURES = {"metal": {"metal": 1.0}, "both": {"metal": 1.0, "stone": 1.0}}


def config(token_folders, **changes):
    return proxy_run(
        token_folders / "train",
        read_token_manifest(token_folders / "train"),
        heldout=token_folders / "heldout",
        tokenizer=token_folders / "tokenizer.json",
        **{"steps": 6, "width": 32, "layers": 1, "seq_len": 16, "global_batch": 4} | changes,
    )


def forked(function):
    """`function()` in a process of its own: a training joins a job of one process, and sets threads."""

    def run(pipe):
        try:
            pipe.send((True, function()))
        except BaseException:
            pipe.send((False, traceback.format_exc()))

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(theirs,))
    process.start()
    theirs.close()
    ok, value = ours.recv()
    process.join()
    assert ok, value
    return value


def test_every_mixture_is_trained_with_every_seed_and_ranked(token_folders, tmp_path):
    """The ablation is interrupted once, and repeated when it is finished: nothing is trained twice."""
    reported = []

    def interrupted():
        def stop(_, what):
            if what == "both, seed 1":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ablate(config(token_folders), MIXTURES, tmp_path, progress=stop)

    forked(interrupted)
    assert not (tmp_path / "ablation.json").exists()
    found, reported = forked(
        lambda: (
            ablate(config(token_folders), MIXTURES, tmp_path, progress=lambda _, what: reported.append(what)),
            reported,
        )
    )
    assert reported == ["metal, seed 1", "metal, seed 2", "both, seed 1", "both, seed 2"]
    assert {one.name for one in found.mixtures} == {"metal", "both"} and found.tokens == 6 * 4 * 16
    best, other = found.mixtures
    assert best.bpb < other.bpb and best.behind == 0  # words: ok
    assert other.behind == pytest.approx(other.bpb - best.bpb)  # words: ok
    assert set(best.by_source) == {"metal", "stone"} and len(best.by_seed) == 2 and found.noise > 0
    runs = {(n, s): RunFolder(tmp_path / n / f"seed-{s}") for n in MIXTURES for s in (1, 2)}
    for (name, seed), run in runs.items():
        own = load_run(run.config)
        assert own.data.weights == MIXTURES[name] and own.seed == seed
    assert json.loads((tmp_path / "ablation.json").read_text())["noise"] == found.noise

    again = forked(lambda: ablate(config(token_folders), MIXTURES, tmp_path))
    assert again == found
    for run in runs.values():  # nothing was trained again
        assert len(list(read_events(run.events, events.RUN_STARTED))) == 1
    with refused("E-ABLATION-FOLDER"):
        ablate(config(token_folders, steps=7), MIXTURES, tmp_path)


def scores(*values: float) -> list[dict[str, float]]:
    return [{"a": value - 0.1, "b": value + 0.1} for value in values]


def test_a_difference_counts_when_seeds_do_not_make_it():
    mixes = {"x": {"a": 1.0}, "y": {"b": 1.0}, "z": {"a": 2.0, "b": 1.0}}
    found = compare(mixes, {"x": scores(1.50, 1.52), "y": scores(1.20, 1.22), "z": scores(1.21, 1.23)}, (1, 2), 10)
    assert [one.name for one in found.mixtures] == ["y", "z", "x"]
    assert [one.within_noise for one in found.mixtures] == [True, True, False]
    deviation = math.sqrt(statistics.fmean(statistics.variance(v) for v in ((1.5, 1.52), (1.2, 1.22), (1.21, 1.23))))
    assert found.deviation == pytest.approx(deviation)
    assert found.noise == pytest.approx(3.182 * deviation)  # 3 degrees of freedom, sqrt(2 / 2)
    assert found.verdict.startswith("y has the lowest mean, but z is within the noise")
    assert found.mixtures[0].by_source == pytest.approx({"a": 1.11, "b": 1.31})
    clear = compare({"x": {}, "y": {}}, {"x": scores(2.0, 2.001), "y": scores(1.0, 1.001)}, (1, 2), 10)
    assert clear.verdict.startswith("y is best: the next one has 1.0000 more")


def test_students_t():
    assert (student_t95(1), student_t95(2), student_t95(11), student_t95(1000)) == (12.706, 4.303, 2.228, 1.980)


def test_what_cannot_be_compared_is_refused(token_folders, tmp_path):
    run = config(token_folders)
    with refused("E-MIXTURE-COUNT", mixtures=1):
        ablate(run, {"metal": {"metal": 1.0}}, tmp_path)
    with refused("E-SEEDS", seeds=[1]):
        ablate(run, MIXTURES, tmp_path, seeds=(1,))
    with refused("E-SEEDS", seeds=[1, 1]):
        ablate(run, MIXTURES, tmp_path, seeds=(1, 1))
    manifest = read_token_manifest(token_folders / "train")
    with refused("E-HELDOUT-UNSET", key="data.heldout"):
        ablate(proxy_run(token_folders / "train", manifest, steps=2), MIXTURES, tmp_path)
