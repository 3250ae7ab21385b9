"""The adaptation of a layout after the user has changed one setting, so that its degrees divide the devices.

The changed setting keeps its value. If the adapted layout is still not legal, the page shows the problem.
"""

from collections.abc import Iterable
from dataclasses import replace

from ingot.planner.web.settings import PageSettings
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import SPLIT_BACKWARD, TWO_STAGES, V_SHAPED, Parallel
from ingot.theory.rules.expert import legal_ep
from ingot.theory.schedule import schedule_problems


def settle(settings: PageSettings, arch: Arch, cluster: Cluster, moved: str = "") -> PageSettings:
    """Return the settings with degrees that fit together. moved: the setting that keeps its value. `settings` must have
    a sequence length and a batch."""
    settings = _axes(settings, cluster, moved)
    settings = _pipeline(settings, arch, moved)
    settings = _data(settings, arch, cluster, moved)
    return _schedule(settings, cluster, moved)


def data_ranks(settings: PageSettings, cluster: Cluster) -> int:
    """Return the number of data-parallel ranks; 0 if tp x pp x cp does not divide the devices."""
    model_ranks = settings.tp * settings.pp * settings.cp
    return 0 if cluster.devices % model_ranks else cluster.devices // model_ranks


def accumulation(settings: PageSettings, cluster: Cluster) -> int:
    """Return the number of micro-batches per step on each data-parallel rank; 0 if the batch is not a multiple of
    micro-batch x data-parallel ranks."""
    sequences = settings.micro_batch * data_ranks(settings, cluster)
    return settings.batch // sequences if sequences and settings.batch % sequences == 0 else 0


def _at_most(value: int, legal: Iterable[int]) -> int:
    return max((n for n in legal if n <= value), default=1)


def _divisor(value: int, number: int) -> int:
    """Return the largest divisor of `number` that is at most `value`."""
    return next(n for n in range(min(value, number), 0, -1) if number % n == 0)


def _axes(settings: PageSettings, cluster: Cluster, moved: str) -> PageSettings:
    """Return the settings with cp, pp and tp reduced, in this order, until their product divides the devices. The moved
    setting keeps its value."""
    for axis in ("cp", "pp", "tp"):
        if axis == moved:
            continue
        degree = getattr(settings, axis)
        others = settings.tp * settings.pp * settings.cp // degree
        if cluster.devices % (others * degree):
            fits = cluster.devices % others == 0
            settings = replace(settings, **{axis: _divisor(degree, cluster.devices // others) if fits else 1})
    return replace(settings, context="auto") if settings.cp == 1 else settings


def _pipeline(settings: PageSettings, arch: Arch, moved: str) -> PageSettings:
    if settings.pp == 1:
        return replace(settings, schedule="1f1b", stages_per_rank=0)
    if settings.schedule not in TWO_STAGES or settings.schedule in V_SHAPED:
        settings = replace(settings, stages_per_rank=0)
    else:
        most = max(arch.num_layers // settings.pp, 2)
        settings = replace(settings, stages_per_rank=min(max(settings.stages_per_rank, 2), most))
    if settings.schedule in SPLIT_BACKWARD and settings.zero == 3:
        return replace(settings, schedule="1f1b", stages_per_rank=0) if moved == "zero" else replace(settings, zero=1)
    return settings


def _data(settings: PageSettings, arch: Arch, cluster: Cluster, moved: str) -> PageSettings:
    """Return the settings with dp_replicate, ep and micro-batch reduced until they divide the data-parallel ranks, the
    experts and the batch. The moved setting keeps its value."""
    data = data_ranks(settings, cluster)
    if not data:
        return settings
    if moved != "dp_replicate":
        settings = replace(settings, dp_replicate=_divisor(settings.dp_replicate, data))
    if not arch.is_moe:
        settings = replace(settings, ep=1)
    elif moved != "ep" and data % settings.dp_replicate == 0:
        inside = Parallel(dp_shard=data // settings.dp_replicate, cp=settings.cp, tp=settings.tp)
        settings = replace(settings, ep=_at_most(settings.ep, legal_ep(arch.moe.num_experts, inside)))
    if moved != "micro_batch" and settings.batch % data == 0:
        settings = replace(settings, micro_batch=_divisor(settings.micro_batch, settings.batch // data))
    return settings


def _schedule(settings: PageSettings, cluster: Cluster, moved: str) -> PageSettings:
    """Return the settings with 1F1B, which allows any number of micro-batches, if the schedule does not allow this
    number."""
    count = accumulation(settings, cluster)
    if settings.pp == 1 or not count or moved in ("schedule", "stages_per_rank"):
        return settings
    if any(schedule_problems(settings.schedule, settings.pp, count, settings.stages_per_rank)):
        return replace(settings, schedule="1f1b", stages_per_rank=0)
    return settings
