"""The report's part about experts: how evenly tokens went to them, over the run and layer by layer."""

from statistics import fmean

from ingot.report.facts import Facts, is_finite
from ingot.report.load_map import NAMES, counted, kind, load_map
from ingot.report.render.charts import expert_charts, spread
from ingot.report.render.page import Block, Chart, Section, Table, Text

_WIDE, _NARROW = 900, 350


def experts_section(facts: Facts) -> Section | None:
    """None of a run without experts."""
    if not facts.experts:
        return None
    last = facts.experts[max(facts.experts)]
    blocks: list[Block] = [Text(_in_words(last))]
    blocks += [charts] if (charts := expert_charts(facts)) else []
    mapped = [e for step in sorted(facts.experts) if has_loads(e := facts.experts[step])]
    if mapped:
        blocks.append(_load_chart(mapped[-1]))
    blocks.append(_table(last))
    return Section("experts", "Experts", blocks)


def _in_words(event: dict) -> str:
    busiest = event["max_load"]
    worst = max(range(len(busiest)), key=busiest.__getitem__)
    text = (
        f"A load of 1 means that an expert takes as many tokens as the others of its layer. In the {event['steps']:,} "
        f"steps up to {event['step']:,}, the busiest expert had {busiest[worst]:.1f}x its share "
        f"(layer {event['layers'][worst]}), and loads deviated by {fmean(event['load_cv']):.2f} (mean over layers)."
    )
    for name, became in (("dropped", "dropped"), ("fallback", "taken by the fallback expert")):
        if event[name] is not None:
            text += (
                f" {fmean(event[name]):.2%} of the assignments were beyond the capacity of their expert, and {became}."
            )
    return text


def _table(event: dict) -> Table:
    columns = [
        ("Layer", event["layers"], ","),
        ("Deviation", event["load_cv"], ".3f"),
        ("Busiest", event["max_load"], ".2f"),
        ("Idlest", event["min_load"], ".2f"),
        ("Entropy (nats)", event["entropy"], ".3f"),
    ]
    for name, title in (("dropped", "Dropped"), ("fallback", "To fallback")):
        if event[name] is not None:
            columns.append((title, event[name], ".2%"))
    rows = [tuple(format(values[i], spec) for _, values, spec in columns) for i in range(len(event["layers"]))]
    caption = f"Loads by layer, steps up to {event['step']:,}"
    header = tuple(name for name, _, _ in columns)
    return Table(header, rows, right=tuple(range(len(header))), caption=caption, folded=len(rows) > 12)


def has_loads(event: dict) -> bool:
    """Whether the loads of all experts are in it, as many of each layer."""
    loads = event.get("loads")
    if not isinstance(loads, list) or len(loads) != len(event["layers"]) or not all(isinstance(r, list) for r in loads):
        return False
    return len({len(row) for row in loads}) == 1 and bool(loads[0]) and all(is_finite(v) for row in loads for v in row)


def _load_chart(event: dict) -> Chart:
    layers, loads = event["layers"], event["loads"]
    title = f"Loads of the {len(loads[0]):,} experts of each layer, steps up to {event['step']:,}"
    rows = [(f"{layers[i]}", *map(str, counted(loads[i]))) for i in spread(list(range(len(layers))), 12)]
    header = ("Layer", *NAMES)
    return Chart(
        title=title,
        wide=load_map(layers, loads, width=_WIDE, label=title),
        narrow=load_map(layers, loads, width=_NARROW, label=title),
        legend=tuple((kind(level), name) for level, name in enumerate(NAMES)),
        table=Table(header, rows, right=tuple(range(len(header))), caption=title),
    )
