"""A run whose mixture is changed on the way: consent, event, ledger and order agree from the first step to the last."""

import json
from dataclasses import replace

from tests.expect import refused

from ingot.cli.main import main
from ingot.config import to_toml
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.accepted import read_accepted
from ingot.schema.run import RunConfig
from ingot.schema.tokens import read_token_manifest
from ingot.storage import write_atomic
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.manifest import list_checkpoints
from ingot.trainer.launch.checks import record_accepted, require_same_experiment
from ingot.trainer.loader.ledger import prove, read_ledger
from ingot.trainer.loader.order import Order, earlier_weights

from .test_loop import run_rank

BATCH = 4
_GUARD = ("guard.preset", "guard.settle_steps")


def change_weights(folder, weights) -> RunConfig:
    """Accept new weights, as `ingot train RUN --set data.weights=... --accept-change data.weights` does."""
    config = load_run(folder.config)
    return accept(folder, replace(config, data=replace(config.data, weights=weights)), "data.weights")


def accept(folder, config: RunConfig, *keys: str) -> RunConfig:
    fingerprint = read_token_manifest((folder.root / config.data.tokens).resolve()).fingerprint()
    with refused("E-RUN-CHANGED", keys=[*keys]):
        require_same_experiment(folder, config, fingerprint, ())
    changes = require_same_experiment(folder, config, fingerprint, keys)
    record_accepted(folder, config, fingerprint, changes)
    write_atomic(folder.config, to_toml(config))
    return config


def test_the_ledger_proves_every_mixture_in_its_steps(fork_ranks, make_run, capsys):
    folder = make_run(steps=12, every_steps=2)
    fork_ranks(run_rank, 1, folder, 4)
    change_weights(folder, {"metal": 1.0, "stone": 1.0})
    fork_ranks(run_rank, 2, replace_ranks(folder, 2), 8)
    replace_ranks(folder, 1)
    config = change_weights(folder, {"stone": 1.0})
    (ending, _), *_ = fork_ranks(run_rank, 1, folder)
    assert ending == (12, False)

    logged = [(e["step"], e["old"], e["new"]) for e in read_events(folder.events, events.SETTING_CHANGED)]
    assert logged == [(4, {}, {"metal": 1.0, "stone": 1.0}), (8, {"metal": 1.0, "stone": 1.0}, {"stone": 1.0})]

    earlier = earlier_weights(read_accepted(folder.accepted), config.data.weights)
    assert [step for step, _ in earlier] == [4, 8]
    manifest = read_token_manifest((folder.root / config.data.tokens).resolve())
    mixes = [(step * BATCH, weights) for step, weights in earlier]
    order = Order(manifest, config.train.seq_len, config.seed, config.data.weights, earlier=mixes)
    ledger = list(read_ledger(folder.ledger, list_checkpoints(folder.checkpoints)[0].manifest.ledger))
    assert [step for step, _ in ledger] == list(range(1, 13))
    prove(ledger, order, BATCH)
    shards, _ = order.locate(order.samples(8 * BATCH, 4 * BATCH))
    assert {manifest.shards[number].source for number in shards} == {"stone"}

    assert main(["ckpt", "prove", str(folder.root), "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert (proof["steps"], proof["counted_steps"], proof["samples"]) == (12, 12, 12 * BATCH)
    changes = [(c["step"], c["key"]) for c in proof["changes"]]
    assert changes == [(5, "data.weights"), (9, "data.weights"), (5, "layout"), (9, "layout")]


def test_a_change_holds_from_the_checkpoint_that_the_run_really_continued_from(fork_ranks, make_run, capsys):
    """The newest checkpoint is damaged in a byte that only the ranks read: the run continues from the one before."""
    folder = make_run(steps=8, every_steps=2)
    fork_ranks(run_rank, 1, folder, 4)
    change_weights(folder, {"stone": 1.0})
    fork_ranks(run_rank, 1, folder, 6)
    flip_a_byte(folder.checkpoint(6) / "rank-00000.safetensors")
    config = load_run(folder.config)
    accept(folder, replace(config, seed=config.seed + 1), "seed")
    (ending, _), *_ = fork_ranks(run_rank, 1, folder)
    assert ending == (8, False)

    logged = [(e["step"], e["key"]) for e in read_events(folder.events, events.SETTING_CHANGED)]
    assert logged == [(4, "data.weights"), (4, "seed")]
    assert [(one.step, {*one.changes}) for one in read_accepted(folder.accepted)] == [(4, {"data.weights", "seed"})]
    assert main(["ckpt", "prove", str(folder.root), "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert [(c["step"], c["key"]) for c in proof["changes"]] == [(5, "seed"), (5, "data.weights")]


def test_a_checkpoint_knows_the_changes_before_it(fork_ranks, make_run, capsys):
    """The run goes back to before a change and is killed; then the later checkpoints are there again."""
    folder = make_run(steps=10, every_steps=2)
    config = load_run(folder.config)
    write_atomic(folder.config, to_toml(replace(config, checkpoint=replace(config.checkpoint, keep=9))))
    fork_ranks(run_rank, 1, folder, 4)
    change_weights(folder, {"stone": 1.0})
    fork_ranks(run_rank, 1, folder, 8)
    away = folder.root / "away"
    away.mkdir()
    for step in (4, 6, 8):
        folder.checkpoint(step).rename(away / folder.checkpoint(step).name)
    fork_ranks(run_rank, 1, folder, 3)
    assert [one.step for one in read_accepted(folder.accepted)] == [2]
    (away / folder.checkpoint(8).name).rename(folder.checkpoint(8))
    assert main(["ckpt", "prove", str(folder.root)]) == 0
    (folder.ledger / "steps-00000005-00000006.i64").unlink()
    assert main(["ckpt", "repair", str(folder.root)]) == 0
    fork_ranks(run_rank, 1, folder)
    assert [one.step for one in read_accepted(folder.accepted)] == [4]
    capsys.readouterr()
    assert main(["ckpt", "prove", str(folder.root), "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert (proof["steps"], [c["step"] for c in proof["changes"] if c["key"] == "data.weights"]) == (10, [5])


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def replace_ranks(folder, ranks: int):
    config = load_run(folder.config)
    write_atomic(folder.config, to_toml(replace(config, parallel=replace(config.parallel, dp_shard=ranks))))
    return folder


def test_the_guard_goes_on_with_its_window_after_another_rate_but_not_after_other_data(fork_ranks, make_run):
    """A new window judges no sizes for a while, in which a rate that is too high does its harm."""
    folder = make_run(steps=12, every_steps=2)
    fork_ranks(run_rank, 1, folder, 4)
    config = load_run(folder.config)
    accept(folder, replace(config, optim=replace(config.optim, lr=2 * config.optim.lr)), "optim.lr")
    assert _window_after(fork_ranks, folder, 6) == (6, [])
    change_weights(folder, {"metal": 1.0, "stone": 1.0})
    held, (line,) = _window_after(fork_ranks, folder, 8)
    first = max(6 + config.guard.ready, config.settled_after) + 1
    assert held == 2 and f"because of data.weights: sizes are judged from step {first} on" in line


def test_a_guard_that_was_off_says_from_which_step_on_it_judges_sizes(fork_ranks, make_run):
    folder = make_run(steps=12, every_steps=2, guard={"preset": "off"})
    assert _window_after(fork_ranks, folder, 4) == (0, [])
    config = load_run(folder.config)
    accept(folder, replace(config, guard=replace(config.guard, preset="guard", settle_steps=0)), *_GUARD)
    held, (line,) = _window_after(fork_ranks, folder, 6)
    assert held == 2 and "has 0 of the 32 healthy steps that it needs: sizes are judged from step 37 on" in line
    assert _window_after(fork_ranks, folder, 8) == (4, [line.replace(" 0 of", " 2 of")])  # as an undisturbed run would


def _window_after(fork_ranks, folder, until: int):
    """Continue the run to a step. Returns the length of the guard's window then, and the lines about it."""

    def rank_of(rank, ranks):
        _, lines = run_rank(rank, ranks, folder, until)
        return [line for line in lines if line.startswith("guard ")]

    (lines,) = fork_ranks(rank_of, 1)
    newest = next(one.manifest for one in list_checkpoints(folder.checkpoints) if one.step == until)
    assert newest
    losses = newest.guard.losses
    return len(losses), lines
