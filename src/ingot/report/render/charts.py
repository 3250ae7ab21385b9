"""The charts of a run: loss with held-out marks and incidents, gradient norm, learning rate, throughput, data wait,
loads of experts."""

import math
from collections.abc import Sequence
from statistics import fmean, median

from ingot.report.facts import Facts, is_finite
from ingot.report.render.page import Chart, Charts, Table
from ingot.report.render.svg import Line, Mark, line_chart, smooth, thin
from ingot.units import format_count

_WIDE, _NARROW = (900, 320), (350, 270)
_SMALL = (430, 190), (350, 190)


def loss_chart(facts: Facts) -> Chart | None:
    """Training loss of every logged step, smoothed on top, with held-out losses and the unigram's loss beside."""
    raw = [(float(s), float(e["loss"])) for s, e in sorted(facts.steps.items())]
    if len(raw) < 2:
        return None
    window = max(len(raw) // 40, 5) | 1
    lines = [Line("raw", thin(raw)), Line("main", thin(smooth(raw, window), 400))]
    legend = [("main", f"training loss, mean of {window} logged steps"), ("raw", "each logged step")]
    held_out = [(float(e["step"]), float(e["loss"])) for e in facts.evaluations]
    if held_out:
        lines.append(Line("dots", held_out))
        legend.append(("dots", "held-out loss"))
        last = facts.evaluations[-1]
        if last["bpb"] > 0:  # nats per token and bits per byte of the same tokens differ by one factor
            unigram = last["loss"] * last["unigram_bpb"] / last["bpb"]
            lines.append(Line("baseline", [(raw[0][0], unigram), (raw[-1][0], unigram)]))
            legend.append(("baseline", f"unigram baseline on held-out text ({unigram:.2f})"))
    label = f"Training loss in nats per token from step {raw[0][0]:,.0f} to {raw[-1][0]:,.0f}"
    rows = [_loss_row(facts, step) for step in spread(sorted(facts.steps), 10)]
    table = Table(("Step", "Loss", "Gradient norm", "Learning rate"), rows, right=(0, 1, 2, 3), caption=label)
    marks = _incident_marks(facts)
    return _chart("Loss (nats per token)", lines, table, label, (_WIDE, _NARROW), tuple(legend), marks)


def _loss_row(facts: Facts, step: int) -> tuple[str, ...]:
    event = facts.steps[step]
    return f"{step:,}", f"{event['loss']:.4f}", f"{event['grad_norm']:.3f}", f"{event['lr']:.2e}"


def spread(values: list[int], count: int) -> list[int]:
    """At most `count` of `values`, evenly spread, the first and the last among them."""
    if len(values) <= count:
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _incident_marks(facts: Facts, labelled: bool = True) -> list[Mark]:
    return [
        Mark(float(i.fault_step), f"lost at {i.fault_step:,}" if labelled and n < 4 else "")
        for n, i in enumerate(facts.incidents)
    ]


def _chart(title, lines, table, label, sizes, legend=(), marks=(), **options) -> Chart:
    wide, narrow = (
        line_chart(lines, width=width, height=height, label=label, marks=marks, **options) for width, height in sizes
    )
    return Chart(title=title, wide=wide, narrow=narrow, legend=legend, table=table)


def optimizer_charts(facts: Facts) -> Charts | None:
    """Gradient norm and learning rate by step."""
    if len(facts.steps) < 2:
        return None
    steps = sorted(facts.steps)
    norm = [(float(s), float(facts.steps[s]["grad_norm"])) for s in steps]
    lr = [(float(s), float(facts.steps[s]["lr"])) for s in steps]
    return Charts(
        [
            _small("Gradient norm, before clipping", norm, ".3f", facts, smoothed=True),
            _small("Learning rate", lr, ".2e", facts),
        ]
    )


def throughput_charts(facts: Facts) -> Charts | None:
    """Tokens per second and the share of the step that waited for data, by step."""
    if len(facts.progress) < 2:
        return None
    events = [facts.progress[s] for s in sorted(facts.progress)]
    speed = [(float(e["step"]), float(e["tokens_per_second"])) for e in events]
    wait = [(float(e["step"]), e["data_wait_seconds"] / e["step_seconds"]) for e in events if e["step_seconds"] > 0]
    return Charts(
        [
            _small("Tokens per second", speed, ",.0f", facts, y_format="si", from_zero=True),
            _small("Waiting for data (share of a step)", wait, ".2%", facts, y_format=".1%", from_zero=True),
        ]
    )


def _small(title: str, points: Sequence[tuple[float, float]], spec: str, facts: Facts, *, smoothed=False, **options):
    values = sorted(y for _, y in points if math.isfinite(y)) or [math.nan]
    label = f"{title}: {len(points)} points, from {points[0][1]:{spec}} to {points[-1][1]:{spec}}"
    lines = [Line("raw" if smoothed else "main", thin(points, 300))]
    if smoothed:
        lines.append(Line("main", thin(smooth(points, max(len(points) // 40, 5) | 1), 300)))
    row = tuple(format(v, spec) for v in (points[0][1], values[0], median(values), values[-1], points[-1][1]))
    header = ("First", "Lowest", "Median", "Highest", "Last")
    table = Table(header, [row], right=(0, 1, 2, 3, 4), caption=title)
    return _chart(title, lines, table, label, _SMALL, marks=_incident_marks(facts, labelled=False), **options)


def expert_charts(facts: Facts) -> Charts | None:
    """How even the loads of experts were, by step: means over layers, but of the busiest and the idlest expert."""
    if len(facts.experts) < 2:
        return None
    events = [facts.experts[s] for s in sorted(facts.experts)]

    def points(name: str, of_layers=fmean) -> list[tuple[float, float]]:
        return [(float(e["step"]), of_layers(e[name])) for e in events if e[name] is not None]

    charts = [
        _small("Deviation of loads", points("load_cv"), ".3f", facts, from_zero=True),
        _small("Busiest expert (x mean load)", points("max_load", max), ".2f", facts, from_zero=True),
        _small("Entropy of a token's scores (nats)", points("entropy"), ".3f", facts),
    ]
    shares = {"Dropped, beyond capacity": points("dropped"), "To the fallback expert": points("fallback")}
    if shares := {title: found for title, found in shares.items() if len(found) > 1}:
        charts += [_small(t, found, ".2%", facts, y_format=".1%", from_zero=True) for t, found in shares.items()]
    else:
        charts.append(_small("Idlest expert (x mean load)", points("min_load", min), ".2f", facts, from_zero=True))
    return Charts(charts)


def throughput_summary(facts: Facts) -> list[tuple[str, str]]:
    """Medians over the log lines after each attempt's first one, which carries start-up costs."""
    events = settled(facts)
    if not events:
        return []
    rows = [("Tokens per second, median", format_count(median([e["tokens_per_second"] for e in events])))]
    waits = [e["data_wait_seconds"] / e["step_seconds"] for e in events if e["step_seconds"] > 0]
    if waits:
        rows.append(("Waiting for data, median", f"{median(waits):.2%} of a step"))
    if mfus := [e["mfu"] for e in events if is_finite(e.get("mfu"))]:
        rows.append(("MFU, median", f"{median(mfus):.1%}"))
    return rows


def settled(facts: Facts) -> list[dict]:
    """Progress events without the first of each attempt."""
    events = [facts.progress[s] for s in sorted(facts.progress)]
    first = set()
    for start in facts.starts:
        after = [e["step"] for e in events if e["time"] >= start["time"]]
        first.update(after[:1])
    return [e for e in events if e["step"] not in first]
