"""Compare mixtures: train the same small model on each, with equal tokens and several seeds, and rank the results.

A difference between two mixtures is meaningful only if it exceeds the difference between seeds. So every mixture is
trained with at least two seeds, and the ranking marks differences within that noise. Each training is a run in a folder
of its own: an interrupted one continues, a finished one is kept.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, variance

from ingot.config import to_dict, to_toml
from ingot.errors import ConfigError, RunFailed
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.storage import exclusive, write_atomic, write_json
from ingot.theory.rules import load_run
from ingot.trainer.mesh.start import stop
from ingot.trainer.run import run_rank

RESULT = "ablation.json"
# Two-sided 95% points of Student's t by degrees of freedom; between two of them the lower one is used.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
_T95 |= {12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980}
Progress = Callable[[float, str], None]
Weights = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class MixtureScore:
    """A mixture's result. bpb: held-out bits per byte, mean over the seeds; every source counts equally.

    by_seed: the bpb of each seed. behind: bpb minus that of the best mixture, a key of ablation.json.  # words: ok
    within_noise: the difference is at most the noise.
    """

    name: str
    weights: dict[str, float]
    bpb: float
    by_source: dict[str, float]
    by_seed: tuple[float, ...]
    behind: float  # words: ok
    within_noise: bool


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """The ranking. mixtures: best first. deviation: the pooled standard deviation of bpb between seeds of a mixture.

    noise: the difference between two mixtures' means that different seeds alone exceed in 5% of cases. tokens: the
    number of tokens of each training.
    """

    mixtures: tuple[MixtureScore, ...]
    seeds: tuple[int, ...]
    tokens: int
    deviation: float
    noise: float

    @property
    def verdict(self) -> str:
        """Return the result in one sentence."""
        best, *others = self.mixtures
        tied = [one.name for one in others if one.within_noise]
        if not tied:
            more = others[0].behind  # words: ok
            return f"{best.name} is best: the next one has {more:.4f} more, the noise is {self.noise:.4f}"
        return (
            f"{best.name} has the lowest mean, but {', '.join(tied)} {'is' if len(tied) == 1 else 'are'} within the "
            f"noise of {self.noise:.4f}: more seeds or longer runs would separate them"
        )


def ablate(
    config: RunConfig,
    mixtures: Mapping[str, Weights],
    folder: Path,
    *,
    seeds: Sequence[int] = (1, 2),
    progress: Progress | None = None,
) -> Ablation:
    """Train `config` once per mixture and seed in folder/NAME/seed-N, and compare the results on its held-out text.

    mixtures: name -> weights (data.weights). The result is also written as folder/ablation.json. After an interruption,
    the same call continues. Raises ConfigError for fewer than two mixtures or seeds, for a config without held-out
    text, and for a folder with other runs.
    """
    _check(config, mixtures, seeds)
    say, runs = progress or (lambda fraction, text: None), []
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder, f"ablating in {folder}"):
        wanted = [
            (name, seed, _prepared(config, folder, name, weights, seed))
            for name, weights in mixtures.items()
            for seed in seeds
        ]
        for number, (name, seed, run) in enumerate(wanted):
            say(number / len(wanted), f"{name}, seed {seed}")
            runs.append((name, _evaluated(run, config.train.steps)))
        by_name = {name: [found for other, found in runs if other == name] for name in mixtures}
        result = compare(mixtures, by_name, seeds, config.train.steps * config.tokens_per_step)
        write_json(folder / RESULT, to_dict(result))
    return result


def compare(
    mixtures: Mapping[str, Weights],
    scores: Mapping[str, Sequence[Mapping[str, float]]],
    seeds: Sequence[int],
    tokens: int,
) -> Ablation:
    """Rank mixtures. scores: name -> {source: bits per byte} for every seed.

    The noise is the two-sided 95% bound of Student's t for the difference of two means over n seeds, with the variance
    between seeds pooled over all mixtures. With many mixtures, chance differences exceed the noise more often than 5%.
    """
    by_seed = {name: [fmean(one.values()) for one in scores[name]] for name in mixtures}
    count = len(seeds)
    deviation = math.sqrt(fmean(variance(values) for values in by_seed.values()))
    noise = student_t95(len(by_seed) * (count - 1)) * deviation * math.sqrt(2 / count)
    best = min(fmean(values) for values in by_seed.values())
    compared = [
        MixtureScore(
            name=name,
            weights=dict(weights),
            bpb=fmean(by_seed[name]),
            by_source={source: fmean(one[source] for one in scores[name]) for source in scores[name][0]},
            by_seed=tuple(by_seed[name]),
            behind=fmean(by_seed[name]) - best,  # words: ok
            within_noise=fmean(by_seed[name]) - best <= noise,
        )
        for name, weights in mixtures.items()
    ]
    ranked = tuple(sorted(compared, key=lambda one: one.bpb))
    return Ablation(mixtures=ranked, seeds=tuple(seeds), tokens=tokens, deviation=deviation, noise=noise)


def student_t95(degrees: int) -> float:
    """Return the two-sided 95% point of Student's t for `degrees` of freedom; between two table rows, the larger."""
    return _T95[max(listed for listed in _T95 if listed <= degrees)]


def _check(config: RunConfig, mixtures: Mapping[str, Weights], seeds: Sequence[int]) -> None:
    if len(mixtures) < 2:
        raise ConfigError(
            "E-MIXTURE-COUNT",
            f"the number of mixtures to compare is {len(mixtures)}",
            rule="at least two mixtures are compared",
            fix="name more mixtures",
            mixtures=len(mixtures),
        )
    if len(set(seeds)) < 2 or len(set(seeds)) < len(seeds):
        raise ConfigError(
            "E-SEEDS",
            f"the seeds are {list(seeds)}",
            rule="at least two seeds are needed, each once: a single seed does not show how large the noise is",
            fix="pass two or more different seeds",
            seeds=list(seeds),
        )
    if not config.data.heldout:
        raise ConfigError(
            "E-HELDOUT-UNSET",
            "the run names no data.heldout",
            rule="mixtures are compared on text that no model was trained on",
            fix="build the tokens with ingot data build, which writes held-out tokens",
            key="data.heldout",
        )


def _prepared(config: RunConfig, folder: Path, name: str, weights: Weights, seed: int) -> RunFolder:
    run = RunFolder(folder / name / f"seed-{seed}")
    data = replace(config.data, weights=dict(weights))
    wanted = replace(config, name=f"{name}-seed-{seed}", seed=seed, data=data)
    if run.config.exists() and load_run(run.config) != wanted:
        raise ConfigError(
            "E-ABLATION-FOLDER",
            f"{run.root} contains another run",
            rule="compared trainings differ only in mixture and seed",
            fix="use another folder (--out DIR), or remove this folder",
            run=str(run.root),
        )
    if not run.config.exists():
        write_atomic(run.config, to_toml(wanted))
    return run


def _evaluated(run: RunFolder, steps: int) -> dict[str, float]:
    """Return bits per byte by held-out source after the last step of `run`; train it first if necessary."""
    if not any(True for _ in read_events(run.events, events.FINISHED)):
        try:
            run_rank(run)
        finally:
            stop()  # also after a failure: the next training starts a job of its own
    scores = [e["by_source"] for e in read_events(run.events, events.EVALUATION) if e["step"] == steps]
    if not scores:
        raise RunFailed(
            "E-RUN-NO-EVALUATION",
            f"{run.root} ended without an evaluation",
            rule="a run is scored after its last step",
            fix=f"remove {run.root}, then run the same command again",
            run=str(run.root),
        )
    return {source: score["bpb"] for source, score in scores[-1].items()}
