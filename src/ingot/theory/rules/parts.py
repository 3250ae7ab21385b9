"""Rules of the parts that a run file chooses by name: each is registered, and its own settings are correct."""

from collections.abc import Iterator, Mapping
from typing import Any

from ingot.config import problems_of
from ingot.plugins.callback import CALLBACKS
from ingot.plugins.layers import LAYERS
from ingot.plugins.loss import LOSS_TERMS, TermWeight
from ingot.plugins.optimizer import OPTIMIZERS
from ingot.plugins.registry import INGOT, MAIN, Registry, options_problems
from ingot.plugins.schedule import SCHEDULES
from ingot.schema.run import RunConfig

Problems = Iterator[tuple[str, str]]


def part_rules(run: RunConfig) -> Problems:
    """Yield (dotted key of the run file, problem and fix) for every chosen part that is unknown or has wrong settings.

    The plug-ins of the run have to be imported before.
    """
    yield from _chosen(OPTIMIZERS, run.optim.kind, "optim.kind", run.optim.options, "optim.options", run)
    yield from _chosen(SCHEDULES, run.schedule.kind, "schedule.kind", run.schedule.options, "schedule.options", run)
    if run.schedule.kind in SCHEDULES:
        for name, problem in SCHEDULES[run.schedule.kind].problems(run.schedule, run.train.steps):
            yield f"schedule.{name}", problem
    for name, options in run.callbacks.items():
        key = f"callbacks.{name}"
        yield from _chosen(CALLBACKS, name, key, options, key, run)
    for name, values in run.loss.items():
        key = f"loss.{name}"
        own = {option: value for option, value in values.items() if option != "weight"}
        yield from _chosen(LOSS_TERMS, name, key, own, key, run)
        yield from problems_of(TermWeight, {"weight": values["weight"]} if "weight" in values else {}, key)
    yield from _offload_rules(run)
    yield from _layer_rules(run)


def _layer_rules(run: RunConfig) -> Problems:
    arch, chosen = run.model, [getattr(run.model, key) for key in LAYERS]
    for (key, registry), name in zip(LAYERS.items(), chosen, strict=True):
        table = f"model.options.{name}"
        yield from _chosen(registry, name, f"model.{key}", arch.options.get(name, {}), table, run)
    for name in arch.options:
        if name not in chosen:
            yield f"model.options.{name}", f"no layer of the model is {name!r}; choose it, or remove its settings"
    if arch.is_moe and arch.feed_forward != "swiglu":
        found = f"{arch.feed_forward!r} in a model with experts"
        yield "model.feed_forward", f'{found}: experts, and dense blocks beside them, are SwiGLU; use "swiglu"'
    if arch.is_mla and arch.attention != "grouped_query":
        found = f"{arch.attention!r} in a model with latent attention (model.mla)"
        yield "model.attention", f'{found}, which replaces it; use "grouped_query", or remove model.mla'


def _offload_rules(run: RunConfig) -> Problems:
    if run.optim.kind not in OPTIMIZERS or not OPTIMIZERS[run.optim.kind].whole_matrices:
        return
    why = f"not possible with optim.kind = {run.optim.kind!r}, which looks at whole matrices on the device"
    if run.parallel.offload != "none":
        yield "parallel.offload", f'{run.parallel.offload!r} is {why}; use "none", or another optimizer'
    if run.parallel.offload_parameters:
        yield "parallel.offload_parameters", f"is {why}; remove it, or use another optimizer"


def _chosen(
    registry: Registry[Any], name: str, key: str, options: Mapping[str, Any], table: str, run: RunConfig
) -> Problems:
    """Yield the problems of the part `name` that the setting `key` chooses. table: the key of its own settings."""
    if name in registry:
        module = registry.module_of(name)
        if module not in (INGOT, MAIN, *run.plugins.modules):  # this process imported it for another run
            yield key, f"{name!r} is a part of the plug-in {module!r}; add it to plugins.modules"
        yield from options_problems(registry[name], options, table)
        return
    modules = ", ".join(run.plugins.modules)
    where = f"the plug-ins {modules} register no other" if modules else "a plug-in's part needs [plugins] modules"
    yield key, f"{registry.unknown(name)}; {where}"
