"""A row of token shards that are damaged, missing, or others than the manifest says."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from tests.e2e.conftest import BLOCK_BYTES, VOCAB, write_tokens

from ingot.drill.damage import flip_in_place
from ingot.drill.oracles import Verdicts, read_facts
from ingot.errors import DataError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.quarantine_record import Quarantined, read_quarantine, write_quarantine
from ingot.schema.tokens import MANIFEST
from ingot.storage import write_json

from .bench import Bench, options
from .row import Row, judge_recovered, random_of

_SHARDS, _TOKENS = 4, 16_000  # two blocks in each shard, and two thirds of the windows are used in a run
_LEAVES_OUT = ('data.on_damage="quarantine"', "data.max_quarantined=0.6")
_PLANTED = ('plugins.modules=["planted"]', 'plugins.folder="lab"', "callbacks.planted={}")


@dataclass(frozen=True)
class _Kind:
    """do: damages a shard, by its file and a random block. codes: of the errors that may name it."""

    do: Callable[[Path, int], None]
    codes: tuple[str, ...]


def _flipped(path: Path, block: int) -> None:
    flip_in_place(path, block * BLOCK_BYTES + 1000, 3)


def _truncated(path: Path, block: int) -> None:
    os.truncate(path, block * BLOCK_BYTES + 500)


def _missing(path: Path, block: int) -> None:
    path.unlink()


def _swapped(path: Path, block: int) -> None:
    """Two shards of the same size have each other's content."""
    other = next(one for one in sorted(path.parent.glob("*.tokens")) if one != path)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def _wider(path: Path, block: int) -> None:
    path.write_bytes(np.frombuffer(path.read_bytes(), "<u2").astype("<u4").tobytes())


def _foreign(path: Path, block: int) -> None:
    """A token beyond the vocabulary, with right hashes up to the manifest."""
    tokens = np.frombuffer(path.read_bytes(), "<u2").copy()
    tokens[block * BLOCK_BYTES // 2 + 7] = VOCAB
    data = tokens.tobytes()
    parts = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    path.write_bytes(data)
    path.with_suffix(".blocks").write_bytes(digests)
    manifest = json.loads((path.parent / MANIFEST).read_bytes())
    shard = next(one for one in manifest["shards"] if one["name"] == path.stem)
    shard["blocks_sha256"] = hashlib.sha256(digests).hexdigest()
    write_json(path.parent / MANIFEST, manifest)


_KINDS = {
    "flipped": _Kind(_flipped, ("E-SHARD-HASH",)),
    "truncated": _Kind(_truncated, ("E-SHARD-SIZE",)),
    "missing": _Kind(_missing, ("E-SHARD-MISSING",)),
    "swapped": _Kind(_swapped, ("E-SHARD-HASH",)),
    "wider": _Kind(_wider, ("E-SHARD-SIZE",)),
    "foreign": _Kind(_foreign, ("E-SHARD-TOKEN-ID",)),
}


def rs25(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Damage a shard in six ways before the start: the run stops, and continues when it is repaired; or it leaves the
    damaged part out, and has the bits of a run that was directed to do so on sound shards. Then flip a byte while it
    trains, and kill a rank after the damage was recorded."""
    random = random_of("RS25", seed)
    sound = bench.root / "tokens-sound"
    if not sound.exists():
        write_tokens(sound, _TOKENS, _SHARDS)
    for name, kind in _KINDS.items():
        _judge_stop(bench, verdicts, random, f"{name}-stop-{seed}", kind)
        _judge_quarantine(bench, verdicts, random, f"{name}-{seed}", kind)
    _judge_live(bench, verdicts, random, f"live-{seed}")


def _judge_stop(bench: Bench, verdicts: Verdicts, random: Random, name: str, kind: _Kind) -> None:
    tokens, _ = _damaged(bench, random, name, kind)
    ended = bench.train(name, *_options(tokens))
    named = "shard walk-" in ended.output and any(f"ingot explain {code}" in ended.output for code in kind.codes)
    right = ended.code == DataError.exit_code and named
    verdicts.judge("o6", name, "" if right else f"exit code {ended.code}: {ended.output[-300:]}")
    if kind.do is _foreign:  # its manifest is another one
        return
    shutil.rmtree(tokens)
    shutil.copytree(bench.root / "tokens-sound", tokens)
    again = bench.train(name, *_options(tokens))
    verdicts.judge("o6", f"{name}, repaired", "" if again.code == 0 else again.output[-300:])
    # Steps before the one that reads the damage are trained twice, as after any end between two checkpoints.
    judge_recovered(bench, verdicts, name, name, bench.reference(*_settings(bench.root / "tokens-sound")), faults=1)


def _judge_quarantine(bench: Bench, verdicts: Verdicts, random: Random, name: str, kind: _Kind) -> None:
    tokens, path = _damaged(bench, random, name, kind)
    ended = bench.train(name, *_options(tokens, *_LEAVES_OUT))
    found = read_quarantine(bench.folder(name).quarantine)
    logged = list(read_events(bench.folder(name).events, events.QUARANTINED))
    right = ended.code == 0 and found and path.stem in {one.shard for one in found} and len(logged) == len(found)
    right = right and {one.code for one in found} <= set(kind.codes)
    verdicts.judge("o6", name, "" if right else f"exit code {ended.code}, {found}: {ended.output[-300:]}")
    _judge_as_ordered(bench, verdicts, name, tokens if kind.do is _foreign else bench.root / "tokens-sound", found)


def _judge_live(bench: Bench, verdicts: Verdicts, random: Random, name: str) -> None:
    """A rank is killed some steps after a byte was flipped under the running job."""
    tokens = shutil.copytree(bench.root / "tokens-sound", bench.root / f"tokens-{name}")
    (bench.root / "lab").mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).parent / "planted.py", bench.root / "lab" / "planted.py")
    step = random.randrange(2, 8)
    planted = {"BOARD_FAULT": f"kill {random.randrange(2)} {step + 8} on_update"}
    process = bench.start(name, *_options(tokens, *_LEAVES_OUT, *_PLANTED), env=planted)
    bench.wait_for_step(name, step, process)
    path, block = tokens / f"walk-{random.randrange(_SHARDS)}.tokens", random.randrange(2)
    _flipped(path, block)
    ended, found = bench.ended(process), read_quarantine(bench.folder(name).quarantine)
    right = ended.code == 0 and [one.shard for one in found[:1]] == [path.stem]
    verdicts.judge("o6", name, "" if right else f"exit code {ended.code}, {found}: {ended.output[-300:]}")
    _judge_as_ordered(bench, verdicts, name, bench.root / "tokens-sound", found, *_PLANTED, faults=1)


def _judge_as_ordered(
    bench: Bench,
    verdicts: Verdicts,
    name: str,
    tokens: Path,
    found: tuple[Quarantined, ...],
    *more: str,
    faults: int = 0,
) -> None:
    """Judge that the run has the bits of one that had the record from the start."""
    ordered = bench.folder(f"ordered-{name}")
    ordered.root.mkdir()
    write_quarantine(ordered.quarantine, found)
    ended = bench.train(ordered.root.name, *_options(tokens, *more))
    verdicts.judge("o6", f"{name}, ordered", "" if ended.code == 0 else ended.output[-300:])
    judge_recovered(bench, verdicts, name, name, read_facts(ordered), faults=faults)
    proof = bench.ingot("ckpt", "prove", str(bench.folder(name).root))
    exact = proof.code == 0 and "replaced" in proof.output
    verdicts.judge("o3", f"{name}, proved", "" if exact else proof.output[-300:])


def _damaged(bench: Bench, random: Random, name: str, kind: _Kind) -> tuple[Path, Path]:
    """Return a copy of the tokens in which a shard is damaged, and the file of this shard."""
    tokens = shutil.copytree(bench.root / "tokens-sound", bench.root / f"tokens-{name}")
    path = tokens / f"walk-{random.randrange(_SHARDS)}.tokens"
    kind.do(path, random.randrange(2))
    return tokens, path


def _settings(tokens: Path, *more: str) -> tuple[str, ...]:
    return (f'data.tokens="{tokens.name}"', *more)  # beside the run file


def _options(tokens: Path, *more: str) -> list[str]:
    return options(_settings(tokens, *more))


ROWS = (Row("RS25", "a token shard: flipped byte, cut, missing, swapped, of another dtype or vocabulary", rs25),)
