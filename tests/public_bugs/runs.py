"""Runs of the board's bench with a plug-in that plants a bug."""

import shutil
from pathlib import Path

from tests.board.bench import Bench
from tests.board.row import judge_recovered

from ingot.drill.oracles import Verdicts

DAY = 86_400.0
WATCHDOG = 3.0  # seconds


def planted(bench: Bench, plug_in: str) -> tuple[str, ...]:
    """Return the settings of a run with a plug-in of tests/, which it finds beside its run file, and with a timeout of
    groups that ends nothing."""
    name = Path(plug_in).stem
    (bench.root / "lab").mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).parents[1] / plug_in, bench.root / "lab" / f"{name}.py")
    own = (f'plugins.modules=["{name}"]', 'plugins.folder="lab"', f"callbacks.{name.removeprefix('planted_')}={{}}")
    return (f"launch.watchdog_seconds={WATCHDOG}", f"launch.timeout_seconds={DAY}", *own)


def require_recovered(bench: Bench, name: str, settings: tuple[str, ...]) -> None:
    verdicts = Verdicts()
    judge_recovered(bench, verdicts, name, name, bench.reference(*settings))
    assert verdicts.asked and not any(verdicts.wrong.values()), verdicts.wrong
