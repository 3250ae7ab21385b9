"""The sections of a report, except those on experts (experts.py) and recovery (recovery.py).

The function of a section takes the run's data, and returns None if the run has no data for the section.
"""

from statistics import median

from ingot.planner.show.layout import degrees_text
from ingot.report.evaluations import number_text
from ingot.report.facts import RunData
from ingot.report.readable import is_finite
from ingot.report.render.charts import loss_chart, optimizer_charts, settled, throughput_charts, throughput_summary
from ingot.report.render.page import (
    Bar,
    Bars,
    Block,
    LabeledValues,
    Section,
    TableBlock,
    Text,
)
from ingot.report.tiers import tiers_table
from ingot.schema import events as kinds
from ingot.schema.arch import Arch
from ingot.schema.checkpoint import FULL
from ingot.units import counted, format_bytes, format_count, format_seconds, plural


def stages_section(data: RunData) -> Section | None:
    """Return the table of chapters (stages of the quickstart), in order. A chapter that ran twice, in a continued
    quickstart, has one row with its total time."""
    if not data.stages:
        return None
    seconds: dict[str, float] = {}
    summaries: dict[str, str] = {}
    for event in data.stages:
        name = str(event.get("name", ""))
        seconds[name] = seconds.get(name, 0.0) + event["seconds"]
        summaries[name] = str(event.get("summary", ""))
    rows = [(name, summaries[name], format_seconds(spent)) for name, spent in seconds.items()]
    rows.append(("all", "", format_seconds(sum(seconds.values()))))
    return Section("chapters", "Chapters", [TableBlock(("Chapter", "What came of it", "Time"), rows, right=(2,))])


def funnel_section(data: RunData) -> Section | None:
    """Return the data funnel: documents after every stage, and the number that each rule dropped."""
    if not data.corpus or not data.corpus.funnel:
        return None
    funnel = data.corpus.funnel
    entered = max(funnel[0].documents_in, 1)
    bars = [Bar("crawl", 1.0, (f"{funnel[0].documents_in:,}", "", ""), "records that came in")]
    drops: list[tuple[int, str, str]] = []
    idle = [(stage.name, stage.ran) for stage in funnel if stage.documents_in == stage.documents_out]
    for stage in funnel:
        dropped, of_stage = stage.documents_in - stage.documents_out, max(stage.documents_in, 1)
        values = (f"{stage.documents_out:,}", f"{stage.documents_out / of_stage:.1%}", f"{dropped:,}")
        if dropped:
            bars.append(Bar(stage.name, stage.documents_out / entered, values, stage.ran))
        drops += [(count, stage.name, rule) for rule, count in stage.dropped.items() if count]
    kept = funnel[-1].documents_out
    text_bytes = sum(part.text_bytes for part in data.corpus.parts)
    intro = f"{kept:,} of {counted(funnel[0].documents_in, 'document')} were kept ({kept / entered:.1%}), "
    intro += f"{format_bytes(text_bytes)} of text from {counted(len(data.corpus.inputs), 'crawl file')}"
    intro += f", {format_count(data.tokens.tokens)} training tokens." if data.tokens else "."
    drops.sort(key=_largest_first)
    if drops:
        intro += " Most were dropped by " + ", ".join(f"{rule} ({n:,})" for n, _, rule in drops[:3]) + "."
    rows = [(rule, stage, f"{n:,}", f"{n / entered:.1%}") for n, stage, rule in drops]
    blocks: list[Block] = [Text(intro), Bars(("Stage", "Kept", "Of stage", "Dropped"), bars)]
    if rows:
        header = ("Rule", "Stage", "Dropped", "Of crawl")
        caption = f"Why documents were dropped: {counted(len(rows), 'rule')}"
        blocks.append(TableBlock(header, rows, right=(2, 3), caption=caption, folded=len(rows) > 5))
    if idle:
        caption = f"{len(idle)} {plural(len(idle), 'stage')} that dropped nothing"
        blocks.append(TableBlock(("Stage", "What ran"), idle, caption=caption, folded=True))
    return Section("data", "Data", blocks)


def _largest_first(drop: tuple[int, str, str]):
    return -drop[0], drop[1:]


def training_section(data: RunData) -> Section | None:
    blocks: list[Block] = [b for b in (loss_chart(data), throughput_charts(data), optimizer_charts(data)) if b]
    if summary := throughput_summary(data):
        blocks.append(LabeledValues(summary))
    return Section("training", "Training", blocks) if blocks else None


def checkpoints_section(data: RunData) -> Section | None:
    if not data.checkpoints and not data.unsaved:
        return None
    if not data.checkpoints:
        return Section("checkpoints", "Checkpoints", [Text("None was saved."), _unsaved(data)])
    stalls = sorted(e["stall_seconds"] for e in data.checkpoints)
    header, rows = _saves_table(data)
    text = (
        f"{len(rows)} saved; each was read back and compared before it counted. Training paused for "
        f"{format_seconds(stalls[len(stalls) // 2])} at the median, {format_seconds(stalls[-1])} at most."
    )
    blocks: list[Block] = [Text(text)]
    if data.weights_saves:
        paused = format_seconds(sum(e["stall_seconds"] for e in data.weights_saves))
        blocks.append(
            Text(f"The weights alone were saved {counted(len(data.weights_saves), 'time')}: {paused} of pauses in all.")
        )
    if data.unused:
        blocks.append(Text(data.unused))
    if data.refused:
        refused = [(f"{e.get('step')}", str(e.get("reason", ""))) for e in data.refused]
        blocks.append(TableBlock(("Step", "Why it was refused"), refused, right=(0,), caption="Refused on load"))
    if data.unsaved:
        blocks.append(_unsaved(data))
    if (tiers := tiers_table(data)) is not None:
        blocks.append(tiers)
    right, caption = tuple(range(len(header))), f"All checkpoints: {len(rows):,}"
    if "Verify" in header:
        caption += "; most of Verify passes during Write"
    blocks.append(TableBlock(header, rows, right=right, caption=caption, folded=len(rows) > 6))
    return Section("checkpoints", "Checkpoints", blocks)


def _saves_table(data: RunData) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows of the table of checkpoints: how long each part of a save took, as far as the log
    has it."""
    columns = (("Stall", "stall_seconds"), ("Snapshot", "snapshot_seconds"), ("Write", "write_seconds"))
    columns += (("Verify", "verify_seconds"), ("Upload", "upload_seconds"))
    uploads = {e["step"]: e["seconds"] for e in data.stored if e.get("what", FULL) == FULL and e["bytes"]}
    saves = [{**e, "upload_seconds": uploads.get(e["step"])} for e in data.checkpoints]
    shown = [(title, name) for title, name in columns if any(is_finite(e.get(name)) for e in saves)]

    def row(save: dict) -> tuple[str, ...]:
        seconds = (format_seconds(save[name]) if is_finite(save.get(name)) else "" for _, name in shown)
        return (f"{save['step']:,}", format_bytes(save["bytes"]), *seconds)

    return ("Step", "Size", *(title for title, _ in shown)), [row(save) for save in saves]


def _unsaved(data: RunData) -> TableBlock:
    """Return the table of saves that failed, and of those left out because an earlier one was still being written."""

    def why(event: dict) -> str:
        if event["kind"] == kinds.CHECKPOINT_FAILED:
            return str(event.get("reason", ""))
        return f"the save of step {event.get('in_flight')} was still being written"

    rows = [(f"{event['step']:,}", event.get("what", "full"), why(event)) for event in data.unsaved]
    return TableBlock(("Step", "Kind", "Why"), rows, right=(0,), caption="Not saved", folded=len(rows) > 6)


def settings_section(data: RunData) -> Section | None:
    """Return the model and the settings of the run file."""
    if not data.run:
        return None
    run, arch = data.run, data.run.model
    batch = f"{counted(run.train.global_batch, 'sequence')} of {run.train.seq_len:,} tokens"
    batch += f" ({run.tokens_per_step:,} a step)"
    if run.accumulation > 1:
        batch += f", accumulated over {run.accumulation} microbatches"
    kind = "Llama with QK-norm" if arch.qk_norm else "Llama"
    dense = f", feed-forward {arch.d_ffn}" if len(arch.expert_layers) < arch.num_layers else ""
    experts = [("Experts", _experts(run.model))] if arch.is_moe else []
    return Section(
        "settings",
        "Model and settings",
        [
            LabeledValues(
                [
                    ("Model", f"{kind}, {counted(arch.num_layers, 'layer')}, width {arch.d_model}{dense}"),
                    *experts,
                    ("Attention", _attention(arch)),
                    ("Vocabulary", f"{arch.vocab_size:,}" + (", embeddings tied" if arch.tied_embeddings else "")),
                    ("Batch", batch),
                    ("Optimizer", f"AdamW, peak rate {run.optim.lr:g}, weight decay {run.optim.weight_decay:g}"),
                    ("Schedule", f"{run.schedule.kind}, {counted(run.schedule.warmup_steps, 'warm-up step')}"),
                    ("Precision", run.train.precision),
                    ("Ranks", _ranks(data, run.parallel.world_size)),
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
    dense = f", after {moe.first_dense} dense {plural(moe.first_dense, 'layer')}" if moe.first_dense else ""
    return f"{moe.num_experts} of width {moe.d_expert:,} in a layer, {moe.top_k} for a token{shared}{dense}"


def _ranks(data: RunData, ranks: int) -> str:
    """Return the number of ranks, with each layout and the step at which it began."""
    layouts, before = [], {}
    for start in data.starts:
        layout = start.get("layout")
        if isinstance(layout, dict) and layout and layout != before:
            layouts.append(degrees_text(layout) + (f" from step {start['from_step']:,}" if before else ""))
            before = layout
    return f"{ranks}" + (f": {'; '.join(layouts)}" if layouts else "")


def changed_settings_section(data: RunData) -> Section | None:
    """Return the settings that were changed during the run with --accept-change."""
    if not data.changed_settings:
        return None
    rows = [
        (f"{e['step']:,.0f}", str(e.get("key")), str(e.get("old")), str(e.get("new"))) for e in data.changed_settings
    ]
    return Section(
        "changed-settings",
        "Changed settings",
        [
            Text("The run did not train with one set of settings throughout. These changes were accepted on the way."),
            TableBlock(("After step", "Setting", "Before", "From then on"), rows),
        ],
    )


def machine_section(data: RunData) -> Section | None:
    """Return the machine and the software versions of the last attempt, as the trainer recorded them."""
    if not data.starts:
        return None
    last = data.starts[-1]
    rows = [(str(k).replace("_", " "), _hardware(k, v)) for k, v in _items(last.get("hardware"))]
    rows += [(f"version of {k}", str(v)) for k, v in _items(last.get("versions"))]
    return Section("machine", "Machine and versions", [LabeledValues(rows)]) if rows else None


def _items(value) -> list[tuple]:
    return list(value.items()) if isinstance(value, dict) else []


def _hardware(name: str, value) -> str:
    if str(name).endswith("bytes") and is_finite(value):
        return format_bytes(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def provenance_section(data: RunData) -> Section | None:
    """Return the section with the hashes of inputs, settings and results."""
    rows = sorted(data.hashes.items())
    trained = data.starts[-1] if data.starts else {}
    if trained.get("config_sha256"):
        rows.append(("settings trained with", str(trained["config_sha256"])))
    if trained.get("data_fingerprint"):
        rows.append(("token stream trained on", str(trained["data_fingerprint"])))
    blocks: list[Block] = [TableBlock(("What", "SHA-256"), rows)] if rows else []
    found = data.hashes.get("token stream found")
    if found and trained.get("data_fingerprint") not in (None, found):
        blocks.append(Text("The token folder that run.toml names is not the one that was trained on: it has changed."))
    if data.exported:
        difference = number_text(data.exported.get("max_logit_difference"), ".3g")
        blocks.append(
            Text(f"Exported to {data.exported.get('path')}; read back, its logits differ by at most {difference}.")
        )
    return Section("provenance", "Provenance", blocks) if blocks else None


def comparison_section(data: RunData) -> Section | None:
    """Return the comparison of the plan with the measurements, for all quantities that both have."""
    plan = data.plan
    if plan is None:
        return None
    rows = comparison_rows(data)
    blocks: list[Block] = []
    if rows:
        shown = [(name, show(p), show(m), f"{m / p:.2f}" if p else "") for name, p, m, show in rows]
        blocks.append(
            Text(
                "The plan was written before training. Step time is the median after each attempt's first log line; "
                "memory is the peak of rank 0. Training time holds evaluation, checkpoints and repeated steps, but not "
                "the start of processes."
            )
        )
        header = ("Quantity", "Predicted", "Measured", "Ratio")
        blocks.append(TableBlock(header, shown, right=(1, 2, 3)))
    total = max(plan.total_memory_bytes, 1)
    parts = sorted(plan.memory_bytes.items(), key=lambda part: -part[1])
    bill = [(name, format_bytes(size), f"{size / total:.0%}") for name, size in parts]
    bill.append(("all", format_bytes(plan.total_memory_bytes), ""))
    caption = "Predicted memory of a rank, by kind"
    blocks.append(TableBlock(("Kind", "Size", "Share"), bill, right=(1, 2), caption=caption, folded=True))
    if plan.formulas:
        formulas = list(plan.formulas.items())
        blocks.append(TableBlock(("Quantity", "Formula"), formulas, caption="How it was predicted", folded=True))
    if plan.warnings:
        blocks.append(TableBlock(("Warning of the plan",), [(w,) for w in plan.warnings]))
    return Section("prediction", "Predicted and measured", blocks)


def comparison_rows(data: RunData) -> list[tuple]:
    """Return rows (quantity, predicted value, measured value, function that formats a value)."""
    plan, events, rows = data.plan, settled(data), []
    if plan is None:
        return rows
    if events and plan.step_seconds:
        measured = median(e["step_seconds"] for e in events)
        rows.append(("Time of a step", plan.step_seconds, measured, format_seconds))
    if data.finished and data.active_seconds and plan.total_seconds:
        rows.append(("Training time", plan.total_seconds, data.active_seconds, format_seconds))
    peaks = [e["peak_memory_bytes"] for e in data.progress.values() if is_finite(e.get("peak_memory_bytes"))]
    if peaks and plan.total_memory_bytes:
        rows.append(("Memory of a rank", plan.total_memory_bytes, max(peaks), format_bytes))
    if data.checkpoints and plan.checkpoint_bytes:
        rows.append(("Size of a checkpoint", plan.checkpoint_bytes, data.checkpoints[-1]["bytes"], format_bytes))
    mfus = [e["mfu"] for e in events if is_finite(e.get("mfu"))]
    if mfus and plan.mfu:
        rows.append(("MFU", plan.mfu, median(mfus), "{:.1%}".format))
    return rows
