import json
from dataclasses import replace

import pytest
from tests.expect import named, refused

from ingot.schema.accepted import AcceptedChanges
from ingot.schema.arch import Moe
from ingot.schema.changes import ChangeClass, class_of
from ingot.schema.guard_record import Measure, read_measures, write_measures
from ingot.trainer.checkpoint.accepted import alters_steps_after, last_change
from ingot.trainer.checkpoint.manifest import read_manifest
from ingot.trainer.launch.checks import (
    drop_measures_of_another_rate,
    record_accepted,
    require_same_experiment,
    require_settings,
    warn_of_past,
)

from .conftest import write_checkpoint

DATA = "d" * 64


def changed(config, key: str, value):
    section, _, name = key.partition(".")
    if not name:
        return replace(config, **{section: value})
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


SAME_BITS = [
    ("name", "other"),
    ("data.tokens", "/elsewhere/tokens"),
    ("data.heldout", "heldout"),
    ("data.tokenizer", "tokenizer.json"),
    ("data.prefetch", 9),
    ("parallel.reshard", False),
    ("checkpoint.every_steps", 7),
    ("checkpoint.keep", 9),
    ("evaluate.every_steps", 5),
    ("watch.log_every", 1),
    ("launch.max_restarts", 0),
    ("launch.timeout_seconds", 5.0),
    ("cost.usd_per_hour", 4.0),
]
SAME_MATHEMATICS = [
    ("train.micro_batch", 4),
    ("train.compile", "on"),
    ("train.device", "auto"),
    ("parallel.dp_shard", 2),
    ("parallel.zero", 3),
    ("parallel.recompute", "full"),
]
OTHER_NUMBERS = [
    ("seed", 1),
    ("train.steps", 200),
    ("train.seq_len", 16),
    ("train.global_batch", 16),
    ("train.precision", "fp32"),
    ("train.tf32", True),
    ("optim.lr", 1e-4),
    ("optim.beta2", 0.99),
    ("optim.weight_decay", 0.0),
    ("optim.clip_norm", 0.5),
    ("schedule.kind", "wsd"),
    ("schedule.warmup_steps", 3),
    ("parallel.grads", "bf16"),
    ("parallel.reduce", "canonical"),
    ("data.mask_documents", True),
    ("data.weights", {"web": 1.0}),
    ("loss", {"z": {"weight": 1e-4}}),
    ("guard.preset", "strict"),
    ("guard.window", 64),
    ("guard.lr_factor", 0.25),
]
REFUSED = [
    ("model.d_model", 64),
    ("model.num_layers", 3),
    ("model.vocab_size", 65),
    ("model.num_heads", 2),
    ("model.rope_theta", 5e5),
    ("model.tied_embeddings", False),
    ("model.feed_forward", "squared_relu"),
    ("model.norm", "layer"),
    ("model.attention", "gated"),
    ("model.block", "parallel"),
    ("model.options", {"parallel": {"scale": 0.5}}),
]


@pytest.fixture
def trained(folder, config):
    write_checkpoint(folder, 40, config, DATA)
    return config


@pytest.mark.parametrize(("key", "value"), SAME_BITS + SAME_MATHEMATICS)
def test_free_settings_change_without_a_word(folder, trained, key, value):
    (change,) = require_same_experiment(folder, changed(trained, key, value), DATA, ())
    kind = ChangeClass.SAME_BITS if (key, value) in SAME_BITS else ChangeClass.SAME_MATHEMATICS
    assert (change.key, change.after, change.kind) == (key, value, kind)
    record_accepted(folder, trained, DATA, [change])
    assert not folder.accepted.exists() and not folder.events.exists()


@pytest.mark.parametrize(("key", "value"), OTHER_NUMBERS)
def test_what_changes_training_needs_consent(folder, trained, key, value):
    config = changed(trained, key, value)
    with refused("E-RUN-CHANGED", step=40, keys=[key]) as asked:
        require_same_experiment(folder, config, DATA, ())
    assert not folder.accepted.exists()
    accepted_key = asked.value.fix.split()[1].rstrip(",")
    changes = require_same_experiment(folder, config, DATA, (accepted_key,))
    assert [change.kind for change in changes] == [ChangeClass.OTHER_NUMBERS]
    assert not folder.accepted.exists()
    record_accepted(folder, config, DATA, changes)
    record_accepted(folder, config, DATA, changes)  # the same command again, before the next checkpoint
    (record,) = json.loads(folder.accepted.read_text())
    assert record["config_sha256"] == config.training_sha256() and record["step"] == 40
    assert require_same_experiment(folder, config, DATA, ()) == changes  # killed before the next checkpoint
    assert not folder.events.exists()  # the first rank logs the change when it holds
    if key == "optim.lr":
        with refused("E-RUN-CHANGED", keys=[key]):
            require_same_experiment(folder, changed(trained, key, value / 2), DATA, ())
        write_checkpoint(folder, 60, trained, DATA)  # the run went on without the change
        with refused("E-RUN-CHANGED", keys=[key], step=60):
            require_same_experiment(folder, config, DATA, ())


def test_a_change_that_was_accepted_stays_accepted_when_another_one_of_the_same_command_is_taken_back(folder, trained):
    longer = changed(trained, "train.steps", 200)
    both, keys = changed(longer, "optim.lr", 30.0), ("optim.lr", "train.steps")
    record_accepted(folder, both, DATA, require_same_experiment(folder, both, DATA, keys))
    for rate, accepted in ((trained.optim.lr, ()), (3.0, ("optim.lr",))):
        require_same_experiment(folder, changed(longer, "optim.lr", rate), DATA, accepted)
    with refused("E-RUN-CHANGED", keys=["optim.lr"]):
        require_same_experiment(folder, changed(longer, "optim.lr", 3.0), DATA, ())
    with refused("E-RUN-CHANGED", keys=["train.steps"]):
        require_same_experiment(folder, changed(both, "train.steps", 300), DATA, ())


def test_a_run_keeps_its_trained_steps(folder, trained):
    with refused("E-RUN-PAST-STEPS", steps=39, step=40):
        require_same_experiment(folder, changed(trained, "train.steps", 39), DATA, ("train.steps",))
    require_same_experiment(folder, changed(trained, "train.steps", 40), DATA, ("train.steps",))


@pytest.mark.parametrize(
    ("before", "after", "past", "alters"),
    [
        ((), ("35-38", "40"), "steps 35-38, 40:", False),
        (("30",), ("30", "39-45", "60"), "steps 39-40:", True),
        (("30-33",), (), "steps 30-33:", False),
        (("41-45",), ("41-42", "43-45"), "", False),
        ((), ("41",), "", True),
    ],
)
def test_data_skip_of_past_steps_is_reported(folder, config, before, after, past, alters):
    """The guard goes on as without a change if no step to come is another one."""
    write_checkpoint(folder, 40, changed(config, "data.skip", before), DATA)
    (change,) = require_same_experiment(folder, changed(config, "data.skip", after), DATA, ("data.skip",))
    lines = []
    warn_of_past(40, [change], lines.append)
    assert [past in line for line in lines] == [True] * bool(past)
    assert alters_steps_after(40, change) is alters and change.keeps_level


def test_the_newest_change_of_the_updates_is_found(folder, trained):
    """Changes of the guard and of data to be passed are none."""
    for key, value, last in (("optim.lr", 1e-4, 40), ("guard.preset", "strict", 20), ("data.skip", ("90",), 20)):
        changes = require_same_experiment(folder, changed(trained, key, value), DATA, (key,))
        accepted = tuple(
            AcceptedChanges(step=step, config_sha256="", data_fingerprint="", changes={of: (1, 2)})
            for step, of in ((10, "seed"), (20, "optim.clip_norm"), (30, "guard.window"))
        )
        manifest = replace(read_manifest(folder.checkpoint(40)), accepted=accepted)
        assert last_change(manifest, changes) == last
    assert last_change(replace(manifest, accepted=None), ()) == 0


def test_measures_of_another_rate_go_before_the_first_checkpoint(folder, config):
    old = Measure(action="pass", first=2, last=4, found=(), lr=100.0)
    own, unknown, lines = replace(old, lr=config.optim.lr), replace(old, lr=0.0), []
    write_measures(folder.guard, [old, own, unknown])
    drop_measures_of_another_rate(folder, config.optim.lr, lines.append)
    assert read_measures(folder.guard) == [own, unknown] and len(lines) == 1 and "100" in lines[0]
    write_measures(folder.guard, [old])
    write_checkpoint(folder, 40, config, DATA)
    drop_measures_of_another_rate(folder, config.optim.lr, lines.append)
    assert read_measures(folder.guard) == [old] and len(lines) == 1


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_another_model_is_refused_even_with_consent(folder, trained, key, value):
    with refused("E-RUN-OTHER-MODEL", keys=[key]):
        require_same_experiment(folder, changed(trained, key, value), DATA, (key,))


def test_the_edits_above_are_of_every_class(folder, trained):
    """The matrix of edits: at least 24, of which at least 8 are free, 10 need consent and 6 are refused."""
    assert len(SAME_BITS + SAME_MATHEMATICS) >= 8 and len(OTHER_NUMBERS) >= 10 and len(REFUSED) >= 6
    by_class = zip(ChangeClass, (SAME_BITS, SAME_MATHEMATICS, OTHER_NUMBERS, REFUSED), strict=True)
    assert all(class_of(key) is kind for kind, edits in by_class for key, _ in edits)


EXPERTS = Moe(num_experts=8, top_k=2, d_expert=16, capacity_factor=1.5, z_loss=1e-3)


def with_moe(config, **changes):
    return changed(config, "model.moe", replace(EXPERTS, **changes))


@pytest.fixture
def sparse(folder, config):
    write_checkpoint(folder, 40, with_moe(config, bias_rate=1e-3), DATA)
    return config


OF_TRAINING = [
    ("noise", 0.0, 0.5),
    ("capacity_factor", 1.5, 1.25),
    ("capacity_factor", 1.5, 0.0),
    ("sequence_loss", 0.0, 1e-4),
    ("global_loss", 0.0, 1e-2),
    ("z_loss", 1e-3, 0.0),
    ("bias_rate", 1e-3, 1e-2),
    ("bias_steps", 0, 60),
]


@pytest.mark.parametrize(("name", "before", "after"), OF_TRAINING)
def test_how_experts_are_trained_changes_with_consent(folder, sparse, name, before, after):
    config, key = with_moe(sparse, **{"bias_rate": 1e-3, name: after}), f"model.moe.{name}"
    with refused("E-RUN-CHANGED", keys=[key], changes={key: [before, after]}) as asked:
        require_same_experiment(folder, config, DATA, ())
    assert f"--accept-change {key}," in asked.value.fix
    (change,) = require_same_experiment(folder, config, DATA, (key,))
    assert change.key == key


@pytest.mark.parametrize(
    ("name", "value"), [("overflow", "fallback"), ("top_k", 1), ("d_expert", 8), ("scores", "sigmoid")]
)
def test_what_experts_are_stays(folder, sparse, name, value):
    config = with_moe(sparse, bias_rate=1e-3, **{name: value})
    with refused("E-RUN-OTHER-MODEL", keys=[f"model.moe.{name}"]):
        require_same_experiment(folder, config, DATA, (f"model.moe.{name}",))


def test_biases_may_come_and_not_go(folder, sparse, config):
    with refused("E-RUN-OTHER-MODEL", keys=["model.moe.bias_rate"], before=1e-3, step=40) as caught:
        require_same_experiment(folder, with_moe(sparse), DATA, ("model.moe.bias_rate",))
    assert named([caught.value.fix], "model.moe.bias_rate = 0.001", "model.moe.bias_steps = 40")
    write_checkpoint(folder, 50, with_moe(config), DATA)
    (change,) = require_same_experiment(folder, with_moe(config, bias_rate=1e-3), DATA, ("model.moe.bias_rate",))
    assert (change.before, change.after) == (0.0, 1e-3)


def test_defaults_that_a_checkpoint_wrote_out_are_no_change(folder, sparse):
    path = folder.checkpoint(40) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["settings"] |= {"model.moe.noise": 0.0, "model.moe.groups": 1}
    path.write_text(json.dumps(manifest))
    assert require_same_experiment(folder, with_moe(sparse, bias_rate=1e-3), DATA, ()) == []


def test_other_tokens_need_consent_wherever_they_lie(folder, trained):
    with refused("E-RUN-CHANGED"):
        require_same_experiment(folder, trained, "e" * 64, ())
    moved = changed(trained, "data.tokens", "/elsewhere/tokens")
    (change,) = require_same_experiment(folder, moved, "e" * 64, ("data.tokens",))
    assert (change.before, change.kind) == ("d" * 12, ChangeClass.OTHER_NUMBERS)


def test_all_changes_are_named_at_once(folder, trained):
    config = changed(changed(trained, "optim.lr", 1.0), "seed", 5)
    with refused("E-RUN-CHANGED", changes={"optim.lr": [0.003, 1.0], "seed": [1234, 5]}):
        require_same_experiment(folder, config, DATA, ())
    with refused("E-RUN-CHANGED", keys=["optim.lr"]) as asked:
        require_same_experiment(folder, config, DATA, ("seed",))
    assert not named([asked.value.fix], "seed")


def test_without_a_checkpoint_everything_may_change(folder, config):
    require_same_experiment(folder, changed(config, "model.d_model", 64), "x", ())


def test_a_damaged_newest_checkpoint_is_not_the_measure(folder, config):
    write_checkpoint(folder, 40, config, DATA)
    write_checkpoint(folder, 60, changed(config, "seed", 9), DATA)
    (folder.checkpoint(60) / "manifest.json").write_text("{}")
    require_same_experiment(folder, config, DATA, ())


@pytest.mark.parametrize(
    ("key", "close"), [("optim.lrr", ["optim.lr"]), ("data.weights.web", ["data.weights"]), ("x", [])]
)
def test_a_confirmed_key_must_be_a_setting(key, close):
    require_settings(["optim.lr", "data.tokens", "data.weights"])
    with refused("E-ACCEPT-KEY", key=key, close=close):
        require_settings(["optim.lr", key])
