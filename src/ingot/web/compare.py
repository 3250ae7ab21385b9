"""Two plans side by side: every figure of both, and by how much the second differs."""

from dataclasses import asdict, dataclass

from ingot.schema.plan import Plan
from ingot.units import format_bytes, format_count, format_seconds, format_usd
from ingot.web.answers import Answer
from ingot.web.state import LAYOUT
from ingot.web.views import bubble, layout_words, verdict


@dataclass(frozen=True)
class _Figure:
    """better: whether less (-1) or more (1) of it is better; 0: neither."""

    label: str
    text: str
    value: float
    better: int


def comparison(a: Answer, b: Answer) -> dict:
    """Rows of two texts, and of the change from a to b; settings that differ first."""
    rows = [_row(label, x, y, "", 0) for label, x, y in _settings(a, b)]
    if a.plan and b.plan:
        rows += [_change(x, y) for x, y in zip(_figures(a, a.plan), _figures(b, b.plan), strict=True)]
    problems = {name: [m for _, m in found.problems] for name, found in (("a", a), ("b", b)) if found.problems}
    return {"rows": rows, "problems": problems}


def _settings(a: Answer, b: Answer):
    before, after = asdict(a.state), asdict(b.state)
    for key in before:
        if before[key] != after[key] and key not in LAYOUT:
            yield key, _shown(before[key]), _shown(after[key])
    if layout_words(a.run) != layout_words(b.run):
        yield "layout", layout_words(a.run), layout_words(b.run)
    for key in ("micro_batch", "zero", "recompute", "schedule", "stages_per_rank", "context", "offload", "recipe"):
        if before[key] != after[key]:
            yield key.replace("_", " "), _shown(before[key]), _shown(after[key])


def _shown(value: int | float | str) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value) or "-"


def _figures(found: Answer, plan: Plan) -> list[_Figure]:
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
