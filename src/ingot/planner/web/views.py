"""The view of a plan for the page: all texts and the shares of bars, so that the page only has to draw them."""

from dataclasses import asdict, replace
from urllib.parse import urlencode

from ingot.planner.predict.memory.peak_memory import rank_memory_bytes
from ingot.planner.run.advice import notes
from ingot.planner.show.layout import layout_text
from ingot.planner.show.plans import format_days
from ingot.planner.web.answers import PagePlan, about, model_of
from ingot.planner.web.choices import as_json, controls
from ingot.planner.web.settings import PageSettings, link_pairs
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT
from ingot.theory.devices import find_device
from ingot.theory.failures import DAY_SECONDS
from ingot.theory.flops import mfu_words
from ingot.theory.layout import resolve_parallel
from ingot.theory.params import count_active_parameters, count_parameters
from ingot.units import format_bytes, format_count, format_flops, format_seconds, format_usd, parse_count

# A plan that uses more than this share of memory is marked as tight, because fragmentation differs between runs.
TIGHT = 0.9
_LINES = {
    "tp": "tensor parallel",
    "sequence": "choices of experts",
    "ulysses": "context, Ulysses",
    "ring": "context, ring",
    "ep": "tokens to experts",
    "shard": "shards of the model (ZeRO)",
    "expert_shard": "shards of experts (ZeRO)",
    "dp_replicate": "copies of the model",
    "pp": "pipeline",
}
# The order of kinds in a bar: the state of the model, then the memory that depends on the batch.
_KINDS = ("weights", "gradients", "optimizer", "gathered", "activations", "logits")
_PHASES = ("initialisation", "first step", "steady state", "save")


def view(found: PagePlan, asked: PageSettings) -> dict:
    """Return all data that the page shows of a plan. asked: the settings of the link, before settings were filled in or
    adapted."""
    settings, run, plan = found.settings, found.run, found.plan
    open_ = replace(settings, seq=asked.seq, batch=asked.batch, tokens=asked.tokens)
    cluster = _cluster(found)
    shown = {
        "state": asdict(settings),
        "link": urlencode(link_pairs(open_)),
        "model": _model(settings, run),
        "cluster": cluster,
        "layout": layout_text(run),
        "tokens_per_step": f"{format_count(run.tokens_per_step)} tokens per step",
        "filled": _filled(settings, open_),
        "hints": _hints(found, asked, cluster),
        "problems": [{"key": key.rpartition(".")[2], "message": message} for key, message in found.problems],
        "choices": as_json(controls(settings)),
        "trains": plan is not None and cluster["trains_here"] and plan.software == INGOT,
        "command": "ingot check run.toml\ningot train run.toml",
        "plan": None,
        "spoken": "not a legal layout: " + "; ".join(message for _, message in found.problems),
    }
    if plan:
        head = [tile["brief"] for tile in tiles(settings, run, plan)]
        shown["spoken"] = ", ".join([verdict(run, plan)["text"], *head])
        shown["plan"] = {
            "verdict": verdict(run, plan),
            "tiles": tiles(settings, run, plan),
            "memory": memory_bars(run, plan),
            "step": step_bars(plan),
            "communication": communication_bars(plan),
            "notes": [f"{about}: {text}" for about, text in notes(run, plan.cluster)],
            "warnings": list(plan.warnings),
            "formulas": [{"name": name, "formula": formula} for name, formula in plan.formulas.items()],
            "has_timeline": run.parallel.pp > 1,
        }
    return shown


def _filled(settings: PageSettings, open_: PageSettings) -> dict[str, str]:
    """Return the texts of the input fields. The number of tokens is rounded if a rule chose it.

    open_: the same settings, but with 0 where a rule chose the sequence length, batch or number of tokens.
    """
    tokens = format_count(settings.tokens) if not open_.tokens else _exact(settings.tokens)
    given = {key: f"{value:g}" if (value := getattr(settings, key)) else "" for key in ("price", "mfu", "failures")}
    given["params"] = format_count(settings.params) if settings.params else ""
    return {"seq": str(settings.seq), "batch": str(settings.batch), "tokens": tokens, **given}


def _exact(tokens: int) -> str:
    """Return a number of tokens in short form, like "1.5T", or with all digits if no short form is exact."""
    short = format_count(tokens)
    return short if parse_count(short) == tokens else str(tokens)


def _about(settings: PageSettings) -> str:
    chosen = model_of(settings)
    if not settings.params:
        return about(settings.model)
    size = format_count(chosen.parameters)
    return f"{size} parameters, 6 FLOPs per parameter and token; memory for the shape of {chosen.shape}"


def _hints(found: PagePlan, asked: PageSettings, cluster: dict) -> dict[str, str]:
    run, settings = found.run, found.settings
    steps = f"{run.train.steps:,} steps of {format_count(run.tokens_per_step)} tokens"
    adapted = adapted_settings(asked, settings)
    ranks = f"dp_shard {run.parallel.dp_shard:,}: {run.parallel.data_ranks:,} ranks read data"
    return {
        "model": _about(settings),
        "batch": steps if asked.batch and asked.tokens else f"{steps}; the rules fill empty fields",
        "cluster": cluster["facts"],
        "layout": f"{ranks}. Adapted: {', '.join(adapted)}" if adapted else f"{ranks}.",
    }


def adapted_settings(asked: PageSettings, settings: PageSettings) -> list[str]:
    """Return one text per setting that was adapted to the user's change, like "tp 4 → 2"."""
    before, after = asdict(asked), asdict(settings)
    return [
        f"{key} {before[key]} → {after[key]}"
        for key in after
        if before[key] != after[key] and key not in ("seq", "batch", "tokens")
    ]


def _model(settings: PageSettings, run: RunConfig) -> dict:
    arch = run.model
    total, active = count_parameters(arch), count_active_parameters(arch)
    heads = f"{arch.num_heads}/{arch.num_kv_heads} heads"
    shape = f"{arch.num_layers} layers, width {arch.d_model:,}, {heads}, vocabulary {arch.vocab_size:,}"
    count = f"{format_count(total)} parameters"
    if arch.is_moe:
        count += f", {format_count(active)} active"
    return {"name": model_of(settings).name, "count": count, "shape": shape, "moe": arch.is_moe}


def _cluster(found: PagePlan) -> dict:
    cluster = found.cluster
    device = find_device(cluster.device_name)
    peak, price = cluster.peak_flops.get("bf16", 0.0), found.run.cost.usd_per_hour
    whole = cluster.devices % cluster.domain == 0
    each = cluster.domain if whole else cluster.devices_per_node
    facts = [f"{format_bytes(cluster.memory_bytes)} each"]
    facts += [f"{format_flops(peak)}/s bf16"] if peak else []
    facts += [f"fast links join {cluster.domain}"] if cluster.devices > 1 else []
    facts += [f"${price:g} per device-hour"] if price else []
    facts += ["planning only: ingot's trainer does not run on it"] if cluster.device == "tpu" else []
    racks = device is not None and device.domain > device.node
    return {
        "name": cluster.name,
        "size": f"{cluster.devices:,} {cluster.device_name}",
        "device": device.key if device else "",
        "groups": cluster.devices // each,
        "each": each,
        "unit": "Slices" if cluster.device == "tpu" else "Racks" if racks else "Nodes",
        "facts": ", ".join(facts),
        "trains_here": cluster.device != "tpu",
    }


def verdict(run: RunConfig, plan: Plan) -> dict:
    """Return the verdict on memory: flags ("fits", "tight"), and a short and a long text with the memory used."""
    bar = memory_bars(run, plan)
    if bar["fits"]:
        how = "fits, tightly" if bar["tight"] else "fits"
        text = f"{how}: {bar['used']} of {bar['capacity']} per device"
        return {"fits": True, "tight": bar["tight"], "short": f"{how}, {bar['of_capacity']}", "text": text}
    largest = max((k for k in plan.memory_bytes if k != "runtime"), key=lambda kind: plan.memory_bytes[kind])
    text = f"does not fit: {bar['used']} of {bar['capacity']} per device, {bar['free']} too much, mostly {largest}"
    return {"fits": False, "tight": False, "short": f"does not fit, {bar['of_capacity']}", "text": text}


def tiles(settings: PageSettings, run: RunConfig, plan: Plan) -> list[dict]:
    """Return the tiles at the top of the page, each with a label, a value, and a note that explains the value."""
    found = [_step_tile(plan), _mfu_tile(settings, plan), *_duration_tiles(plan)]
    if run.parallel.pp > 1:
        each = resolve_parallel(run).stages_on_each_rank
        note = f"{run.parallel.schedule}, {run.accumulation:,} micro-batches, {each} stage{'s' * (each > 1)} per rank"
        idle = f"{bubble(plan):.1%}"
        found.append(_tile("bubble", "Bubble", idle, note, f"{idle} bubble"))
    return [tile for tile in found if tile]


def bubble(plan: Plan) -> float:
    """Return the share of a step in which pipeline ranks wait."""
    if plan.bubble or not plan.step_seconds:
        return plan.bubble
    return plan.time_seconds.get("pipeline bubble", 0.0) / plan.step_seconds


def _tile(key: str, label: str, value: str, note: str, brief: str = "") -> dict:
    """Return a tile. brief: its text in the summary line at the top, which stays visible while scrolling."""
    return {"key": key, "label": label, "value": value, "note": note, "brief": brief or value}


def _step_tile(plan: Plan) -> dict:
    if not plan.step_seconds:
        return _tile("step", "Step", "unknown", "no rate of this device is known for this precision")
    speed = f"{format_count(plan.tokens_per_step / plan.step_seconds)} tokens/s"
    return _tile(
        "step",
        "Step",
        format_seconds(plan.step_seconds),
        f"{speed}{_band(plan)}",
        f"{format_seconds(plan.step_seconds)} a step",
    )


def _band(plan: Plan) -> str:
    if not plan.step_seconds_high:
        return ""
    low, high = format_seconds(plan.step_seconds_low), format_seconds(plan.step_seconds_high)
    return f"; {low} to {high} in the 80% band of published runs"


def _mfu_tile(settings: PageSettings, plan: Plan) -> dict | None:
    if plan.mfu is None:
        return None
    counted = "6 FLOPs per parameter and token" if settings.params else "causal attention counted half"
    notes = [counted]
    if settings.mfu:
        notes = ["as given", counted]
    elif plan.step_seconds_high:
        low, high = (plan.mfu * plan.step_seconds / s for s in (plan.step_seconds_high, plan.step_seconds_low))
        notes = [f"{low:.0%} to {high:.0%} in the same band", counted]
    if plan.cluster.device != "cpu":
        notes.insert(0, mfu_words(plan.mfu))
    if plan.hfu is not None:
        notes.append(f"HFU {plan.hfu:.1%}, with recomputation")
    return _tile("mfu", "MFU", f"{plan.mfu:.1%}", "; ".join(notes), f"{plan.mfu:.0%} MFU")


def _duration_tiles(plan: Plan) -> list[dict | None]:
    """Return the tiles of duration, cost and goodput. Failures are included if their rate is known."""
    if not plan.step_seconds:
        return []
    steps = f"{plan.steps:,} steps"
    outlook = plan.outlook
    if outlook is None:
        cost = _tile("cost", "Cost", format_usd(plan.usd), plan.formulas.get("usd", "")) if plan.usd else None
        duration = format_days(plan.total_seconds / DAY_SECONDS)
        return [_tile("days", "Duration", duration, f"{steps}, no failures counted"), cost]
    every = format_seconds(outlook.checkpoint_every_seconds)
    usd = sum(outlook.usd_by_kind.values())
    kinds = ", ".join(f"{kind} {format_usd(amount)}" for kind, amount in outlook.usd_by_kind.items() if amount)
    return [
        _tile(
            "days", "Duration", format_days(outlook.days),
            f"{steps}; {format_days(outlook.productive_days)} without failures",
        ),
        _tile("cost", "Cost", format_usd(usd), kinds) if usd else None,
        _tile(
            "goodput", "Goodput", f"{outlook.goodput:.1%}",
            f"{outlook.failures:.1f} failures expected; a checkpoint every {every}",
        ),
    ]  # fmt: skip


def memory_bars(run: RunConfig, plan: Plan) -> dict:
    """Return the memory bars, all on one scale: the fullest rank by kind, every pipeline rank, and each phase."""
    capacity = rank_memory_bytes(plan.cluster, run.parallel.world_size)
    used = plan.total_memory_bytes
    stages = plan.stage_memory_bytes
    most = max([capacity, used, *(sum(stage.values()) for stage in stages), *plan.moments_bytes.values()])
    scale = most * 1.02
    parts = [_part(kind, size, scale, plan) for kind, size in _ordered(plan.memory_bytes)]
    return {
        "capacity": format_bytes(capacity),
        "capacity_share": capacity / scale,
        "tight_share": TIGHT * capacity / scale,
        "used": format_bytes(used),
        "of_capacity": f"{used / capacity:.0%}",
        "fits": used <= capacity,
        "tight": used > TIGHT * capacity,
        "free": format_bytes(abs(capacity - used)),
        "parts": parts,
        "stages": [_stage(rank, stage, scale, capacity) for rank, stage in enumerate(stages)],
        "moments": [
            {"name": name, "text": format_bytes(size), "share": size / scale, "fits": size <= capacity}
            for name in _PHASES
            if (size := plan.moments_bytes.get(name, 0))
        ],
    }


def _ordered(kinds: dict[str, int]) -> list[tuple[str, int]]:
    rest = [kind for kind in kinds if kind not in _KINDS]
    return [(kind, kinds[kind]) for kind in (*_KINDS, *rest) if kinds.get(kind)]


def _part(kind: str, size: float, scale: float, plan: Plan) -> dict:
    formula = plan.formulas.get(f"memory.{kind}", "")
    return {"kind": kind, "share": size / scale, "text": format_bytes(size), "formula": formula}


def _stage(rank: int, kinds: dict[str, int], scale: float, capacity: float) -> dict:
    total = sum(kinds.values())
    parts = [{"kind": k, "share": size / scale, "text": format_bytes(size)} for k, size in _ordered(kinds)]
    return {"rank": rank, "text": format_bytes(total), "fits": total <= capacity, "parts": parts}


def step_bars(plan: Plan) -> list[dict]:
    """Return the bars of the parts of a step, longest first."""
    parts = sorted(plan.time_seconds.items(), key=lambda item: -item[1])
    whole = plan.step_seconds or 1.0
    return [
        {
            "name": name,
            "share": seconds / whole,
            "percent": f"{seconds / whole:.1%}",
            "text": format_seconds(seconds),
            "formula": plan.formulas.get(f"time.{name}", ""),
        }
        for name, seconds in parts
        if seconds > 1e-6 * whole
    ]


def communication_bars(plan: Plan) -> list[dict]:
    """Return the bars of one rank's traffic per step, by line of the mesh: bytes, time alone, exposed time."""
    lines = plan.communication
    longest = max((line.seconds for line in lines.values()), default=0.0) or 1.0
    return [
        {
            "line": name,
            "name": _LINES.get(name, name),
            "sent": format_bytes(line.sent_bytes),
            "alone": format_seconds(line.seconds),
            "exposed": format_seconds(line.exposed_seconds) if line.exposed_seconds else "hidden",
            "exposed_share": min(line.exposed_seconds, line.seconds) / longest,
            "hidden_share": max(line.seconds - line.exposed_seconds, 0.0) / longest,
            "of_step": f"{line.exposed_seconds / plan.step_seconds:.1%}" if plan.step_seconds else "",
            "where": "between nodes" if line.crosses else "inside a node",
        }
        for name, line in sorted(lines.items(), key=lambda item: -item[1].exposed_seconds)
        if line.sent_bytes
    ]
