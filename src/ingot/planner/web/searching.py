"""The page's search for the best layouts. It runs in its own process, which is stopped at a deadline or if the request
is closed.

python -m ingot.planner.web.searching QUERY [KEEP ...]     prints the result for the page as JSON
"""

import json
import sys
from dataclasses import asdict, replace
from urllib.parse import parse_qsl, urlencode

import anyio

from ingot.errors import ConfigError, IngotError, UsageError
from ingot.planner.search.search import Candidate, Found, search
from ingot.planner.show.layout import layout_text, settings_text
from ingot.planner.web.answers import cluster_of, run_of, settled, software_of
from ingot.planner.web.settings import KEEPABLE, LAYOUT, PageSettings, link_pairs, read_settings
from ingot.theory.layout import resolve_parallel
from ingot.units import format_bytes, format_seconds

DEADLINE_SECONDS = 45.0
_SHOWN = 6


def read_keep(text: str) -> tuple[str, ...]:
    """Parse the names of settings to keep, like 'tp,pp'. Raises UsageError for a setting that is not in KEEPABLE."""
    kept = tuple(text.split(",")) if text else ()
    if other := [key for key in kept if key not in KEEPABLE]:
        raise UsageError(
            "E-SEARCH-KEEP",
            f"a search cannot keep {other[0][:20]!r}",
            rule=f"a search can keep {', '.join(KEEPABLE)}",
            fix="name only these, like keep=tp,pp",
            setting=other[0][:20],
        )
    return kept


async def best_layouts(
    settings: PageSettings, keep: tuple[str, ...] = (), deadline_seconds: float | None = None
) -> dict:
    """Return the best layouts for the settings of a link. keep: settings of KEEPABLE that the search must not change.
    deadline_seconds: None means DEADLINE_SECONDS.

    Raises ConfigError for an error in the search, or if the search does not end before the deadline.
    """
    deadline_seconds = DEADLINE_SECONDS if deadline_seconds is None else deadline_seconds
    command = [sys.executable, "-m", __name__, urlencode(link_pairs(settings)), *keep]
    try:
        with anyio.fail_after(deadline_seconds):
            done = await anyio.run_process(command, check=False)
    except TimeoutError:
        raise ConfigError(
            "E-SEARCH-DEADLINE",
            f"the search took more than {deadline_seconds:g} s and was stopped",
            rule=f"a search of the page takes at most {deadline_seconds:g} s",
            fix="use fewer devices, or `ingot plan`, which has no limit",
            deadline_seconds=deadline_seconds,
        ) from None
    if done.returncode:
        sys.stderr.write(done.stderr.decode(errors="replace"))
        raise ConfigError(
            "E-SEARCH-FAILED",
            f"the process of the search ended with status {done.returncode}",
            rule="the process of a search ends with status 0",
            fix="look at the terminal of `ingot plan --web`, which shows its traceback",
            status=done.returncode,
        )
    answer = json.loads(done.stdout)
    if "refused" in answer:
        code, found, rule, fix = answer["refused"]
        raise ConfigError(code, found, rule=rule, fix=fix)
    return answer


def main(query: str, *keep: str) -> dict:
    """Search for the best layouts and return the result for the page. This runs in the new process. query: the page's
    link. keep: settings to keep. Errors are returned as {"refused": [code, found, rule, fix]}."""
    try:
        asked = read_settings(parse_qsl(query))
        settings = settled(asked)
        run, _ = run_of(settings)
        pinned = {key: getattr(settings, key) for key in keep}
        cluster, software = cluster_of(settings.cluster), software_of(settings)
        return _shown(asked, search(run, cluster, software, pinned=pinned, limit=_SHOWN))
    except IngotError as error:
        return {"refused": [error.code, error.found, error.rule, error.fix]}


def _shown(settings: PageSettings, found: Found) -> dict:
    return {
        "best": [_candidate(settings, candidate) for candidate in found.best],
        "considered": f"{found.considered:,} layouts compared, {found.fitting:,} fit, {format_seconds(found.seconds)}",
        "nearest": _candidate(settings, found.nearest) if found.nearest else None,
        "fix": found.fix,
    }


def _candidate(settings: PageSettings, candidate: Candidate) -> dict:
    run = candidate.run
    return {
        "layout": layout_text(run),
        "rest": settings_text(run),
        "step": format_seconds(candidate.step_seconds) if candidate.step_seconds else "unknown",
        "memory": format_bytes(candidate.memory_bytes),
        "mfu": f"{candidate.mfu:.1%}" if candidate.mfu and not settings.params else "",
        "bubble": f"{candidate.bubble:.1%}" if run.parallel.pp > 1 else "",
        "words": link_pairs(settings_of_candidate(settings, candidate)),
    }


def settings_of_candidate(settings: PageSettings, candidate: Candidate) -> PageSettings:
    """Return the page's settings with the layout of a candidate of the search."""
    parallel = candidate.run.parallel
    resolved = resolve_parallel(candidate.run)
    layout = {key: value for key, value in asdict(parallel).items() if key in LAYOUT}
    layout["offload"] = "all" if parallel.offload_parameters else parallel.offload
    if parallel.schedule not in ("interleaved", "looped_bfs", "interleaved_zb"):
        layout["stages_per_rank"] = 0
    return replace(settings, **layout | {"zero": resolved.zero, "micro_batch": candidate.run.train.micro_batch})


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
