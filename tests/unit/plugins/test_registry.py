"""Registries, and the parts that a run file chooses: unknown names and wrong settings are reported with their line."""

from dataclasses import dataclass

import pytest
from tests.expect import named, refused

from ingot.plugins.optimizer import OPTIMIZERS, OptimizerPart
from ingot.plugins.registry import Part, Registry, options_of, options_problems, resolve
from ingot.plugins.schedule import SCHEDULES, SchedulePart
from ingot.ranges import PositiveSteps, Share
from ingot.theory.rules import load_run, run_problems

RUN = """name = "x"
[model]
vocab_size = 64
d_model = 16
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 8
d_ffn = 32
[data]
tokens = "tokens"
[train]
steps = 10
seq_len = 8
global_batch = 2
micro_batch = 1
"""
PLUGIN = """
from dataclasses import dataclass
from ingot.plugins.callback import CALLBACKS, CallbackPart, StepCallback
from ingot.plugins.schedule import SCHEDULES, SchedulePart
from ingot.ranges import PositiveSteps

@dataclass(frozen=True, kw_only=True)
class Options:
    timescale: PositiveSteps = 10

    def problems(self):
        if self.timescale == 13:
            yield "timescale", "13 is not allowed"

CALLBACKS.register(CallbackPart(name="watch", make=StepCallback, settings=Options))
CALLBACKS.register(CallbackPart(name="plain", make=StepCallback))
SCHEDULES.register(SchedulePart(name="inverse", rate=lambda *args: 1.0, settings=Options))
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    width: PositiveSteps = 3
    share: Share = 0.5


@pytest.fixture
def registry():
    made = Registry("color", "color.kind", (Part(name="red", settings=Settings), Part(name="green")))
    yield made
    Registry.every.remove(made)


@pytest.fixture
def load(lab):
    """`load(text)` reads a run file with `text` after its sections, beside the plug-in."""
    folder = lab(parts=PLUGIN)

    def read(text: str, *, plugins: str = '\n[plugins]\nmodules = ["parts"]\n'):
        (folder / "run.toml").write_text(RUN + text + plugins)
        return load_run(folder / "run.toml")

    return read


def line_of(text: str, start: str) -> int:
    return next(n for n, line in enumerate((RUN + text).splitlines(), 1) if line.startswith(start))


def test_a_part_is_found_by_its_name(registry):
    blue = registry.register(Part(name="blue"))
    assert registry["blue"] is blue and "blue" in registry and registry.names() == ["red", "green", "blue"]
    assert [registry.module_of(name) for name in ("red", "blue")] == ["ingot", "__main__"]


@pytest.mark.parametrize("name", ["red", "blue"])
def test_a_taken_name_is_refused(registry, name):
    registry.register(Part(name="blue"))
    with refused("E-PLUGIN-NAME", kind="color", name=name):
        registry.register(Part(name=name))


@pytest.mark.parametrize("settings", [dict, Settings(width=4)])
def test_settings_that_cannot_be_checked_are_refused(registry, settings):
    with refused("E-PLUGIN-SETTINGS", kind="color", name="blue"):
        registry.register(Part(name="blue", settings=settings))
    assert "blue" not in registry


def test_a_module_is_forgotten_with_its_parts_only(registry):
    registry.register(Part(name="blue"))
    registry.forget("other")
    assert "blue" in registry
    registry.forget("__main__")
    assert registry.names() == ["red", "green"]


def test_an_unknown_name_comes_with_a_suggestion(registry):
    assert named([registry.unknown("gren")], "'gren'", "color", "'green'")
    assert "did you mean" not in registry.unknown("xyz")


def test_settings_are_read_as_every_setting(registry):
    assert options_of(registry["red"], {"width": 4}) == Settings(width=4)
    assert options_of(registry["green"], {}) is None
    problems = dict(options_problems(registry["red"], {"widht": 4, "share": 2.0}, "color.options"))
    assert problems.keys() == {"color.options.widht", "color.options.share"}
    assert named(problems.values(), "'color.options.width'")
    assert [key for key, _ in options_problems(registry["green"], {"a": 1}, "color.options")] == ["color.options.a"]


def test_a_reference_leads_to_a_function(registry):
    import math

    assert resolve("math:sqrt") is math.sqrt and resolve(math.sqrt) is math.sqrt
    for reference in ("math:no_such", "no_such_module:f", "math"):
        with refused("E-PLUGIN-REFERENCE", reference=reference):
            resolve(reference)


GOOD = '[schedule]\nkind = "inverse"\n[schedule.options]\ntimescale = 20\n[callbacks.watch]\n[callbacks.plain]\n'


def test_a_run_with_parts_of_a_plug_in(load):
    run = load(GOOD)
    assert run.schedule.options == {"timescale": 20} and list(run.callbacks) == ["watch", "plain"]
    assert run.plugins.code.keys() == {"parts"}


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ('[schedule]\nkind = "invers"\n', "schedule.kind", ("'inverse'", "parts")),
        ('[optim]\nkind = "adamv"\n', "optim.kind", ("'adamw'",)),
        ("[callbacks.wach]\n", "callbacks.wach", ("'watch'",)),
        ("[callbacks.watch]\ntimescal = 3\n", "callbacks.watch.timescal", ("'callbacks.watch.timescale'",)),
        ("[callbacks.watch]\ntimescale = 0\n", "callbacks.watch.timescale", (0,)),
        ("[callbacks.watch]\ntimescale = 13\n", "callbacks.watch.timescale", (13,)),
        ("[callbacks.plain]\nx = 1\n", "callbacks.plain.x", ("'plain'",)),
        (GOOD.replace("= 20", "= 0"), "schedule.options.timescale", (0,)),
        (GOOD.replace("timescale", "timescal"), "schedule.options.timescal", ("'schedule.options.timescale'",)),
        ("[optim]\n[optim.options]\nmomentum = 0.9\n", "optim.options.momentum", ("'adamw'",)),
    ],
)
def test_a_wrong_part_or_setting_is_reported_with_its_line(load, text, key, words):
    with refused("E-CONFIG-SETTINGS", keys=[key]) as caught:
        load(text)
    line = line_of(text, f"[{key}]" if key == "callbacks.wach" else key.rpartition(".")[2])
    (problem,) = caught.value.facts["problems"]
    assert f"run.toml:{line}: " in problem and named([problem], *words)


def test_a_part_needs_its_plug_in_in_the_run_file(load):
    load(GOOD)
    with refused("E-CONFIG-SETTINGS", keys=["schedule.kind", "callbacks.watch", "callbacks.plain"]) as caught:
        load(GOOD, plugins="")  # this process has imported it, but the ranks of this run would not
    assert named(caught.value.facts["problems"], "'parts'", "plugins.modules")


def test_an_unknown_part_without_plug_ins(load):
    with refused("E-CONFIG-SETTINGS", keys=["callbacks.watch"]) as caught:
        load("[callbacks.watch]\n", plugins="")
    assert named(caught.value.facts["problems"], "[plugins]")


@pytest.mark.parametrize(
    ("parallel", "keys"),
    [
        ({}, []),
        ({"offload": "cpu"}, ["parallel.offload"]),
        ({"offload": "nvme", "offload_folder": "disk"}, ["parallel.offload"]),
        ({"offload": "cpu", "offload_parameters": True, "zero": 3, "dp_shard": 2},
         ["parallel.offload", "parallel.offload_parameters"]),
    ],
)  # fmt: skip
def test_whole_matrices_are_not_offloaded(process, load, parallel, keys):
    from dataclasses import replace

    OPTIMIZERS.register(OptimizerPart(name="whole", make="none:none", moments=lambda *_: 1, whole_matrices=True))
    OPTIMIZERS.register(OptimizerPart(name="pieces", make="none:none", moments=lambda *_: 1))
    run = load("")
    run = replace(run, parallel=replace(run.parallel, **parallel))
    found = {kind: [key for key, _ in run_problems(replace(run, optim=replace(run.optim, kind=kind)))]
             for kind in ("whole", "pieces")}  # fmt: skip
    assert found == {"whole": keys, "pieces": []}


def test_a_schedule_checks_its_own_values(process, load):
    def problems(schedule, steps):
        yield "warmup_steps", f"{steps} is too few"

    SCHEDULES.register(SchedulePart(name="picky", rate=lambda *args: 1.0, problems=problems))
    with refused("E-CONFIG-SETTINGS", keys=["schedule.warmup_steps"]):
        load('[schedule]\nkind = "picky"\n')
