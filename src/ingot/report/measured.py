"""The sections of a report on numbers that are recorded by name (schema/metrics.py): the weights and their updates, the
loss by source, the layers, and the state of the GPUs."""

from collections.abc import Mapping

from ingot.report.facts import RunData
from ingot.report.render.charts import number_chart
from ingot.report.render.page import Block, Chart, Charts, HeatMap, HeatRow, Section, TableBlock, Text
from ingot.schema.metrics import NewestRow, newest_rows
from ingot.units import format_bytes

_CHARTS = 8  # of the first sources
_FOLDED = 12  # rows
_FLIPS = "experts/route_flips"
# Columns of layers and of GPUs: title, the last part of the name, the format of its values.
_OF_LAYERS = (("Gradient norm", "grad_norm"), ("Activation RMS", "activation_rms"))
_SATURATION = ("Near the largest number", "activation_saturation")
_OF_DEVICES = (
    ("In use", "device/utilization", "{:.0%}"),
    ("Power", "device/power_watts", "{:,.0f} W"),
    ("Limit", "device/power_limit_watts", "{:,.0f} W"),
    ("Clock", "device/sm_clock_mhz", "{:,.0f} MHz"),
    ("Memory clock", "device/memory_clock_mhz", "{:,.0f} MHz"),
    ("Temperature", "device/temperature_celsius", "{:.0f} °C"),
    ("Throttled by", "device/throttle_reasons", ""),
    ("ECC corrected", "device/ecc_corrected", "{:,.0f}"),
    ("ECC uncorrected", "device/ecc_uncorrected", "{:,.0f}"),
)
# Bits of NVML (nvmlClocksThrottleReason...). The others say that a GPU is idle, or what a user set.
_THROTTLED = {0x4: "power limit", 0x8: "hardware", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
_SHOWN = 40


def weights_section(data: RunData) -> Section | None:
    """Return the charts of the norm of the weights, of the size of an update, and of flipped routes; None without."""
    found = [
        number_chart(data, "Norm of the weights", "train/param_norm", ".4g"),
        number_chart(data, "Update over weights", "train/update_ratio", ".2e"),
        number_chart(data, "Routes that flipped since the check before", _FLIPS, ".1%", y_format=".0%", from_zero=True),
    ]
    charts = [chart for chart in found if chart is not None]
    return Section("weights", "Weights and updates", [Charts(charts)]) if charts else None


def sources_section(data: RunData) -> Section | None:
    """Return the training loss of each source, as charts and as a table; None if it was not measured."""
    losses = {name.split("/")[1]: values for name, values in data.measured.items() if _is_of(name, "data", "loss")}
    losses = {source: values for source, values in losses.items() if values}
    if not losses:
        return None
    shares = {source: data.measured.get(f"data/{source}/share") or {} for source in losses}
    order = sorted(losses, key=lambda source: -_newest(shares[source], 0.0))
    found = (number_chart(data, source, f"data/{source}/loss", ".3f") for source in order[:_CHARTS])
    charts: list[Chart] = [chart for chart in found if chart is not None]
    rows = [
        (source, f"{_newest(shares[source], 0.0):.1%}", f"{next(iter(losses[source].values())):.3f}",
         f"{_newest(losses[source], 0.0):.3f}")
        for source in order
    ]  # fmt: skip
    header = ("Source", "Share of the newest log line", "First loss", "Newest loss")
    table = TableBlock(header, rows, right=(1, 2, 3), caption="Nats per token", folded=len(rows) > _FOLDED)
    blocks: list[Block] = [Text("The training loss of the tokens of each source, the largest source first.")]
    return Section("sources", "Loss by source", [*blocks, *([Charts(charts)] if charts else []), table])


def layers_section(data: RunData) -> Section | None:
    """Return the newest measurement of each layer; None if layers were not measured."""
    layers = {name.split("/")[1] for name, values in data.measured.items() if values and name.startswith("layers/")}
    if not layers:
        return None
    columns = [
        (title, field)
        for title, field in (*_OF_LAYERS, _SATURATION)
        if any(data.measured.get(f"layers/{layer}/{field}") for layer in layers)
    ]
    step = max(max(values) for name, values in data.measured.items() if values and name.startswith("layers/"))
    rows = []
    for layer in sorted(layers, key=lambda own: (not own.isdigit(), own.zfill(9))):
        rows.append((layer, *(_shown(field, data.measured.get(f"layers/{layer}/{field}")) for _, field in columns)))
    header = ("Layer", *(title for title, _ in columns))
    table = TableBlock(header, rows, right=tuple(range(1, len(header))), folded=len(rows) > _FOLDED,
                       caption=f"{len(rows):,} layers at step {step:,}")  # fmt: skip
    words = (
        "The norm of the gradient before clipping, and the root mean square of what a layer returns, as measured last."
    )
    return Section("layers", "Layers", [Text(words), table])


def _shown(field: str, values: Mapping[int, float] | None) -> str:
    if not values:
        return ""
    return f"{_newest(values, 0.0):.2%}" if field == _SATURATION[1] else f"{_newest(values, 0.0):.4g}"


def devices_section(data: RunData) -> Section | None:
    """Return the state of the GPU of each rank as it was read last; None if it was not recorded."""
    blocks = device_blocks(newest_rows(data.folder.metrics))
    return Section("devices", "GPUs", blocks) if blocks else None


def device_blocks(rows: Mapping[int, NewestRow]) -> list[Block]:
    """Return the state of the GPU of each rank: those that are throttled, hot or have errors first; [] without any."""
    known = {rank: row.values for rank, row in rows.items() if any(name.startswith("device/") for name in row.values)}
    if not known:
        return []
    columns = [own for own in _OF_DEVICES if any(own[1] in values for values in known.values())]
    order = sorted(known, key=lambda rank: (-_trouble(known[rank]), rank))[:_SHOWN]
    heat = [
        HeatRow(
            f"{rank}",
            (*(_cell(known[rank], name, shape) for _, name, shape in columns), _memory(known[rank])),
            (*(3 * _is_bad(known[rank], name) for _, name, _ in columns), 0),
        )
        for rank in order
    ]
    more = f" Of {len(known):,} GPUs, {_SHOWN} are shown." if len(known) > _SHOWN else ""
    words = f"The state of the GPU of each rank, as NVML reported it last; those with trouble first.{more}"
    return [Text(words), HeatMap(("Rank", *(title for title, _, _ in columns), "Memory"), heat)]


def _cell(values: Mapping[str, float], name: str, shape: str) -> str:
    value = values.get(name)
    if value is None or value != value:
        return ""
    if shape:
        return shape.format(value)
    return ", ".join(words for bit, words in _THROTTLED.items() if int(value) & bit) or "nothing"


def _is_bad(values: Mapping[str, float], name: str) -> bool:
    if name == "device/throttle_reasons":
        return _cell(values, name, "") not in ("", "nothing")
    return name == "device/ecc_uncorrected" and values.get(name, 0.0) > 0


def _trouble(values: Mapping[str, float]) -> int:
    return sum(_is_bad(values, name) for _, name, _ in _OF_DEVICES)


def _memory(values: Mapping[str, float]) -> str:
    value = values.get("device/memory_bytes")
    return "" if value is None or value != value else format_bytes(value)


def _is_of(name: str, group: str, field: str) -> bool:
    return name.startswith(f"{group}/") and name.endswith(f"/{field}")


def _newest(values: Mapping[int, float], otherwise: float) -> float:
    return values[max(values)] if values else otherwise
