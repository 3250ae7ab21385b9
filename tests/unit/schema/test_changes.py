"""Every setting of a run has one class, which says what a new value means for a run that already trained."""

import dataclasses
import runpy
from collections import Counter
from pathlib import Path

from ingot.schema.arch import Arch
from ingot.schema.changes import CLASSES, MIXTURE, TABLES, ChangeClass, class_of
from ingot.schema.run import DEFAULTS, Data, RunConfig, Train, setting_changes

ROOT = Path(__file__).parents[3]
RUN = RunConfig(
    name="demo",
    model=Arch(vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ffn=64),
    data=Data(tokens="tokens"),
    train=Train(steps=100, seq_len=32, global_batch=8, micro_batch=2),
)


def all_settings(section: type = RunConfig, prefix: str = "") -> list[str]:
    """The dotted keys of all fields of a run file."""
    found = []
    for field in dataclasses.fields(section):
        inner = field.type if dataclasses.is_dataclass(field.type) else None
        found += all_settings(inner, f"{prefix}{field.name}.") if inner else [prefix + field.name]
    return found


def test_every_setting_has_exactly_one_class():
    """A new field has to be put into the table of schema/changes.py."""
    assert Counter(key for key, _ in CLASSES) == Counter(all_settings())
    assert {key for key in RUN.settings() if not key.startswith(TABLES)} == set(all_settings()) - set(TABLES)


def test_the_document_shows_the_classes():
    """After a change of the table: python tools/settings_table.py."""
    tool = runpy.run_path(str(ROOT / "tools" / "settings_table.py"))
    text = tool["DOCUMENT"].read_text("utf-8")
    assert text == tool["with_table"](text)


def test_defaults_are_those_of_a_run_file():
    settings = RUN.settings()
    assert DEFAULTS.items() <= settings.items()
    model = ["vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ffn"]
    needed = {"name", *model, "tokens", "steps", "seq_len", "global_batch", "micro_batch"}
    assert {key.rpartition(".")[2] for key in settings.keys() - DEFAULTS.keys()} == needed


def keys(before: dict, after: RunConfig) -> dict[str, list]:
    return {change.key: [change.before, change.after] for change in setting_changes(before, after.settings())}


def changed(**sections) -> RunConfig:
    return dataclasses.replace(
        RUN, **{name: dataclasses.replace(getattr(RUN, name), **values) for name, values in sections.items()}
    )


def test_a_setting_that_came_later_had_its_default():
    later = {key: value for key, value in RUN.settings().items() if key not in ("train.tf32", "watch.log_every")}
    assert keys(later, RUN) == {}
    run = changed(train={"tf32": True}, watch={"log_every": 1})
    assert keys(later, run) == {"train.tf32": [False, True], "watch.log_every": [10, 1]}


def test_checkpoints_that_recorded_fewer_settings_do_not_show_changes_of_the_others():
    """Checkpoints of the time before every setting was recorded have only settings that needed confirmation then."""
    unknown = ("parallel.grads", "parallel.reduce", "parallel.virtual_ranks", "train.tf32")
    earlier = {k: v for k, v in RUN.settings().items() if not class_of(k).is_free and k not in unknown}
    run = changed(parallel={"grads": "bf16", "dp_shard": 2}, optim={"lr": 0.5})
    assert keys(earlier, run) == {"optim.lr": [0.003, 0.5]}
    assert keys(RUN.settings(), run).keys() == {"optim.lr", "parallel.grads", "parallel.dp_shard"}


def test_a_mixture_is_one_setting():
    run = changed(data={"weights": {"web": 2.0, "code": 1.0}})
    assert keys(RUN.settings(), run) == {MIXTURE: [{}, {"web": 2.0, "code": 1.0}]}
    assert keys(run.settings(), run) == {} and class_of("data.weights.web") is ChangeClass.OTHER_NUMBERS


def test_a_setting_of_another_version_needs_confirmation():
    (change,) = setting_changes(RUN.settings() | {"optim.gone": 1}, RUN.settings())
    assert (change.key, change.kind.is_free) == ("optim.gone", False)
