"""Rules of the parts that a run file chooses by name: each is registered, and its own settings are correct."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ingot.config import problems_of
from ingot.plugins.callback import CALLBACKS
from ingot.plugins.layers import LAYERS
from ingot.plugins.load import frame_of, last_line
from ingot.plugins.loss import LOSS_TERMS, TermWeight
from ingot.plugins.optimizer import OPTIMIZERS
from ingot.plugins.registry import INGOT, MAIN, Registry, options_of, options_problems
from ingot.plugins.schedule import SCHEDULES
from ingot.plugins.sink import SINKS, SinkLimits, split_limits
from ingot.schema.arch import Arch
from ingot.schema.run import Optim, RunConfig, Schedule

Problems = Iterator[tuple[str, str]]
_RATES = 2000  # of a schedule that are looked at before a run


def with_known_parts(run: RunConfig) -> RunConfig:
    """Return `run` with ingot's own part in place of each that is not registered here: for estimates about a run whose
    plug-ins are not imported."""
    layers = {key: name for key in LAYERS if (name := getattr(run.model, key)) not in LAYERS[key]}
    model = replace(run.model, options={}, **{key: getattr(Arch, key) for key in layers}) if layers else run.model
    optim = run.optim if run.optim.kind in OPTIMIZERS else replace(run.optim, kind=Optim.kind, options={})
    schedule = run.schedule
    if schedule.kind not in SCHEDULES:
        schedule = replace(schedule, kind=Schedule.kind, options={})
    callbacks = {name: own for name, own in run.callbacks.items() if name in CALLBACKS}
    loss = {name: own for name, own in run.loss.items() if name in LOSS_TERMS}
    sinks = {name: own for name, own in run.sinks.items() if name in SINKS}
    return replace(run, model=model, optim=optim, schedule=schedule, callbacks=callbacks, loss=loss, sinks=sinks)


def parts_of_plugins(run: RunConfig) -> Iterator[str]:
    """Yield, as text, the parts of plug-ins that a run chooses and that declare costs."""
    chosen = [("optim.kind", OPTIMIZERS, run.optim.kind)]
    chosen += [(f"model.{key}", registry, getattr(run.model, key)) for key, registry in LAYERS.items()]
    chosen += [(f"callbacks.{name}", CALLBACKS, name) for name in run.callbacks]
    chosen += [(f"loss.{name}", LOSS_TERMS, name) for name in run.loss]
    for key, registry, name in chosen:
        if registry.module_of(name) != INGOT:
            yield f"{key} {name!r} of {registry.module_of(name)}"


def part_rules(run: RunConfig) -> Problems:
    """Yield (dotted key of the run file, problem and fix) for every chosen part that is unknown or has wrong settings.

    The plug-ins of the run have to be imported before.
    """
    yield from _chosen(OPTIMIZERS, run.optim.kind, "optim.kind", run.optim.options, "optim.options", run)
    yield from _chosen(SCHEDULES, run.schedule.kind, "schedule.kind", run.schedule.options, "schedule.options", run)
    if run.schedule.kind in SCHEDULES:
        for name, problem in SCHEDULES[run.schedule.kind].problems(run.schedule, run.train.steps):
            yield f"schedule.{name}", problem
        yield from _rate_rules(run)
    for name, options in run.callbacks.items():
        key = f"callbacks.{name}"
        yield from _chosen(CALLBACKS, name, key, options, key, run)
    for name, values in run.loss.items():
        key = f"loss.{name}"
        own = {option: value for option, value in values.items() if option != "weight"}
        yield from _chosen(LOSS_TERMS, name, key, own, key, run)
        yield from problems_of(TermWeight, {"weight": values["weight"]} if "weight" in values else {}, key)
    for name, values in run.sinks.items():
        key, (limits, own) = f"sinks.{name}", split_limits(values)
        yield from _chosen(SINKS, name, key, own, key, run)
        yield from problems_of(SinkLimits, limits, key)
    yield from _offload_rules(run)
    yield from _layer_rules(run)


def _rate_rules(run: RunConfig) -> Problems:
    """Yield the first step at which the schedule of a plug-in gives no learning rate, of up to _RATES steps."""
    part, schedule, steps = SCHEDULES[run.schedule.kind], run.schedule, run.train.steps
    if SCHEDULES.module_of(part.name) == INGOT or steps <= schedule.warmup_steps:
        return
    if list(options_problems(part, schedule.options, "schedule.options")):
        return
    options = options_of(part, schedule.options)
    first = schedule.warmup_steps + 1
    for step in dict.fromkeys((*range(first, steps, max((steps - first) // _RATES, 1)), steps)):
        try:
            rate = float(part.rate(step, steps, run.optim.lr, schedule, options))
        except Exception as error:
            place = frame_of(error)
            where = f" ({place[1]}:{place[2]})" if place else ""
            yield (
                "schedule.kind",
                f"{part.name!r} raises {last_line(error)} for step {step}{where}; correct the plug-in",
            )
            return
        if not 0 <= rate < math.inf:
            yield "schedule.kind", f"{part.name!r} gives the learning rate {rate} for step {step}; correct the plug-in"
            return


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
    where = (
        f"no plug-in of this file ({modules}) registers it" if modules else "a plug-in's part needs [plugins] modules"
    )
    yield key, f"{registry.unknown(name)}; {where}"
