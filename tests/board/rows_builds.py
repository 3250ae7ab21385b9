"""Rows of data builds: killed processes, and other numbers of workers, write the same bytes."""

from tests.e2e.test_data_faults import problem_of_kills, snapshot, start, write_crawl

from ingot.drill.oracles import Verdicts

from .bench import Bench
from .row import Row, random_of

_KILLS = 10  # per seed
_WORKERS = (1, 2, 4)
_SECONDS = 300.0


def rd1(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Kill the driver or a worker of a build at random instants; after a driver, give the same command again."""
    root = bench.root / f"data-kills-{seed}"
    root.mkdir()
    verdicts.judge("o2", f"{_KILLS} kills", problem_of_kills(root, random_of("RD1", seed), _KILLS))
    bench.drop(root.name)


def rd3(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Build the same crawl with half and with twice the workers."""
    root = bench.root / f"data-workers-{seed}"
    root.mkdir()
    crawl = write_crawl(root)
    for workers in _WORKERS:
        code = start(crawl, root / f"workers-{workers}", workers).wait(_SECONDS)
        verdicts.judge("o6", f"{workers} workers", "" if code == 0 else f"exit code {code}")
    first, *others = (snapshot(root / f"workers-{workers}") for workers in _WORKERS)
    names = {name for one in (first, *others) for name in one}
    differ = sorted(name for name in names if any(other.get(name) != first.get(name) for other in others))
    verdicts.judge("o2", f"{_WORKERS} workers", f"{differ[0]} has other bytes" if differ else "")
    bench.drop(root.name)


ROWS = (
    Row("RD1", "SIGKILL of processes of a data build at random instants, ten per seed", rd1),
    Row("RD3", "a data build with half and with twice the workers", rd3),
)
