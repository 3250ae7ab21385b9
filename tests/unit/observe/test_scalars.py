"""The numbers of events, by the names that sinks send."""

import re

from ingot.events import read_events
from ingot.observe.scalars import SCALARS, scalars_of
from ingot.schema import events

from .planted import PlantedRun, planted


def test_numbers_of_a_line_have_the_names_of_the_table(tmp_path):
    run = PlantedRun(folder := planted(tmp_path))
    run.line(3)
    step, progress, waits = read_events(folder.events)
    assert scalars_of(step) == {"train/loss": 2.0, "train/grad_norm": 1.0, "train/lr": 1e-3}
    assert scalars_of(progress) == {"train/bpb": 1.0, "train/tokens": 48.0, "perf/tokens_per_second": 100.0}
    assert scalars_of(waits)["perf/computing_seconds"] == 0.5
    assert {name for event in (step, progress, waits) for name in scalars_of(event)} <= SCALARS.keys()


def test_numbers_by_layer_source_and_callback():
    experts = {"kind": events.EXPERTS, "load_cv": [0.5, 1.5], "max_load": [2.0, 3.0], "min_load": [0.1, 0.2]}
    assert scalars_of(experts | {"dropped": None}) == {
        "experts/load_cv": 1.0,
        "experts/max_load": 3.0,
        "experts/min_load": 0.1,
    }
    evaluation = {"kind": events.EVALUATION, "bpb": 1.0, "loss": 2.0, "by_source": {"web": {"bpb": 1.5, "loss": 2.5}}}
    assert scalars_of(evaluation)["eval/web/bpb"] == 1.5
    sources = {"kind": events.SOURCES, "step": 4, "loss": {"web": 2.0}, "share": {"web": 0.25}}
    assert scalars_of(sources) == {"data/web/loss": 2.0, "data/web/share": 0.25}
    assert scalars_of(sources | {"loss": 3.0, "share": None}) == {}
    axes = {"tp": {"exposed": {"mean": 0.25}, "hidden": "damaged"}, "made up": {"exposed": {"mean": 1}}, "cp": 3}
    assert scalars_of({"kind": events.WAITS, "axes": axes}) == {"perf/tp/exposed_seconds": 0.25}
    assert scalars_of({"kind": events.WAITS, "axes": 3}) == {}
    measured = {"train/param_norm": 9.0, "layers/0/grad_norm": 0.5, "experts/route_flips": 0.25, "run/goodput": None}
    unknown = {"layers/<b>/grad_norm": 1.0, "perf/step_seconds": 1.0, "train/unknown": 1.0}
    event = {"kind": events.MEASURED, "step": 4, "values": measured | unknown}
    assert scalars_of(event) == {name: own for name, own in measured.items() if own is not None}
    assert scalars_of({"kind": events.MEASURED, "step": 4, "values": 3}) == {}
    metrics = {"kind": events.METRICS, "by": "own", "values": {"x": 1, "words": "no", "flag": True}}
    assert scalars_of(metrics) == {"callbacks/own/x": 1.0}
    assert scalars_of({"kind": events.FINISHED, "seconds": 3.0}) == {}


def test_names_are_groups_with_a_slash_and_have_meanings():
    groups = r"(train|perf|data|memory|run|experts|checkpoint|eval)/([a-z_]+/)?[a-z_]+"
    assert [name for name, own in SCALARS.items() if not re.fullmatch(groups, name) or not own.meaning] == []
