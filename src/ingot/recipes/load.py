"""Presets by name: models, and clusters put together from a device and a size."""

import difflib
import re
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from ingot.config import from_dict
from ingot.errors import ConfigError, UsageError
from ingot.planner.propose import Hints
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.theory.peaks import find_accelerator, peak_flops
from ingot.units import parse_bytes

# A process on a GPU before its model: device context, cuBLAS workspaces, NCCL buffers. 1-5 GB are reported.
_CUDA_RUNTIME_BYTES = 2 * 1024**3
# Caching allocators lose 5-10% to fragmentation.
_CUDA_FRAGMENTATION = 0.08
# Time between two kernels that Python launches one by one.
_CUDA_LAUNCH_SECONDS = 6e-6
# What training sustains of the best matrix product seen, over its mix of shapes and at its power limit, and of the
# published memory bandwidth. With these, llm-foundry's published FSDP runs without recomputation come out about
# 10% too fast on A100 and 20% too fast on H100; what runs on the machine itself is measured by doctor --bench.
_SUSTAINED_MATMUL, _SUSTAINED_BANDWIDTH = 0.85, 0.8


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """parameters, active_parameters: the publisher's figures, 0 for shapes of our own and for dense ones.
    train: what is known to work with this model."""

    arch: Arch
    about: str = ""
    source: str = ""
    parameters: int = 0
    active_parameters: int = 0
    train: Hints = field(default_factory=Hints)


@dataclass(frozen=True, kw_only=True)
class _Device:
    device_name: str
    memory: str
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    matmul_efficiency: float
    attention_efficiency: float
    usd_per_hour: float


def _table(name: str) -> dict:
    return tomllib.loads(resources.files("ingot.recipes").joinpath(name).read_text(encoding="utf-8"))


def model_names() -> tuple[str, ...]:
    return tuple(_table("models.toml"))


def load_model(name_or_file: str) -> ModelPreset:
    """A preset's name, or a TOML file with an [arch] section (and [train] hints if wanted). Raises UsageError."""
    path = Path(name_or_file)
    if path.suffix == ".toml":
        return _model_file(path)
    table = _table("models.toml")
    if name_or_file not in table:
        raise _unknown("model preset", name_or_file, tuple(table), "or give a .toml file with an [arch] section")
    return from_dict(ModelPreset, table[name_or_file], where=lambda key: f"models.toml ({name_or_file}.{key})")


def _model_file(path: Path) -> ModelPreset:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the model file {path}: {error.strerror}", fix="give a preset or a file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", rule="a model file is TOML with an [arch] section") from None
    return from_dict(ModelPreset, values, where=lambda key: f"{path} ({key})")


def device_names() -> tuple[str, ...]:
    return tuple(_table("devices.toml"))


def device_preset(device_name: str) -> str | None:
    """The device of devices.toml that the driver calls `device_name`; memory sizes do not tell two of them apart."""
    wanted = find_accelerator(device_name)
    names = (name for name, spec in _table("devices.toml").items() if find_accelerator(spec["device_name"]) == wanted)
    return next(names, None) if wanted else None


def load_cluster(name: str) -> Cluster:
    """'8xh100' is one node with 8 devices, '128x8xh100' is 128 such nodes, 'h200' is one device. Raises UsageError."""
    sizes, device = re.fullmatch(r"((?:\d+x){0,2})(.*)", name.lower()).groups()  # type: ignore[union-attr]
    counts = [int(n) for n in sizes.split("x") if n]
    table = _table("devices.toml")
    if device not in table or 0 in counts:
        raise _unknown("device", device or name, tuple(table), "write 8xh100, 128x8xh100, or give a machine.json")
    spec = from_dict(_Device, table[device], where=lambda key: f"devices.toml ({device}.{key})")
    peaks = {d: p for d in ("bf16", "fp32", "fp8") if (p := peak_flops(spec.device_name, d))}
    return Cluster(
        name=name.lower(),
        device="cuda",
        nodes=counts[0] if len(counts) == 2 else 1,
        devices_per_node=counts[-1] if counts else 1,
        memory_bytes=parse_bytes(spec.memory),
        memory_bandwidth=spec.memory_bandwidth * _SUSTAINED_BANDWIDTH,
        peak_flops=peaks,
        op_seconds=_CUDA_LAUNCH_SECONDS,
        runtime_bytes=_CUDA_RUNTIME_BYTES,
        usd_per_hour=spec.usd_per_hour,
        device_name=spec.device_name,
        matmul_efficiency=spec.matmul_efficiency * _SUSTAINED_MATMUL,
        attention_efficiency=spec.attention_efficiency,
        fragmentation=_CUDA_FRAGMENTATION,
        link_bandwidth=spec.link_bandwidth,
        network_bandwidth=spec.network_bandwidth,
    )


def _unknown(what: str, given: str, known: tuple[str, ...], else_: str) -> UsageError:
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.4)
    fix = (f"did you mean {close[0]!r}? " if close else "") + else_
    return UsageError(f"no {what} {given!r}", rule=f"known: {', '.join(known)}", fix=fix)
