"""The order in which a run is told: what came out, what went in, how it went, and what that can be checked against.

Every section is a function of the facts and returns None when the run has nothing for it: a report never fakes a part.
"""

import time

from ingot import __version__
from ingot.report.comparison import comparison_section
from ingot.report.experts import experts_section
from ingot.report.facts import Facts, is_finite, is_number
from ingot.report.layout import layout_text
from ingot.report.recovery import recovery_section, recovery_tile
from ingot.report.render.charts import loss_chart, optimizer_charts, throughput_charts, throughput_summary
from ingot.report.render.page import Bar, Bars, Block, Page, Pairs, Sample, Section, Table, Text, Tile
from ingot.schema.arch import Arch
from ingot.units import format_bytes, format_count, format_seconds


def tell(facts: Facts, command: str) -> Page:
    """The page of a run. command: what reproduces it."""
    sections = (
        stages_section, funnel_section, training_section, experts_section, recovery_section, evaluation_section,
        samples_section, comparison_section, checkpoints_section, settings_section, changed_settings_section,
        machine_section, provenance_section,
    )  # fmt: skip
    name = facts.run.name if facts.run else facts.folder.root.resolve().name
    footer = f"Written by ingot {__version__} from the event log of the run."
    if facts.unreadable_events:
        footer += f" {facts.unreadable_events} events could not be read and are not in this report."
    return Page(
        title=name,
        subtitle=_subtitle(facts),
        tiles=_tiles(facts),
        command=command,
        sections=[s for s in (section(facts) for section in sections) if s],
        footer=footer,
    )


def _subtitle(facts: Facts) -> str:
    parts = []
    if facts.starts:
        first = facts.starts[0]
        parts.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first["time"])))
        if is_finite(first.get("parameters")):
            parts.append(f"{format_count(first['parameters'])} parameters")
        ranks = f"{first['world_size']:.0f} {first.get('device', '')} {_plural(first['world_size'], 'rank')}"
        parts.append(" ".join(ranks.split()))
        parts += [str(first["precision"])] if first.get("precision") else []
    parts.append(_state(facts))
    return " · ".join(parts)


def _plural(count: float, word: str) -> str:
    return word if count == 1 else word + "s"


def _state(facts: Facts) -> str:
    total = f" of {facts.run.train.steps:,}" if facts.run else ""
    if facts.finished and facts.finished["step"] >= facts.last_step:
        return f"finished at step {facts.finished['step']:,}"
    if facts.stopped:
        return f"stopped at step {facts.last_step:,}{total}"
    return f"at step {facts.last_step:,}{total}" if facts.last_step else "no step logged yet"


def _tiles(facts: Facts) -> list[Tile]:
    tiles = []
    if facts.evaluations:
        last = facts.evaluations[-1]
        better = 1 - last["bpb"] / last["unigram_bpb"] if last["unigram_bpb"] > 0 else 0.0
        note = f"unigram baseline {last['unigram_bpb']:.3f}, {abs(better):.0%} {'lower' if better >= 0 else 'higher'}"
        tiles.append(Tile("Held-out bits per byte", f"{last['bpb']:.3f}", note, good=better > 0))
    if facts.steps:
        first, last = facts.steps[min(facts.steps)], facts.steps[max(facts.steps)]
        tiles.append(Tile("Training loss", f"{last['loss']:.3f}", f"nats per token, {first['loss']:.2f} at the start"))
    if facts.progress:
        last = facts.progress[max(facts.progress)]
        note = f"of {format_count(facts.tokens.tokens)} in the training set" if facts.tokens else ""
        tiles.append(Tile("Tokens trained on", format_count(last["tokens"]), note))
    if facts.active_seconds:
        cost = facts.progress[max(facts.progress)].get("cost_usd") if facts.progress else None
        attempts = f"{len(facts.starts)} {_plural(len(facts.starts), 'attempt')}"
        note = attempts + (f", ${cost:,.2f}" if is_number(cost) else "")
        tiles.append(Tile("Training time", format_seconds(facts.active_seconds), note))
    if recovered := recovery_tile(facts):
        tiles.append(recovered)
    return tiles


def stages_section(facts: Facts) -> Section | None:
    """Chapters in order. One that was entered again (a continued quickstart) is one row with all of its time."""
    if not facts.stages:
        return None
    seconds: dict[str, float] = {}
    summaries: dict[str, str] = {}
    for event in facts.stages:
        name = str(event.get("name", ""))
        seconds[name] = seconds.get(name, 0.0) + event["seconds"]
        summaries[name] = str(event.get("summary", ""))
    rows = [(name, summaries[name], format_seconds(spent)) for name, spent in seconds.items()]
    rows.append(("all", "", format_seconds(sum(seconds.values()))))
    return Section("chapters", "Chapters", [Table(("Chapter", "What came of it", "Time"), rows, right=(2,))])


def funnel_section(facts: Facts) -> Section | None:
    """Documents after every stage, and what each rule dropped."""
    if not facts.corpus or not facts.corpus.funnel:
        return None
    funnel = facts.corpus.funnel
    entered = max(funnel[0].documents_in, 1)
    bars = [Bar("crawl", 1.0, (f"{funnel[0].documents_in:,}", "", ""), "records that came in")]
    drops: list[tuple[int, str, str]] = []
    for stage in funnel:
        dropped, of_stage = stage.documents_in - stage.documents_out, max(stage.documents_in, 1)
        values = (f"{stage.documents_out:,}", f"{stage.documents_out / of_stage:.1%}", f"{dropped:,}")
        bars.append(Bar(stage.name, stage.documents_out / entered, values, stage.ran))
        drops += [(count, stage.name, rule) for rule, count in stage.dropped.items() if count]
    kept = funnel[-1].documents_out
    text_bytes = sum(part.text_bytes for part in facts.corpus.parts)
    intro = f"{kept:,} of {funnel[0].documents_in:,} documents were kept ({kept / entered:.1%}), "
    intro += f"{format_bytes(text_bytes)} of text from {len(facts.corpus.inputs)} crawl files"
    intro += f", {format_count(facts.tokens.tokens)} training tokens." if facts.tokens else "."
    drops.sort(key=_largest_first)
    if drops:
        intro += " Most were dropped by " + ", ".join(f"{rule} ({n:,})" for n, _, rule in drops[:3]) + "."
    rows = [(rule, stage, f"{n:,}", f"{n / entered:.1%}") for n, stage, rule in drops]
    blocks: list[Block] = [Text(intro), Bars(("Stage", "Kept", "Of stage", "Dropped"), bars)]
    if rows:
        header = ("Rule", "Stage", "Dropped", "Of crawl")
        caption = f"Why documents were dropped: {len(rows)} rules"
        blocks.append(Table(header, rows, right=(2, 3), caption=caption, folded=len(rows) > 8))
    return Section("data", "Data", blocks)


def _largest_first(drop: tuple[int, str, str]):
    return -drop[0], drop[1:]


def training_section(facts: Facts) -> Section | None:
    blocks: list[Block] = [b for b in (loss_chart(facts), optimizer_charts(facts), throughput_charts(facts)) if b]
    if summary := throughput_summary(facts):
        blocks.append(Pairs(summary))
    return Section("training", "Training", blocks) if blocks else None


def evaluation_section(facts: Facts) -> Section | None:
    """Bits per byte of the last evaluation by source, and of all evaluations over time."""
    if not facts.evaluations:
        return None
    last = facts.evaluations[-1]
    header = ("Held-out text", "Tokens", "Bits per byte", "Unigram", "Lower by")
    rows = [_evaluation_row("all", last)]
    sources = last.get("by_source")
    rows += [_evaluation_row(str(name), part) for name, part in sorted(_items(sources)) if isinstance(part, dict)]
    blocks: list[Block] = [
        Text(
            f"At step {last['step']:,}, on {last['tokens']:,} tokens the model never trained on. The unigram knows "
            "only how often each token occurs in the training set. Lower is better."
        ),
        Table(header, rows, right=(1, 2, 3, 4)),
    ]
    if len(facts.evaluations) > 1:
        earlier = [(f"{e['step']:,}", f"{e['bpb']:.4f}", f"{e['loss']:.4f}") for e in facts.evaluations]
        caption = f"All {len(earlier)} evaluations"
        blocks.append(Table(("Step", "Bits per byte", "Loss"), earlier, right=(0, 1, 2), caption=caption, folded=True))
    return Section("evaluation", "Evaluation", blocks)


def _evaluation_row(name: str, part: dict) -> tuple[str, ...]:
    bpb, unigram = part.get("bpb"), part.get("unigram_bpb")
    lower = ""
    if is_number(bpb) and is_number(unigram) and unigram > 0:
        lower = f"{1 - bpb / unigram:.1%}"
    return (
        name,
        _number(part.get("tokens"), ",.0f"),
        _number(bpb, ".4f"),
        _number(unigram, ".4f"),
        lower,
    )


def _number(value, spec: str) -> str:
    return format(value, spec) if is_number(value) else ""


def samples_section(facts: Facts) -> Section | None:
    """Texts of the last step that has samples; those of earlier steps as a table."""
    if not facts.samples:
        return None
    last = max(e["step"] for e in facts.samples)
    blocks: list[Block] = [
        Text(f"What the model writes after step {last:,}. Model output: not edited, and not to be trusted.")
    ]
    blocks += [Sample(*_prompt_and_text(e)) for e in facts.samples if e["step"] == last]
    earlier = [(f"{e['step']:,}", *_prompt_and_text(e)) for e in facts.samples if e["step"] != last]
    if earlier:
        header = ("Step", "Prompt", "Continuation")
        blocks.append(Table(header, earlier, right=(0,), caption="Samples of earlier steps", folded=True))
    return Section("samples", "Samples", blocks)


def _prompt_and_text(event: dict) -> tuple[str, str]:
    return str(event.get("prompt", "")), str(event.get("text", ""))


def checkpoints_section(facts: Facts) -> Section | None:
    if not facts.checkpoints:
        return None
    stalls = sorted(e["stall_seconds"] for e in facts.checkpoints)
    rows = [(f"{e['step']:,}", format_bytes(e["bytes"]), format_seconds(e["stall_seconds"])) for e in facts.checkpoints]
    text = (
        f"{len(rows)} saved; each was read back and hashed before it counted. Training stood still for "
        f"{format_seconds(stalls[len(stalls) // 2])} at the median, {format_seconds(stalls[-1])} at most."
    )
    blocks: list[Block] = [Text(text)]
    if facts.refused:
        refused = [(f"{e.get('step')}", str(e.get("reason", ""))) for e in facts.refused]
        blocks.append(Table(("Step", "Why it was refused"), refused, right=(0,), caption="Refused on load"))
    header = ("Step", "Size", "Stall")
    blocks.append(Table(header, rows, right=(0, 1, 2), caption=f"All {len(rows)} checkpoints", folded=len(rows) > 6))
    return Section("checkpoints", "Checkpoints", blocks)


def settings_section(facts: Facts) -> Section | None:
    """What was asked for, from the run file."""
    if not facts.run:
        return None
    run, arch = facts.run, facts.run.model
    batch = f"{run.train.global_batch} sequences of {run.train.seq_len:,} tokens ({run.tokens_per_step:,} a step)"
    if run.accumulation > 1:
        batch += f", accumulated over {run.accumulation} microbatches"
    kind = "Llama with QK-norm" if arch.qk_norm else "Llama"
    dense = f", feed-forward {arch.d_ffn}" if len(arch.expert_layers) < arch.num_layers else ""
    experts = [("Experts", _experts(run.model))] if arch.is_moe else []
    return Section(
        "settings",
        "Model and settings",
        [
            Pairs(
                [
                    ("Model", f"{kind}, {arch.num_layers} layers, width {arch.d_model}{dense}"),
                    *experts,
                    ("Attention", _attention(arch)),
                    ("Vocabulary", f"{arch.vocab_size:,}" + (", embeddings tied" if arch.tied_embeddings else "")),
                    ("Batch", batch),
                    ("Optimizer", f"AdamW, peak rate {run.optim.lr:g}, weight decay {run.optim.weight_decay:g}"),
                    ("Schedule", f"{run.schedule.kind}, {run.schedule.warmup_steps} warm-up steps"),
                    ("Precision", run.train.precision),
                    ("Ranks", _ranks(facts, run.parallel.world_size)),
                    ("Seed", f"{run.seed}"),
                ]
            )
        ],
    )


def _attention(arch: Arch) -> str:
    if arch.mla.kv_rank:
        text = f"{arch.num_heads} heads of {arch.head_dim}, latents of {arch.mla.kv_rank}"
    else:
        text = f"{arch.num_heads} query and {arch.num_kv_heads} key/value heads of {arch.head_dim}"
    return text + (f", window of {arch.sliding_window:,} tokens" if arch.sliding_window else "")


def _experts(arch: Arch) -> str:
    moe = arch.moe
    shared = f", {moe.shared_experts} shared" if moe.shared_experts else ""
    dense = f", after {moe.first_dense} dense {_plural(moe.first_dense, 'layer')}" if moe.first_dense else ""
    return f"{moe.num_experts} of width {moe.d_expert:,} in a layer, {moe.top_k} for a token{shared}{dense}"


def _ranks(facts: Facts, ranks: int) -> str:
    """With the layout of every attempt that changed it."""
    told, before = [], {}
    for start in facts.starts:
        layout = start.get("layout")
        if isinstance(layout, dict) and layout and layout != before:
            told.append(layout_text(layout) + (f" from step {start['from_step']:,}" if before else ""))
            before = layout
    return f"{ranks}" + (f": {'; '.join(told)}" if told else "")


def changed_settings_section(facts: Facts) -> Section | None:
    """What was changed on the way, with the user's consent: the settings above are the newest ones."""
    if not facts.changed_settings:
        return None
    rows = [
        (f"{e['step']:,.0f}", str(e.get("key")), str(e.get("old")), str(e.get("new"))) for e in facts.changed_settings
    ]
    return Section(
        "changed-settings",
        "Changed settings",
        [
            Text("The run did not train with one set of settings throughout. These changes were accepted on the way."),
            Table(("After step", "Setting", "Before", "From then on"), rows),
        ],
    )


def machine_section(facts: Facts) -> Section | None:
    """The machine and the versions of the last attempt, as the trainer recorded them."""
    if not facts.starts:
        return None
    last = facts.starts[-1]
    rows = [(str(k).replace("_", " "), _hardware(k, v)) for k, v in _items(last.get("hardware"))]
    rows += [(f"version of {k}", str(v)) for k, v in _items(last.get("versions"))]
    return Section("machine", "Machine and versions", [Pairs(rows)]) if rows else None


def _items(value) -> list[tuple]:
    return list(value.items()) if isinstance(value, dict) else []


def _hardware(name: str, value) -> str:
    if str(name).endswith("bytes") and is_finite(value):
        return format_bytes(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def provenance_section(facts: Facts) -> Section | None:
    """What would show if anything had been another: hashes of inputs, settings and results."""
    rows = sorted(facts.hashes.items())
    trained = facts.starts[-1] if facts.starts else {}
    if trained.get("config_sha256"):
        rows.append(("settings trained with", str(trained["config_sha256"])))
    if trained.get("data_fingerprint"):
        rows.append(("token stream trained on", str(trained["data_fingerprint"])))
    blocks: list[Block] = [Table(("What", "SHA-256"), rows)] if rows else []
    found = facts.hashes.get("token stream found")
    if found and trained.get("data_fingerprint") not in (None, found):
        blocks.append(Text("The token folder that run.toml names is not the one that was trained on: it has changed."))
    if facts.exported:
        difference = _number(facts.exported.get("max_logit_difference"), ".3g")
        blocks.append(
            Text(f"Exported to {facts.exported.get('path')}; read back, its logits differ by at most {difference}.")
        )
    return Section("provenance", "Provenance", blocks) if blocks else None
