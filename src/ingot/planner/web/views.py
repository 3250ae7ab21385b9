"""A plan as the page shows it: words for people, made here so that the page and the command line say the same."""

from dataclasses import asdict, replace
from urllib.parse import urlencode

from ingot.planner.show.notes import notes
from ingot.planner.web import bars
from ingot.planner.web.answers import Answer, about, subject_of
from ingot.planner.web.choices import as_json, controls
from ingot.planner.web.state import State, words
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT
from ingot.theory.devices import find_device
from ingot.theory.layout import resolve_parallel
from ingot.theory.params import count_active_parameters, count_parameters
from ingot.units import format_bytes, format_count, format_flops, format_seconds, format_usd, parse_count

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def view(found: Answer, asked: State) -> dict:
    """Everything that the page shows of a plan. asked: as it was before other degrees moved along."""
    state, run, plan = found.state, found.run, found.plan
    open_ = replace(state, seq=asked.seq, batch=asked.batch, tokens=asked.tokens)
    cluster = _cluster(found)
    shown = {
        "state": asdict(state),
        "link": urlencode(words(open_)),
        "model": _model(state, run),
        "cluster": cluster,
        "layout": layout_words(run),
        "tokens_per_step": f"{format_count(run.tokens_per_step)} tokens per step",
        "filled": _filled(state, open_),
        "hints": _hints(found, asked, cluster),
        "problems": [{"key": key.rpartition(".")[2], "message": message} for key, message in found.problems],
        "choices": as_json(controls(state)),
        "trains": plan is not None and cluster["trains_here"] and plan.software == INGOT,
        "command": "ingot check run.toml\ningot train run.toml",
        "plan": None,
        "spoken": "not a legal layout: " + "; ".join(message for _, message in found.problems),
    }
    if plan:
        head = [tile["brief"] for tile in tiles(state, run, plan)]
        shown["spoken"] = ", ".join([verdict(run, plan)["text"], *head])
        shown["plan"] = {
            "verdict": verdict(run, plan),
            "tiles": tiles(state, run, plan),
            "memory": bars.memory(run, plan),
            "step": bars.step(plan),
            "communication": bars.communication(plan),
            "notes": [f"{about}: {text}" for about, text in notes(run, plan.cluster)],
            "warnings": list(plan.warnings),
            "formulas": [{"name": name, "formula": formula} for name, formula in plan.formulas.items()],
            "has_timeline": run.parallel.pp > 1,
        }
    return shown


def _filled(state: State, open_: State) -> dict[str, str]:
    """What the fields show. Tokens that a rule chose are a round number."""
    tokens = format_count(state.tokens) if not open_.tokens else _exact(state.tokens)
    given = {key: f"{value:g}" if (value := getattr(state, key)) else "" for key in ("price", "mfu", "failures")}
    given["params"] = format_count(state.params) if state.params else ""
    return {"seq": str(state.seq), "batch": str(state.batch), "tokens": tokens, **given}


def _exact(tokens: int) -> str:
    """1.5T for 1,500,000,000,000; digits where no short form is the same number."""
    short = format_count(tokens)
    return short if parse_count(short) == tokens else str(tokens)


def _about(state: State) -> str:
    subject = subject_of(state)
    if not state.params:
        return about(state.model)
    size = format_count(subject.parameters)
    return f"{size} parameters, FLOPs by 6 for each and token; memory by the shape of {subject.shape}, which stands in"


def _hints(found: Answer, asked: State, cluster: dict) -> dict[str, str]:
    run, state = found.run, found.state
    steps = f"{run.train.steps:,} steps of {format_count(run.tokens_per_step)} tokens"
    along = moved(asked, state)
    ranks = f"dp_shard {run.parallel.dp_shard:,}: {run.parallel.data_ranks:,} ranks read data"
    return {
        "model": _about(state),
        "batch": steps if asked.batch and asked.tokens else f"{steps}; an empty field is for the rules",
        "cluster": cluster["facts"],
        "layout": f"{ranks}. Moved along: {', '.join(along)}" if along else f"{ranks}.",
    }


def moved(asked: State, state: State) -> list[str]:
    """What moved along with what the user set."""
    before, after = asdict(asked), asdict(state)
    return [
        f"{key} {before[key]} → {after[key]}"
        for key in after
        if before[key] != after[key] and key not in ("seq", "batch", "tokens")
    ]


def layout_words(run: RunConfig) -> str:
    parallel = run.parallel
    used = [f"{axis} {getattr(parallel, axis):,}" for axis in _AXES if getattr(parallel, axis) > 1]
    text = " x ".join(used) or "one rank"
    return f"{text}, ep {parallel.ep}" if parallel.ep > 1 else text


def _model(state: State, run: RunConfig) -> dict:
    arch = run.model
    total, active = count_parameters(arch), count_active_parameters(arch)
    heads = f"{arch.num_heads}/{arch.num_kv_heads} heads"
    shape = f"{arch.num_layers} layers, width {arch.d_model:,}, {heads}, vocabulary {arch.vocab_size:,}"
    count = f"{format_count(total)} parameters"
    if arch.is_moe:
        count += f", {format_count(active)} active"
    return {"name": subject_of(state).name, "count": count, "shape": shape, "moe": arch.is_moe}


def _cluster(found: Answer) -> dict:
    cluster = found.cluster
    device = find_device(cluster.device_name)
    peak, price = cluster.peak_flops.get("bf16", 0.0), found.run.cost.usd_per_hour
    whole = cluster.devices % cluster.domain == 0
    each = cluster.domain if whole else cluster.devices_per_node
    facts = [f"{format_bytes(cluster.memory_bytes)} each"]
    facts += [f"{format_flops(peak)}/s bf16"] if peak else []
    facts += [f"fast links join {cluster.domain}"] if cluster.devices > 1 else []
    facts += [f"${price:g} per hour and device"] if price else []
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
    """fits, and one sentence that says by how much."""
    bar = bars.memory(run, plan)
    if bar["fits"]:
        how = "fits, tightly" if bar["tight"] else "fits"
        text = f"{how}: {bar['used']} of {bar['capacity']} per device"
        return {"fits": True, "tight": bar["tight"], "short": f"{how}, {bar['of_capacity']}", "text": text}
    largest = max((k for k in plan.memory_bytes if k != "runtime"), key=lambda kind: plan.memory_bytes[kind])
    text = f"does not fit: {bar['used']} of {bar['capacity']} per device, {bar['free']} too much, mostly {largest}"
    return {"fits": False, "tight": False, "short": f"does not fit, {bar['of_capacity']}", "text": text}


def tiles(state: State, run: RunConfig, plan: Plan) -> list[dict]:
    """The figures of the head: label, value, and what has to be known to read it."""
    found = [_step_tile(plan), _mfu_tile(state, plan), *_duration_tiles(plan)]
    if run.parallel.pp > 1:
        each = resolve_parallel(run).stages_on_each_rank
        note = f"{run.parallel.schedule}, {run.accumulation:,} micro-batches, {each} stage{'s' * (each > 1)} per rank"
        idle = f"{bubble(plan):.1%}"
        found.append(_tile("bubble", "Bubble", idle, note, f"{idle} bubble"))
    return [tile for tile in found if tile]


def bubble(plan: Plan) -> float:
    """Share of a step that pipeline ranks wait."""
    if plan.bubble or not plan.step_seconds:
        return plan.bubble
    return plan.time_seconds.get("pipeline bubble", 0.0) / plan.step_seconds


def _tile(key: str, label: str, value: str, note: str, brief: str = "") -> dict:
    """brief: for the line that stays in sight."""
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


def _mfu_tile(state: State, plan: Plan) -> dict | None:
    if plan.mfu is None:
        return None
    counted = "6 FLOPs per parameter and token" if state.params else "causal attention counted half"
    notes = [counted]
    if state.mfu:
        notes = ["as given", counted]
    elif plan.step_seconds_high:
        low, high = (plan.mfu * plan.step_seconds / s for s in (plan.step_seconds_high, plan.step_seconds_low))
        notes = [f"{low:.0%} to {high:.0%} in that band", counted]
    if plan.hfu is not None:
        notes.append(f"HFU {plan.hfu:.1%}, of all that devices compute")
    return _tile("mfu", "MFU", f"{plan.mfu:.1%}", "; ".join(notes), f"{plan.mfu:.0%} MFU")


def _duration_tiles(plan: Plan) -> list[dict | None]:
    """Days and dollars, failures included where they are known."""
    if not plan.step_seconds:
        return []
    steps = f"{plan.steps:,} steps"
    outlook = plan.outlook
    if outlook is None:
        cost = _tile("cost", "Cost", format_usd(plan.usd), plan.formulas.get("usd", "")) if plan.usd else None
        return [_tile("days", "Duration", format_seconds(plan.total_seconds), f"{steps}, no failures counted"), cost]
    every = format_seconds(outlook.checkpoint_every_seconds)
    usd = sum(outlook.usd_by_kind.values())
    kinds = ", ".join(f"{kind} {format_usd(amount)}" for kind, amount in outlook.usd_by_kind.items() if amount)
    return [
        _tile("days", "Duration", _days(outlook.days), f"{steps}; {_days(outlook.productive_days)} without failures"),
        _tile("cost", "Cost", format_usd(usd), kinds) if usd else None,
        _tile(
            "goodput", "Goodput", f"{outlook.goodput:.1%}",
            f"{outlook.failures:.1f} failures expected; a checkpoint every {every}",
        ),
    ]  # fmt: skip


def _days(days: float) -> str:
    return f"{days:.1f} days" if days >= 2 else format_seconds(days * 86400)
