"""False verdicts on healthy runs of two ranks with everything that judges them switched on, as a user gets it.

The preset and all figures of [guard] are the defaults: spikes are skipped, and weights, optimizer state and saves are
hashed. In one of eight steps, gradients are computed twice (guard.recompute_every = 8, which is off by default). Full
saves come every 100 steps, saves of the weights alone every 50, so that hashes at saves and the held-out batch are
counted often enough. Runs with an even seed are DDP, the others ZeRO-1.

Any of these is a false verdict: a finding, an alert, a measure, a skipped or passed step, damage of state or gradients,
a roll-back, a save that failed, a suspect checkpoint. One more run, the trace, has a warm-up of a tenth of its steps,
and its data change in the middle, from one source to equal parts of all. The run accepts that, so the guard begins a
new window. The second half is trained twice: the other time the guard keeps its window (kept_window.py), as it would if
nobody had announced the change. What it finds then is not false: it shows how large the change is.

    ingot quickstart --dir demo
    python benchmarks/guard_defaults.py --tokens demo/data/tokens [--steps 2000] [--seeds 5] [--first-seed 11]
"""

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from guard import run_of
from record import record

from ingot import train
from ingot.config import to_toml
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.guard import Guard
from ingot.schema.parallel import Parallel
from ingot.schema.run import Checkpoint, RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import read_token_manifest
from ingot.trainer.checkpoint.manifest import candidate_folders, verify_checkpoint

RECOMPUTE, FULL, WEIGHTS = 8, 100, 50
_VERDICTS = (
    *(events.FINDING, events.ALERT, events.GUARD, events.SKIPPED, events.PASSED, events.ROLLED_BACK),
    *(events.STATE_DAMAGED, events.CHECKPOINT_FAILED, events.CHECKPOINT_REFUSED),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="folder with train and heldout, of real text")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=11)
    parser.add_argument("--healthy-steps", type=int, default=2000, help="of the runs without a change")
    parser.add_argument("--parts", default="trace,healthy", help="one of them, or both")
    args = parser.parse_args()
    tokens, parts = args.tokens.resolve(), args.parts.split(",")
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    found: dict[str, object] = {}
    if "trace" in parts:
        found |= changing(defaults(tokens, args.steps, seeds.stop, warmup=args.steps // 10))
    if "healthy" in parts:
        found["healthy runs"] = {
            seed: trained(defaults(tokens, args.healthy_steps, seed), f"seed {seed}") for seed in seeds
        }
    record("guard_defaults", found, ["torch"])


def defaults(tokens: Path, steps: int, seed: int, *, warmup: int = 50) -> RunConfig:
    """Return the run of a small model on two ranks, with all guards."""
    run = run_of(tokens / "train", steps, seed, warmup=warmup)
    return replace(
        run,
        data=replace(run.data, heldout=str(tokens / "heldout")),
        train=replace(run.train, micro_batch=run.train.global_batch // 2),
        parallel=Parallel(dp_shard=2) if seed % 2 else Parallel(dp_replicate=2),
        checkpoint=Checkpoint(every_steps=FULL, weights_every=f"{WEIGHTS} steps"),
        guard=Guard(recompute_every=RECOMPUTE),
    )


def trained(run: RunConfig, name: str) -> dict[str, object]:
    """Train `run`, print and return what was checked, and every verdict."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "run.toml", RunFolder(Path(folder) / "run")
        file.write_text(to_toml(run))
        train(file, out.root)
        return judged(out, run, name)


def changing(run: RunConfig) -> dict[str, dict[str, object]]:
    """Train the first half of `run` on its first source alone, and the rest on equal parts of all: with the new window
    that an accepted change begins, and with the window of before."""
    sources, found = read_token_manifest(Path(run.data.tokens)).sources, {}
    equal = [f"data.weights.{source}={1 / len(sources)}" for source in sources]
    kept = (f"plugins.modules={['kept_window']}", f'plugins.folder="{Path(__file__).parent}"')
    with tempfile.TemporaryDirectory() as folder:
        file, half = Path(folder) / "run.toml", Path(folder) / "half"
        file.write_text(to_toml(run))
        train(file, half, overrides=[f"data.weights.{sources[0]}=1.0"], until_step=run.train.steps // 2)
        for name, plugin in (("a new window", ()), ("the window of before", kept)):
            out = RunFolder(Path(folder) / name.replace(" ", "-"))
            shutil.copytree(half, out.root)
            train(file, out.root, overrides=[*equal, *plugin], accept=["data.weights", "plugins.code"])
            title = f"with warm-up and another mixture, {name}"
            found[title] = judged(out, run, title)
    return found


def judged(out: RunFolder, run: RunConfig, name: str) -> dict[str, object]:
    """Print and return how often each guard looked, and every verdict."""
    log = list(read_events(out.events))
    doubted = [{"suspect": step.name} for step in candidate_folders(out.checkpoints) if not _is_sound(step)]
    found: dict[str, object] = checked(log, run) | {"false verdicts": [*_false(log), *doubted]}
    print(name, found, flush=True)
    return found


def checked(log: Iterable[dict], run: RunConfig) -> dict[str, int]:
    """Return how often each guard looked."""
    counts = Counter(event["kind"] for event in log)
    return {
        "steps": counts[events.STEP],
        "steps with hashes": run.train.steps // run.guard.hash_every,
        "steps computed twice": run.train.steps // run.guard.recompute_every,
        "full saves": counts[events.CHECKPOINT],
        "saves of the weights": counts[events.WEIGHTS_SAVED],
        "held-out batches": counts[events.SANITY],
    }


def _false(log: Iterable[dict]) -> list[dict]:
    bad = [event for event in log if event["kind"] in _VERDICTS or event.get("suspect")]
    return [{key: value for key, value in event.items() if key not in ("time", "host")} for event in bad]


def _is_sound(folder: Path) -> bool:
    return verify_checkpoint(folder).health.state == "healthy"


if __name__ == "__main__":
    main()
