import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from ingot.data.tasks.drill import GatherLines, MakeLines, first_phase, gather_lines, make_lines
from ingot.data.tasks.store import Store, run_task
from ingot.data.tasks.task import (
    PLACE,
    Attempt,
    Task,
    TaskGroup,
    TaskRef,
    decode,
    encode,
    error_from_json,
    error_to_json,
    registered,
    task_function,
)
from ingot.errors import DataError


def gather(*inputs: TaskRef) -> Task[int]:
    return gather_lines.task(GatherLines(part=0, parts=1, inputs=inputs))


def test_places_are_not_part_of_the_key():
    (here,), (there,), (other,) = (first_phase(1, 20, log=Path("/here")), first_phase(1, 20, log=Path("/there")),
                                   first_phase(1, 21))  # fmt: skip
    assert here.key == there.key != other.key


def test_the_key_names_the_inputs_in_their_order():
    first, second = (task.ref for task in first_phase(2, 20))
    assert len({gather(first, second).key, gather(second, first).key, gather(first).key}) == 3


def test_a_task_survives_json():
    task = make_lines.task(
        MakeLines(seed=1, records=2, faults={"1": "exit"}, wait=0.5, log=Path("/log")), label="label"
    )
    again = Task.from_json(json.loads(json.dumps(task.to_json())))
    assert again == task
    assert again.key == task.key
    assert task.to_json()["module"] == "ingot.data.tasks.drill"


@dataclass(frozen=True)
class Inner:
    numbers: tuple[int, ...]
    pair: tuple[str, float] | None
    where: Path


@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: list[Inner]
    by_name: dict[str, Inner]
    anything: dict[str, Any]
    absent: Inner | None
    place: Annotated[Path, PLACE]


def test_nested_values_survive_json():
    inner = Inner((1, 2), ("a", 0.5), Path("/x"))
    value = Outer(inner, [inner], {"a": inner}, {"b": [1]}, None, Path("/y"))
    assert decode(Outer, json.loads(json.dumps(encode(value)))) == value


def test_references_lead_to_folders_and_results(tmp_path):
    store, tasks = Store(tmp_path), first_phase(2, 20)
    for task in tasks:
        run_task(task, store)
    first = gather(*(task.ref for task in tasks)).resolved(tmp_path).inputs[0]
    assert first.folder == store.folder(tasks[0])
    assert first.result == store.result(tasks[0])
    group = decode(TaskGroup[dict[str, int]], store.group(tasks).name, tmp_path)
    assert [one.result for one in group] == [store.result(task) for task in tasks]
    assert group.folders == [store.folder(task) for task in tasks]
    assert [one.key for one in group[1:]] == [tasks[1].key]


def test_a_group_is_its_members_in_their_order(tmp_path):
    store, tasks = Store(tmp_path), first_phase(2000, 1)
    group = store.group(tasks)
    assert store.group(tasks) == group != store.group(tasks[::-1])
    assert len(encode(group)) < 100


def test_names_are_unique_and_only_functions_of_ingot_run():
    with pytest.raises(ValueError, match="already registered"):

        @task_function("drill_make_lines")
        def other(specification: MakeLines, attempt: Attempt) -> int: ...

    with pytest.raises(ValueError, match="not a module of ingot"):
        registered("abort", "os")
    with pytest.raises(ValueError, match="registers no task function"):
        registered("abort", "ingot.data.tasks.drill")


class _Private(DataError):
    pass


def test_errors_survive_json():
    error = error_from_json(
        json.loads(json.dumps(error_to_json(_Private("E-X-Y", "found", rule="r", fix="f", number=3))))
    )
    assert type(error) is DataError
    assert (error.code, error.found, error.rule, error.fix, error.facts) == ("E-X-Y", "found", "r", "f", {"number": 3})
    other = error_from_json(error_to_json(ValueError("a bug"), first_phase(1, 1)[0]))
    assert isinstance(other, RuntimeError)
    assert "ValueError: a bug in made-0" in str(other)
