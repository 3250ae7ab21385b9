"""One rank of a training job, started by torchrun: `python -m ingot.trainer.main RUN_FOLDER [--until-step N]`.

Exit codes: 0 finished, 10 stopped on request (or past --until-step) with everything saved, else the error's own.
"""

import argparse
import os
import sys
from pathlib import Path

from ingot.errors import EXIT_OK, EXIT_PREEMPTED, IngotError
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import load_run
from ingot.trainer.mesh.start import start, stop
from ingot.trainer.resilience.rank import guarded


def run_rank(folder: RunFolder, until_step: int | None, quiet: bool) -> int:
    """Train the run in `folder` as the rank that the environment names. Returns the exit code."""
    from ingot.trainer.build import build
    from ingot.trainer.loop import train

    config = load_run(folder.config)
    place = start(config.train.device, config.launch.timeout_seconds, tf32=config.train.tf32)
    run = build(config, folder, place, until_step=until_step, say=_say_nothing if quiet else _say)
    try:
        ending = train(run)
    finally:
        run.loader.close()
        run.optimizer.close()
    stop()
    return EXIT_PREEMPTED if ending.stopped else EXIT_OK


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:
        # Whoever read the lines is gone (`| head`, a closed terminal); training does not end for that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_nothing(text: str) -> None:
    """--quiet."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ingot.trainer.main", description=__doc__)
    parser.add_argument("run_folder", type=Path, help="holds the resolved run.toml; everything is written here")
    parser.add_argument("--until-step", type=int, help="save and stop there (default: the run's last step)")
    parser.add_argument("--quiet", action="store_true", help="print no progress lines")
    args = parser.parse_args(argv)
    folder = RunFolder(args.run_folder)
    try:
        with guarded(folder, int(os.environ.get("RANK", 0))):
            return run_rank(folder, args.until_step, args.quiet)
    except IngotError as error:
        print(f"{error.code}: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
