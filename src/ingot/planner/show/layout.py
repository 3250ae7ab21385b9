"""Layouts as text. Every command, page and report prints layouts with these functions."""

from collections.abc import Mapping

from ingot.schema.run import RunConfig
from ingot.theory.layout import resolve_parallel

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def degrees_text(degrees: Mapping[str, object]) -> str:
    """Return {"dp_shard": 4, "cp": 2, "ep": 2, "context": "ring"} as "dp_shard 4 x cp 2 (ring), ep 2".

    ep is not an axis of the mesh: its groups consist of ranks of the other axes. Axes of size 1 are omitted, unless the
    only axis has size 1.
    """
    axes = {axis: size for axis, size in degrees.items() if axis not in ("ep", "context")}
    form = {"cp": f" ({degrees['context']})"} if "context" in degrees else {}
    divided = [f"{axis} {size}{form.get(axis, '')}" for axis, size in axes.items() if size != 1 or len(axes) == 1]
    return " x ".join(divided) + (f", ep {degrees['ep']}" if "ep" in degrees else "")


def layout_text(run: RunConfig) -> str:
    """Return the degrees of a run's layout, like "pp 4 x dp_shard 8 x tp 4, ep 8", or "one rank" if all are 1."""
    parallel = resolve_parallel(run)
    degrees: dict[str, object] = {axis: getattr(parallel, axis) for axis in _AXES}
    degrees |= {"context": parallel.context_form} if parallel.cp > 1 else {}
    return degrees_text(degrees | ({"ep": parallel.ep} if parallel.ep > 1 else {})) or "one rank"


def settings_text(run: RunConfig) -> str:
    """Return the settings of a run's layout, without its degrees: "1f1b x2, zero 1, micro-batch 1, recompute full"."""
    parallel = resolve_parallel(run)
    each = parallel.stages_on_each_rank
    words = [parallel.schedule + (f" x{each}" if each > 1 else "")] if parallel.pp > 1 else []
    words += [f"zero {parallel.zero}"] if parallel.shard_ranks > 1 else []
    words.append(f"micro-batch {run.train.micro_batch}")
    words += [f"recompute {parallel.recompute}"] if parallel.recompute != "none" else []
    words += [f"offload {parallel.offload}"] if parallel.offload != "none" else []
    words += ["parameters offloaded"] if parallel.offload_parameters else []
    return ", ".join(words)
