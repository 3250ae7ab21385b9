"""What can be picked: model presets, devices, and clusters to start from."""

from functools import cache

from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model, model_names
from ingot.planner.web.choices import LABELS
from ingot.planner.web.searching import KEEPABLE
from ingot.theory.devices import devices
from ingot.theory.params import count_active_parameters, count_parameters
from ingot.units import format_bytes, format_count

_CLUSTERS = {
    "rtx4090": "one 24 GB card",
    "8xh100": "one node",
    "16x8xh100": "16 nodes",
    "128x8xh100": "128 nodes",
    "2048x8xh100": "2,048 nodes",
    "72xgb200": "one NVL72 rack",
    "16x72xgb200": "16 racks",
    "64x8xmi300x": "64 nodes",
    "v5p-256": "a slice, planning only",
}


@cache
def options() -> dict:
    return {
        "models": [_model(name) for name in model_names()],
        "devices": [_device(name) for name in devices()],
        "clusters": [_cluster(name, about) for name, about in _CLUSTERS.items()],
        "keepable": [{"key": key, "label": LABELS[key]} for key in KEEPABLE],
    }


def _model(name: str) -> dict:
    preset = load_model(name)
    size = format_count(count_parameters(preset.arch))
    if preset.arch.is_moe:
        size += f", {format_count(count_active_parameters(preset.arch))} active"
    return {"name": name, "about": preset.about, "size": size, "moe": preset.arch.is_moe}


def _device(name: str) -> dict:
    device = devices()[name]
    one = load_cluster(name)
    label = f"{device.device_name} · {format_bytes(one.memory_bytes)}"
    return {"name": name, "label": label, "kind": device.device, "node": device.node}


def _cluster(name: str, about: str) -> dict:
    cluster = load_cluster(name)
    return {"name": name, "label": f"{cluster.devices:,} x {cluster.device_name}, {about}"}
