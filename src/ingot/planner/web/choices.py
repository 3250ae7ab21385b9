"""The controls of the page with their legal values, single changes that make a plan fit, and the lists to pick from.

Each value is tried as if the user had set it: other settings are adapted (answers.py), then the layout rules decide.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache

from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.planner.predict.time.step_time import step_seconds
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model, model_names
from ingot.planner.web.answers import (
    PagePlan,
    cluster_of,
    data_ranks,
    model_of,
    problems_of,
    run_of,
    settle,
    software_of,
)
from ingot.planner.web.settings import KEEPABLE, WORDS, PageSettings, link_pairs
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import TWO_STAGES, V_SHAPED
from ingot.schema.run import RunConfig
from ingot.schema.software import Software
from ingot.theory.devices import devices
from ingot.theory.params import count_active_parameters, count_parameters
from ingot.theory.rules.nearest import divisors
from ingot.units import format_bytes, format_count, format_seconds

# The most values of one control; a slider with more would be hard to set.
_MOST = 14
_MOST_REASONS = 3
_SHOWN_FIXES = 3
_CLUSTERS = {
    "rtx4090": "one 24 GB card",
    "8xh100": "one node",
    "16x8xh100": "16 nodes",
    "128x8xh100": "128 nodes",
    "2048x8xh100": "2,048 nodes",
    "72xgb200": "one NVL72 rack",
    "16x72xgb200": "16 racks",
    "64x8xmi300x": "64 nodes",
    "v5p-256": "a slice, planning only",
}
LABELS = {
    "tp": "tensor parallel",
    "pp": "pipeline",
    "cp": "context parallel",
    "ep": "expert parallel",
    "dp_replicate": "copies of the model",
    "micro_batch": "micro-batch",
    "zero": "ZeRO",
    "recompute": "recompute",
    "schedule": "schedule",
    "stages_per_rank": "stages per rank",
    "context": "form of context parallelism",
    "offload": "optimizer state",
    "recipe": "products in",
}
_RECOMPUTE = {"none": "nothing", "selective": "all but products and attention", "full": "whole blocks"}
_ZERO = {1: "1: optimizer state", 2: "2: and gradients", 3: "3: and parameters (FSDP)"}
_OFFLOAD = {
    "none": "on the device",
    "cpu": "in the host's memory",
    "all": "in the host's memory, parameters too (ZeRO 3)",
}
_CONTEXT = {"auto": "best for the links", "ring": "ring", "ulysses": "Ulysses", "usp": "USP, a grid of both"}
_RECIPE = {
    "": "16 bits (bf16)",
    "tensorwise": "FP8, a scale per tensor",
    "rowwise": "FP8, a scale per row",
    "blockwise": "FP8, a scale per block of 128",
    "mxfp8": "MXFP8, a scale per 32",
    "nvfp4": "NVFP4, a scale per 16",
}
_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "looped_bfs": "looped BFS",
    "zb_h1": "ZB-H1",
    "interleaved_zb": "interleaved, zero bubble",
    "zb_v": "ZB-V",
    "dualpipe_v": "DualPipeV",
}


@dataclass(frozen=True)
class ControlValue:
    """A value of a control. why: the reason why it is illegal, "" if it is legal."""

    value: int | str
    label: str
    why: str = ""


@dataclass(frozen=True)
class Control:
    """A control of the page. choices: the values to choose from. refused: illegal values with their reasons, as text.
    idle: why the control has no effect, "" if it has one."""

    choices: tuple[ControlValue, ...]
    refused: tuple[str, ...] = ()
    idle: str = ""


def controls(settings: PageSettings) -> dict[str, Control]:
    """Return the controls of the page by the name of the setting. settings: the result of `answers.settled`."""
    arch, cluster = model_of(settings).arch, cluster_of(settings.cluster)
    found = {}
    for key, (values, labels) in _candidates(settings, arch, cluster).items():
        tried = [
            ControlValue(v, labels.get(v, f"{v:,}" if isinstance(v, int) else v), _why_not(settings, key, v))
            for v in values
        ]
        if key in WORDS or key == "zero":
            found[key] = Control(tuple(tried), idle=_idle(settings, arch, key))
            continue
        legal = tuple(choice for choice in tried if not choice.why)
        refused = [f"{choice.value}: {choice.why}" for choice in tried if choice.why]
        found[key] = Control(legal, tuple(refused[:_MOST_REASONS]), _idle(settings, arch, key))
    return found


def as_json(found: dict[str, Control]) -> dict:
    return {key: asdict(control) for key, control in found.items()}


def steps_away(settings: PageSettings) -> Iterable[tuple[str, int | str, PageSettings]]:
    """Yield (key, value, settings) for each legal change of one control: the setting `key` gets `value`, and the other
    settings are adapted to it. settings: the result of `answers.settled`."""
    arch, cluster = model_of(settings).arch, cluster_of(settings.cluster)
    for key, control in controls(settings).items():
        for choice in control.choices:
            if not choice.why and choice.value != getattr(settings, key):
                yield key, choice.value, settle(replace(settings, **{key: choice.value}), arch, cluster, key)


def setting_text(key: str, value: int | str) -> str:
    """Return a setting and its value as text, like "tensor parallel 8"."""
    if key == "recipe":
        return _RECIPE[str(value)]
    named = {"zero": _ZERO, "recompute": _RECOMPUTE, "schedule": _SCHEDULES, "offload": _OFFLOAD, "context": _CONTEXT}
    return f"{LABELS[key]} {named.get(key, {}).get(value, value)}"


def _why_not(settings: PageSettings, key: str, value: int | str) -> str:
    cluster = cluster_of(settings.cluster)
    moved = settle(replace(settings, **{key: value}), model_of(settings).arch, cluster, key)
    if getattr(moved, key) != value:
        return _needs(key, value)
    return next((message for _, message in problems_of(moved, run_of(moved)[0])), "")


def _needs(key: str, value: int | str) -> str:
    """Return the reason why the page cannot use `value` for the setting `key` together with the other settings."""
    if key in ("schedule", "stages_per_rank"):
        return "needs a pipeline (pp of 2 or more)"
    if key == "context":
        return "needs cp of 2 or more"
    return f"{value} is not possible with the other degrees"


def _idle(settings: PageSettings, arch: Arch, key: str) -> str:
    if key in ("schedule", "stages_per_rank") and settings.pp == 1:
        return "there is no pipeline"
    if key == "context" and settings.cp == 1:
        return "sequences are whole (cp = 1)"
    if key == "stages_per_rank" and (settings.schedule not in TWO_STAGES or settings.schedule in V_SHAPED):
        each = 2 if settings.schedule in V_SHAPED else 1
        return f"{_SCHEDULES[settings.schedule]} has {each} on each rank"
    if key == "ep" and not arch.is_moe:
        return "the model has no experts"
    return ""


def _candidates(settings: PageSettings, arch: Arch, cluster: Cluster) -> dict[str, tuple[list, dict]]:
    """Return (values to try, labels by value) for each setting, in the order of the controls."""
    devices, data = cluster.devices, data_ranks(settings, cluster)
    per_rank = settings.batch // data if data and settings.batch % data == 0 else 1
    looped = settings.schedule in TWO_STAGES and settings.schedule not in V_SHAPED
    stages = range(2, min(arch.num_layers // settings.pp, _MOST) + 1) if looped and settings.pp > 1 else [0]
    one_stage = {0: "2" if settings.schedule in V_SHAPED and settings.pp > 1 else "1"}
    return {
        "tp": (_few(n for n in divisors(arch.num_heads) if n <= devices), {}),
        "pp": (_few(n for n in divisors(devices) if n <= arch.num_layers), {}),
        "cp": (_few(n for n in divisors(devices) if n <= 64), {}),
        "ep": (_few(divisors(arch.moe.num_experts)) if arch.is_moe else [1], {}),
        "dp_replicate": (_few(divisors(data or 1)), {}),
        "micro_batch": (_few(n for n in range(1, 65) if per_rank % n == 0), {}),
        "zero": ([1, 2, 3], _ZERO),
        "recompute": (list(WORDS["recompute"]), _RECOMPUTE),
        "schedule": (list(WORDS["schedule"]), _SCHEDULES),
        "context": (list(WORDS["context"]), _CONTEXT),
        "offload": (list(WORDS["offload"]), _OFFLOAD),
        "recipe": (list(WORDS["recipe"]), _RECIPE),
        "stages_per_rank": (list(stages), {} if looped and settings.pp > 1 else one_stage),
    }


def _few(values: Iterable[int]) -> list[int]:
    """Return at most _MOST of the values, ascending: powers of two have priority, then the smallest others."""
    ordered = sorted(values, key=lambda n: (n & (n - 1) != 0, n))
    return sorted(ordered[:_MOST])


@dataclass(frozen=True)
class _Fix:
    """A change of one control that makes the plan fit, with the memory and step time after it."""

    key: str
    value: int | str
    settings: PageSettings
    memory_bytes: float
    seconds: float


def fixes(found: PagePlan, asked: PageSettings) -> list[dict]:
    """Return single changes with which the plan fits, ordered by step time; empty if no single change is enough.

    asked: the settings of the page's link. Values that this link leaves to the rules are left to the rules in the links
    of the changes too.
    """
    cluster = cluster_of(found.settings.cluster)
    tried = []
    for key, value, settings in steps_away(found.settings):
        run, _ = run_of(settings)
        needed = _needed(run, cluster, software_of(settings))
        if needed <= rank_memory_bytes(cluster, run.parallel.world_size):
            tried.append(_Fix(key, value, settings, needed, _seconds(run, cluster, software_of(settings))))
    best: dict[str, _Fix] = {}
    for one in sorted(tried, key=lambda t: (t.seconds, t.memory_bytes)):
        best.setdefault(one.key, one)
    return [_shown(one, found, asked) for one in list(best.values())[:_SHOWN_FIXES]]


def _needed(run: RunConfig, cluster: Cluster, software: Software) -> float:
    return sum(term.value for term in memory_bill(run, cluster, software).values())


def _seconds(run: RunConfig, cluster: Cluster, software: Software) -> float:
    return sum(term.value for term in (step_seconds(run, cluster, software) or {}).values())


def _shown(one: _Fix, found: PagePlan, asked: PageSettings) -> dict:
    now = found.plan.step_seconds if found.plan else 0.0
    slower = f", {one.seconds / now - 1:+.0%} step time" if now and one.seconds else ""
    return {
        "text": setting_text(one.key, one.value),
        "effect": f"{format_bytes(one.memory_bytes)}, {format_seconds(one.seconds)} a step{slower}",
        "words": link_pairs(replace(one.settings, seq=asked.seq, batch=asked.batch, tokens=asked.tokens)),
    }


@cache
def options() -> dict:
    """Return the lists that the page offers: model presets, devices, typical clusters, and settings that a search can
    keep."""
    return {
        "models": [_model(name) for name in model_names()],
        "devices": [_device(name) for name in devices()],
        "clusters": [_cluster(name, about) for name, about in _CLUSTERS.items()],
        "keepable": [{"key": key, "label": LABELS[key]} for key in KEEPABLE],
    }


def _model(name: str) -> dict:
    preset = load_model(name)
    size = format_count(count_parameters(preset.arch))
    if preset.arch.is_moe:
        size += f", {format_count(count_active_parameters(preset.arch))} active"
    return {"name": name, "about": preset.about, "size": size, "moe": preset.arch.is_moe}


def _device(name: str) -> dict:
    device = devices()[name]
    one = load_cluster(name)
    label = f"{device.device_name} · {format_bytes(one.memory_bytes)}"
    return {"name": name, "label": label, "kind": device.device, "node": device.node}


def _cluster(name: str, about: str) -> dict:
    cluster = load_cluster(name)
    return {"name": name, "label": f"{cluster.devices:,} x {cluster.device_name}, {about}"}
