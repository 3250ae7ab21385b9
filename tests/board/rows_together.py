"""The row of three quiet faults in one run: it ends with the bits of a run that was ordered to pass what they hurt.

A page of junk is in a crawl, and a real build takes it in; one step has fifty times the learning rate; a bit of a
weight flips. The figures of the guard are its defaults, so it judges steps from 169 on; except that the state is hashed
in each step, because a bit that flips between two hashes is trained on.
"""

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
from tests.unit.data.conftest import english, write_crawl

from ingot.data.lineage.purge.history import TokenLayout
from ingot.drill.oracles import Verdicts
from ingot.events import read_events
from ingot.report.lineage.trace import parts_of
from ingot.schema import events
from ingot.schema.guard_record import passed_steps, read_measures
from ingot.schema.run import RunConfig
from ingot.schema.tokens import read_token_manifest
from ingot.theory.rules import load_run
from ingot.trainer.loader.order import Order

from .bench import Bench
from .row import Row, random_of
from .rows_bits import BITS
from .rows_guard import judge_ordered, lab_options

_STEPS, _SEQ_LEN, _BATCH, _VOCAB, _PAGES = 300, 64, 4, 400, 230
_POISON = "http://poison.example/page"
_ODD = "ZQXJKVWY#%@~^*+=|"
_PAGE_FROM = 170  # steps are judged from 169 on: 128 after a warm-up
_RATE, _FLIP = range(205, 235), range(265, 290)
_NEAR = 24  # steps after the high rate in which the run goes back and forth: the page is read outside of them
_HURTS = _SEQ_LEN  # tokens of the page in a step that have to be found, of the 256 of its batch: a whole window
_PASSED = ("--set", "junk.enabled=false", "--set", "language.enabled=false")
_SETTINGS = (
    f"train.steps={_STEPS}",
    f"train.seq_len={_SEQ_LEN}",
    f"train.global_batch={_BATCH}",
    f"train.micro_batch={_BATCH // 2}",
    f"model.vocab_size={_VOCAB}",
    f"model.max_seq_len={_SEQ_LEN}",
    "checkpoint.every_steps=20",
    "schedule.warmup_steps=40",
    "guard.hash_every=1",
    'schedule.kind="planted"',
    'plugins.modules=["planted","flipped"]',
    'plugins.folder="lab"',
    "callbacks.planted={}",
    "callbacks.flipped={}",
)


def together(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """A poisoned page, fifty times the learning rate in a step, and a flipped bit of a weight, in one run: it ends with
    the bits of an undisturbed run that was ordered to pass the recorded steps."""
    pick = random_of("RS23 together", seed)
    rate, flip, rank, name = pick.choice(_RATE), pick.choice(_FLIP), pick.randrange(2), f"together-{seed}"
    data = bench.root / f"crawl-{seed}"
    if (built := _build(bench, data, pick)) != "":
        verdicts.judge("o6", "the build", built)
        return
    settings = (*_SETTINGS, f'data.tokens="{data.name}/tokens/train"')
    lab_options(bench, *settings)  # the plug-ins, without which the run file cannot be read
    config = load_run(bench.run_file, settings)
    free = set(range(_PAGE_FROM, _STEPS + 1)) - set(range(rate, rate + _NEAR))
    run_seed, page = _order(config, data, free)
    settings = (*settings, f"seed={run_seed}")
    planted = {"BOARD_RATE": str(rate), "BOARD_FLIPS": f"{rank} {flip} {pick.choice(BITS)} gradients"}
    ended = bench.train(name, *lab_options(bench, *settings), env=planted)
    folder, where = bench.folder(name), f"page in steps {sorted(page)}, rate in {rate}, flip {planted['BOARD_FLIPS']}"
    damaged = [(event["step"], event["rank"]) for event in read_events(folder.events, events.STATE_DAMAGED)]
    right = ended.code == 0 and damaged == [(flip, rank)]
    verdicts.judge("o6", where, "" if right else f"exit code {ended.code}, {damaged}: {ended.output[-300:]}")
    passed = {step for one in passed_steps(read_measures(folder.guard)) for step in range(one.first, one.last + 1)}
    skipped = {step for event in read_events(folder.events, events.SKIPPED) for step in event["steps"]}
    hurt = {step for step, tokens in page.items() if tokens >= _HURTS}
    missing = sorted((hurt | {rate}) - skipped - passed)
    verdicts.judge("o6", where, f"steps {missing} were trained on" if missing else "")
    near = set(range(rate, rate + _NEAR))  # skipped, and trained again or passed when the run had gone back
    healthy = sorted((skipped | passed) - page.keys() - near)
    verdicts.judge("o6", where, f"healthy steps {healthy} were passed" if healthy else "")
    kept = (skipped - near) | passed
    judge_ordered(bench, verdicts, name, where, '","'.join(map(str, sorted(kept))), {}, *settings)
    bench.drop(data.name)


def _build(bench: Bench, data: Path, pick: random.Random) -> str:
    """Build a crawl that has a page of junk: without a rule, or a phrase again and again. Returns what went wrong."""
    pages = [(f"http://site.example/{number}", english(number), 200) for number in range(_PAGES)]
    words = ["".join(pick.choice(_ODD) for _ in range(6)) for _ in range(pick.choice((4, 20)))]
    junk = "\n".join(" ".join(words[at % len(words)] for at in range(line, line + 5)) for line in range(0, 20, 5))
    pages.insert(pick.randrange(_PAGES), (_POISON, junk, 200))
    data.mkdir()
    crawl = str(write_crawl(data / "crawl.warc.gz", pages))
    command = ("data", "build", crawl, "--out", str(data), "--vocab-size", str(_VOCAB), "--runner", "inline")
    # The rules that would drop such a page are off: the row is about what passes them.
    built = bench.ingot(*command, "--preset", "none", *_PASSED)
    return "" if built.code == 0 else f"exit code {built.code}: {built.output[-300:]}"


def _document(data: Path) -> str:
    """Return the id of the poisoned page in the corpus."""
    for path in sorted((data / "corpus").glob("web-*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).splitlines():
            if (row := json.loads(line))["url"] == _POISON:
                return row["id"]
    raise AssertionError("the build left the page out")


def _order(config: RunConfig, data: Path, free: set[int]) -> tuple[int, Counter[int]]:
    """Return a seed of the run with which the page is read in steps of `free` alone, and its tokens by step."""
    page = _windows(config, data)
    manifest = read_token_manifest(data / "tokens/train")
    samples = config.train.steps * config.train.global_batch
    for seed in range(1000):
        ids, found = Order(manifest, config.train.seq_len, seed).samples(0, samples), Counter[int]()
        for at in np.flatnonzero(np.isin(ids, list(page))).tolist():
            found[1 + at // config.train.global_batch] += page[int(ids[at])]
        if found.keys() <= free and max(found.values(), default=0) >= _HURTS:
            return seed, found
    raise AssertionError("no order of samples reads the page late enough")


def _windows(config: RunConfig, data: Path) -> dict[int, int]:
    """Return the windows with tokens of the poisoned page, and how many each has."""
    tokens, document = data / "tokens/train", _document(data)
    layout = TokenLayout(read_token_manifest(tokens), (tokens,), True)
    order = Order(layout.manifest, config.train.seq_len, 0)
    parts = parts_of(layout, order, np.arange(order.windows.count))
    return {part.sample: part.tokens for part in parts if part.document == document}


ROWS = (Row("RS23 together", "a poisoned page, a rate that is too high and a flipped bit in one run", together),)
