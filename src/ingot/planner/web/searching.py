"""The best layouts of a model on a cluster, found in a process of their own: it is stopped when it takes too long or
when nobody waits for it any more.

    python -m ingot.planner.web.searching QUERY [KEEP ...]     prints what the page shows, as JSON
"""

import json
import sys
from dataclasses import asdict, replace
from urllib.parse import parse_qsl, urlencode

import anyio

from ingot.errors import ConfigError, IngotError, UsageError
from ingot.planner.search.search import Candidate, Found, search
from ingot.planner.web.answers import cluster_of, run_of, settled, software_of
from ingot.planner.web.state import LAYOUT, State, read_state, words
from ingot.planner.web.views import layout_words
from ingot.schema.run import RunConfig
from ingot.theory.layout import resolve_parallel
from ingot.units import format_bytes, format_seconds

DEADLINE_SECONDS = 45.0
# Settings that a search can leave as they are, where the user wants it.
KEEPABLE = ("tp", "pp", "cp", "ep", "dp_replicate", "micro_batch", "zero", "recompute", "schedule")
_SHOWN = 6


def read_keep(text: str) -> tuple[str, ...]:
    """'tp,pp' -> ("tp", "pp"). Raises UsageError."""
    kept = tuple(text.split(",")) if text else ()
    if other := [key for key in kept if key not in KEEPABLE]:
        raise UsageError(f"a search cannot keep {other[0][:20]!r}", rule=f"it can keep {', '.join(KEEPABLE)}")
    return kept


async def best_layouts(state: State, keep: tuple[str, ...] = (), deadline_seconds: float = DEADLINE_SECONDS) -> dict:
    """For the settings of a link. keep: those of KEEPABLE that stay. Raises ConfigError when the search finds an error,
    or does not end in time."""
    command = [sys.executable, "-m", __name__, urlencode(words(state)), *keep]
    try:
        with anyio.fail_after(deadline_seconds):
            done = await anyio.run_process(command, check=False)
    except TimeoutError:
        raise ConfigError(
            f"the search took more than {deadline_seconds:g} s and was stopped",
            rule="the page waits so long",
            fix="fewer devices, or `ingot plan`, which has no limit",
        ) from None
    if done.returncode:
        sys.stderr.write(done.stderr.decode(errors="replace"))
        raise ConfigError("the search failed; the terminal of `ingot plan --web` shows where")
    answer = json.loads(done.stdout)
    if "refused" in answer:
        found, rule, fix = answer["refused"]
        raise ConfigError(found, rule=rule, fix=fix)
    return answer


def main(query: str, *keep: str) -> dict:
    """In the other process; what is refused comes back as a value."""
    try:
        asked = read_state(parse_qsl(query))
        state = settled(asked)
        run, _ = run_of(state)
        pinned = {key: getattr(state, key) for key in keep}
        return _shown(asked, search(run, cluster_of(state.cluster), software_of(state), pinned=pinned, limit=_SHOWN))
    except IngotError as error:
        return {"refused": [error.found, error.rule, error.fix]}


def _shown(state: State, found: Found) -> dict:
    return {
        "best": [_candidate(state, candidate) for candidate in found.best],
        "considered": f"{found.considered:,} layouts compared, {found.fitting:,} fit, {format_seconds(found.seconds)}",
        "nearest": _candidate(state, found.nearest) if found.nearest else None,
        "fix": found.fix,
    }


def _candidate(state: State, candidate: Candidate) -> dict:
    run = candidate.run
    return {
        "layout": layout_words(run),
        "rest": _rest(run),
        "step": format_seconds(candidate.step_seconds) if candidate.step_seconds else "unknown",
        "memory": format_bytes(candidate.memory_bytes),
        "mfu": f"{candidate.mfu:.1%}" if candidate.mfu and not state.params else "",
        "bubble": f"{candidate.bubble:.1%}" if run.parallel.pp > 1 else "",
        "words": words(state_of(state, candidate)),
    }


def _rest(run: RunConfig) -> str:
    parallel = resolve_parallel(run)
    parts = [f"micro-batch {run.train.micro_batch}", f"zero {parallel.zero}"]
    parts += [f"recompute {parallel.recompute}"] if parallel.recompute != "none" else []
    parts += [parallel.schedule] if parallel.pp > 1 else []
    parts += [f"{parallel.stages_on_each_rank} stages per rank"] if parallel.stages_on_each_rank > 1 else []
    parts += [f"offload {parallel.offload}"] if parallel.offload != "none" else []
    parts += ["parameters too"] if parallel.offload_parameters else []
    return ", ".join(parts)


def state_of(state: State, candidate: Candidate) -> State:
    """The settings of a link with the layout of a candidate."""
    parallel = candidate.run.parallel
    resolved = resolve_parallel(candidate.run)
    layout = {key: value for key, value in asdict(parallel).items() if key in LAYOUT}
    layout["offload"] = "all" if parallel.offload_parameters else parallel.offload
    if parallel.schedule not in ("interleaved", "looped_bfs", "interleaved_zb"):
        layout["stages_per_rank"] = 0
    return replace(state, **layout | {"zero": resolved.zero, "micro_batch": candidate.run.train.micro_batch})


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
