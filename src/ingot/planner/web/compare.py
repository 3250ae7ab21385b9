"""The page's comparison of two plans: every figure of both, and the relative change."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ingot.planner.show.layout import layout_text
from ingot.planner.web.answers import PagePlan, model_of
from ingot.planner.web.views import bubble, verdict
from ingot.schema.plan import Plan
from ingot.units import format_bytes, format_count, format_seconds, format_usd


@dataclass(frozen=True)
class _Figure:
    """A figure of a plan. better: -1 if smaller values are better, 1 if larger ones are, 0 if neither."""

    label: str
    text: str
    value: float
    better: int


def comparison(a: PagePlan, b: PagePlan) -> dict:
    """Return the rows of the comparison: first settings that differ, then figures with the change from a to b."""
    rows = [_row(label, x, y, "", 0) for label, x, y in _settings(a, b)]
    if a.plan and b.plan:
        rows += [_change(x, y) for x, y in zip(_figures(a, a.plan), _figures(b, b.plan), strict=True)]
    problems = {name: [m for _, m in found.problems] for name, found in (("a", a), ("b", b)) if found.problems}
    return {"rows": rows, "problems": problems}


def _settings(a: PagePlan, b: PagePlan) -> Iterator[tuple[str, str, str]]:
    """Yield (label, text for a, text for b) for each setting that differs."""
    for label, say in _WORDS.items():
        if say(a) != say(b):
            yield label, say(a), say(b)
    for key in _FORMS:
        before, after = getattr(a.settings, key), getattr(b.settings, key)
        if before != after:
            yield key.replace("_", " "), str(before) or "-", str(after) or "-"


_FORMS = ("micro_batch", "zero", "recompute", "schedule", "stages_per_rank", "context", "offload", "recipe")
_WORDS: dict[str, Callable[[PagePlan], str]] = {
    "model": lambda found: model_of(found.settings).name,
    "cluster": lambda found: found.cluster.name,
    "sequence": lambda found: f"{found.settings.seq:,} tokens",
    "batch": lambda found: f"{found.settings.batch:,} sequences",
    "tokens": lambda found: format_count(found.settings.tokens),
    "price": lambda found: f"${found.settings.price or found.cluster.usd_per_hour:g} per hour",
    "given MFU": lambda found: f"{found.settings.mfu:g}" if found.settings.mfu else "-",
    "given failures": lambda found: f"{found.settings.failures:g}" if found.settings.failures else "-",
    "layout": lambda found: layout_text(found.run),
}


def _figures(found: PagePlan, plan: Plan) -> list[_Figure]:
    speed = plan.tokens_per_step / plan.step_seconds if plan.step_seconds else 0.0
    seconds, usd = plan.total_seconds, plan.usd
    if plan.outlook:
        seconds = plan.outlook.days * 86400
        usd = sum(plan.outlook.usd_by_kind.values()) or usd
    exposed = sum(line.exposed_seconds for line in plan.communication.values())
    rows = [
        _Figure("memory per device", format_bytes(plan.total_memory_bytes), plan.total_memory_bytes, -1),
        _Figure("step", format_seconds(plan.step_seconds), plan.step_seconds, -1),
        _Figure("tokens/s", format_count(speed), speed, 1),
        _Figure("MFU", f"{plan.mfu or 0.0:.1%}", plan.mfu or 0.0, 1),
        _Figure("bubble", f"{bubble(plan):.1%}", bubble(plan), -1),
        _Figure("exposed communication", format_seconds(exposed), exposed, -1),
        _Figure("duration", format_seconds(seconds), seconds, -1),
        _Figure("cost", format_usd(usd) if usd else "-", usd, -1),
    ]
    fits = verdict(found.run, plan)["fits"]
    return [_Figure("fits", "yes" if fits else "no", float(fits), 1), *rows]


def _change(a: _Figure, b: _Figure) -> dict:
    change = ""
    if a.label != "fits" and a.value and b.value:
        ratio = b.value / a.value - 1
        change = f"{ratio:+.1%}" if abs(ratio) >= 5e-4 else "same"
    judged = 0 if a.value == b.value or change == "same" else (1 if b.value > a.value else -1) * a.better
    return _row(a.label, a.text, b.text, change, judged)


def _row(label: str, a: str, b: str, change: str, judged: int) -> dict:
    return {"label": label, "a": a, "b": b, "change": change, "judged": judged}
