"""What each control of the page offers: every value that would be legal, and why the others near it are not.

A value is tried as the user would set it: what has to move along moves (settle.py), then the trainer's own rules speak.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from ingot.planner.web.answers import cluster_of, problems_of, run_of, subject_of
from ingot.planner.web.settle import data_ranks, settle
from ingot.planner.web.state import WORDS, State
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.nearest import divisors
from ingot.schema.parallel import TWO_STAGES, V_SHAPED

# Values of one control; a slider with more would be hard to set.
_MOST = 14
_MOST_REASONS = 3
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
_CONTEXT = {"auto": "what suits the links", "ring": "ring", "ulysses": "Ulysses", "usp": "USP, a grid of both"}
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
class Choice:
    """why: what forbids the value; "" when it is legal."""

    value: int | str
    label: str
    why: str = ""


@dataclass(frozen=True)
class Control:
    """idle: why there is nothing to choose, "" when there is."""

    choices: tuple[Choice, ...]
    refused: tuple[str, ...] = ()
    idle: str = ""


def controls(state: State) -> dict[str, Control]:
    """Of a settled state, by the name of the setting."""
    arch, cluster = subject_of(state).arch, cluster_of(state.cluster)
    found = {}
    for key, (values, labels) in _candidates(state, arch, cluster).items():
        tried = [
            Choice(v, labels.get(v, f"{v:,}" if isinstance(v, int) else v), _why_not(state, key, v)) for v in values
        ]
        if key in WORDS or key == "zero":
            found[key] = Control(tuple(tried), idle=_idle(state, arch, key))
            continue
        legal = tuple(choice for choice in tried if not choice.why)
        refused = [f"{choice.value}: {choice.why}" for choice in tried if choice.why]
        found[key] = Control(legal, tuple(refused[:_MOST_REASONS]), _idle(state, arch, key))
    return found


def as_json(found: dict[str, Control]) -> dict:
    return {key: asdict(control) for key, control in found.items()}


def steps_away(state: State) -> Iterable[tuple[str, int | str, State]]:
    """(key, value, settled state) of every legal layout that one control makes of this one."""
    arch, cluster = subject_of(state).arch, cluster_of(state.cluster)
    for key, control in controls(state).items():
        for choice in control.choices:
            if not choice.why and choice.value != getattr(state, key):
                yield key, choice.value, settle(replace(state, **{key: choice.value}), arch, cluster, key)


def words_of(key: str, value: int | str) -> str:
    """A setting for people: "tensor parallel 8"."""
    if key == "recipe":
        return _RECIPE[str(value)]
    named = {"zero": _ZERO, "recompute": _RECOMPUTE, "schedule": _SCHEDULES, "offload": _OFFLOAD, "context": _CONTEXT}
    return f"{LABELS[key]} {named.get(key, {}).get(value, value)}"


def _why_not(state: State, key: str, value: int | str) -> str:
    cluster = cluster_of(state.cluster)
    moved = settle(replace(state, **{key: value}), subject_of(state).arch, cluster, key)
    if getattr(moved, key) != value:
        return _needs(key, value)
    return next((message for _, message in problems_of(moved, run_of(moved)[0])), "")


def _needs(key: str, value: int | str) -> str:
    """Why a value does not stay as it was put."""
    if key in ("schedule", "stages_per_rank"):
        return "needs a pipeline (pp of 2 or more)"
    if key == "context":
        return "needs cp of 2 or more"
    return f"{value} is not possible with the other degrees"


def _idle(state: State, arch: Arch, key: str) -> str:
    if key in ("schedule", "stages_per_rank") and state.pp == 1:
        return "there is no pipeline"
    if key == "context" and state.cp == 1:
        return "sequences are whole (cp = 1)"
    if key == "stages_per_rank" and (state.schedule not in TWO_STAGES or state.schedule in V_SHAPED):
        each = 2 if state.schedule in V_SHAPED else 1
        return f"{_SCHEDULES[state.schedule]} has {each} on each rank"
    if key == "ep" and not arch.is_moe:
        return "the model has no experts"
    return ""


def _candidates(state: State, arch: Arch, cluster: Cluster) -> dict[str, tuple[list, dict]]:
    """Values to try, in the order of the controls, and the words for those that need some."""
    devices, data = cluster.devices, data_ranks(state, cluster)
    per_rank = state.batch // data if data and state.batch % data == 0 else 1
    looped = state.schedule in TWO_STAGES and state.schedule not in V_SHAPED
    stages = range(2, min(arch.num_layers // state.pp, _MOST) + 1) if looped and state.pp > 1 else [0]
    one_stage = {0: "2" if state.schedule in V_SHAPED and state.pp > 1 else "1"}
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
        "stages_per_rank": (list(stages), {} if looped and state.pp > 1 else one_stage),
    }


def _few(values: Iterable[int]) -> list[int]:
    """Up to _MOST of them: powers of two stay, then the smallest."""
    ordered = sorted(values, key=lambda n: (n & (n - 1) != 0, n))
    return sorted(ordered[:_MOST])
