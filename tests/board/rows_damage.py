"""Rows of checkpoints that are damaged after they were saved: wrong bits; files cut, emptied, lost, unreadable."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

from ingot.drill.damage import flip
from ingot.drill.oracles import Verdicts
from ingot.errors import CheckpointError
from ingot.schema.run_folder import RunFolder

from . import killpoints
from .bench import Bench
from .row import Row, drawn_mode, judge_recovered, mode_of, random_of, refused_steps, resumed_from

_OLDER, _NEWEST = 4, 8
_FILE = "rank-00000.safetensors"
_DAMAGED = CheckpointError.exit_code
_WEIGHTS = 6  # the step of a save of the weights alone
_KINDS = {"model.": "weights", "optim.": "optimizer", "random.": "random state"}
_WEIGHT_KINDS = {"model.": "weights"}


def regions(checkpoint: Path, kinds: Mapping[str, str] = _KINDS) -> dict[str, tuple[int, int, str]]:
    """Return the kinds of bytes of a tensor file: name -> (first, end, what a refusal has to name).

    kinds: how the keys of a kind begin -> its name.
    """
    data = (checkpoint / _FILE).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = {key: value for key, value in json.loads(data[8:begin]).items() if key != "__metadata__"}
    found = {"header": (0, begin, _FILE)}
    for kind, name in kinds.items():
        key = next(key for key in sorted(header) if key.startswith(kind))
        first, end = header[key]["data_offsets"]
        found[name] = (begin + first, begin + end, _FILE if kind == "random." else f"tensor {key}")
    return found


def three_places(random: Random, first: int, end: int) -> tuple[int, int, int]:
    """Return the first of the bytes first..end-1, one between, and the last."""
    return first, random.randrange(first + 1, end - 1), end - 1


def rs10(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Flip a bit in every kind of bytes of the newest checkpoint: the first one, the last one, and one between."""
    random, settings = random_of("RS10", seed), (drawn_mode(seed),)
    base = bench.base(_NEWEST, *settings)
    folder = bench.folder(base)
    newest = folder.checkpoint(_NEWEST)
    places = {kind: (newest / _FILE, *region) for kind, region in regions(newest).items()}
    segments = sorted(folder.ledger.iterdir())
    assert len(segments) == 2
    for kind, file in (("manifest", newest / "manifest.json"), ("last samples", segments[1])):
        places[kind] = (file, 0, file.stat().st_size, file.name)
    for kind, (file, first, end, named) in places.items():
        for offset in three_places(random, first, end):
            path, bit = file.relative_to(folder.root), random.randrange(8)
            _judge_flip(bench, verdicts, base, path, offset, bit, kind, named, *settings)
    for offset in three_places(random, 0, segments[0].stat().st_size):
        _judge_first_samples(bench, verdicts, base, segments[0].name, offset, random.randrange(8), *settings)
    _judge_weights(bench, verdicts, random)


def flip_of_samples(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Flip a random bit in the samples that only the newest checkpoint lists."""
    random, base = random_of("RS10 samples", seed), bench.base(_NEWEST)
    folder = bench.folder(base)
    file = sorted(folder.ledger.iterdir())[-1]
    offset, bit = random.randrange(file.stat().st_size), random.randrange(8)
    _judge_flip(bench, verdicts, base, file.relative_to(folder.root), offset, bit, "last samples", file.name)


def _judge_flip(
    bench: Bench,
    verdicts: Verdicts,
    base: str,
    file: Path,
    offset: int,
    bit: int,
    kind: str,
    named: str,
    *settings: str,
) -> None:
    flip(bench.copy(base, "flipped").root / file, offset, bit)
    _judge_fallback(bench, verdicts, "flipped", f"{kind}: bit {bit} of byte {offset}", named, *settings)


def _judge_fallback(
    bench: Bench, verdicts: Verdicts, name: str, where: str, named: str, *settings: str, env: dict | None = None
) -> None:
    """Continue the run: the newest checkpoint has to be refused, by a reason with `named`, and the older one taken."""
    folder, ended = bench.folder(name), bench.attempt(name, *settings, env=env)
    problem = "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}"
    if not problem and refused_steps(folder) != [_NEWEST]:
        problem = f"refused the checkpoints of steps {refused_steps(folder)}"
    if not problem and resumed_from(folder) != _OLDER:
        problem = f"continued from step {resumed_from(folder)}"
    log = folder.events.read_text()
    if not problem and named not in log:
        problem = f"no reason names {named}"
    verdicts.judge("o6", where, problem)
    judge_recovered(bench, verdicts, name, where, bench.reference(ranks=1))


def _judge_first_samples(
    bench: Bench, verdicts: Verdicts, base: str, segment: str, offset: int, bit: int, *settings: str
) -> None:
    """Flip a bit in the samples that both checkpoints list: the run refuses, and can be repaired."""
    name, where = "flipped", f"first samples: bit {bit} of byte {offset}"
    folder = bench.copy(base, name)
    flip(folder.ledger / segment, offset, bit)
    ended = bench.attempt(name, *settings)
    refused = ended.code == _DAMAGED and "ingot ckpt repair" in ended.output and segment in ended.output
    verdicts.judge("o6", where, "" if refused else f"exit code {ended.code}: {ended.output[-300:]}")
    repaired = bench.ingot("ckpt", "repair", str(folder.root))
    verdicts.judge("o6", where, "" if repaired.code == 0 else f"not repaired: {repaired.output[-300:]}")
    ended = bench.attempt(name, *settings)
    verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
    judge_recovered(bench, verdicts, name, where, bench.reference(ranks=1))


def _judge_weights(bench: Bench, verdicts: Verdicts, random: Random) -> None:
    """Flip a bit in every kind of bytes of a save of the weights alone: it is named, and training, which never reads
    it, continues from the newest checkpoint."""
    saved = (mode_of("sync"), 'checkpoint.weights_every="2 steps"')  # in the background, some would be left out
    folder = bench.folder(bench.base(_NEWEST, *saved))
    weights = folder.weights.checkpoint(_WEIGHTS).relative_to(folder.root)
    places = {kind: (_FILE, *region) for kind, region in regions(folder.root / weights, _WEIGHT_KINDS).items()}
    places["manifest"] = ("manifest.json", 0, (folder.root / weights / "manifest.json").stat().st_size, "manifest.json")
    for kind, (file, first, end, named) in places.items():
        for offset in three_places(random, first, end):
            where = f"{kind} of the weights alone: byte {offset}"
            copy = bench.copy(folder.root.name, "flipped")
            flip(copy.root / weights / file, offset, random.randrange(8))
            found = bench.ingot("ckpt", "verify", str(copy.root), "--json")
            damaged = [one for one in json.loads(found.output)["checkpoints"] if one["state"] == "NO"]
            right = [one["path"] == str(copy.root / weights) and named in one["note"] for one in damaged]
            refused = found.code == _DAMAGED and right == [True]
            verdicts.judge("o6", where, "" if refused else f"verify: exit code {found.code}: {found.output[-300:]}")
    ended = bench.attempt("flipped", *saved)
    verdicts.judge("o6", where, "" if ended.code == 0 else f"exit code {ended.code}: {ended.output[-300:]}")
    start = resumed_from(copy)
    verdicts.judge("o6", where, "" if start == _NEWEST else f"continued from step {start}")
    judge_recovered(bench, verdicts, "flipped", where, bench.reference(ranks=1))


def rs11(bench: Bench, seed: int, verdicts: Verdicts) -> None:
    """Cut, empty, remove and hide files of the newest checkpoint; then damage all checkpoints, and remove them."""
    random, settings = random_of("RS11", seed), (drawn_mode(seed),)
    base = bench.base(_NEWEST, *settings)

    def cut(file: Path) -> None:
        file.write_bytes(file.read_bytes()[: random.randrange(1, file.stat().st_size)])

    def empty(file: Path) -> None:
        file.write_bytes(b"")

    def into_folder(file: Path) -> None:
        file.unlink()
        file.mkdir()

    changes: dict[str, Callable[[Path], None]] = {
        "cut": cut,
        "empty": empty,
        "missing": Path.unlink,
        "a folder in its place": into_folder,
    }
    for file in (_FILE, "manifest.json"):
        for what, change in changes.items():
            folder = bench.copy(base, "damaged")
            change(folder.checkpoint(_NEWEST) / file)
            _judge_fallback(bench, verdicts, "damaged", f"{file} {what}", file, *settings)
        # Root may read files of every mode, so the system call fails, not the mode.
        folder = bench.copy(base, "damaged")
        hidden = killpoints.fault(folder, "deny", who="rank", deny=f"/step-{_NEWEST:08d}/{file}")
        _judge_fallback(bench, verdicts, "damaged", f"{file} unreadable", file, *settings, env=hidden)
    _judge_refusals(bench, verdicts, base, cut, *settings)


def _judge_refusals(bench: Bench, verdicts: Verdicts, base: str, cut: Callable[[Path], None], *settings: str) -> None:
    """Damage all checkpoints, then remove them: the run must refuse to start again, and leave everything as it is."""
    folder = bench.copy(base, "damaged")
    for step in (_OLDER, _NEWEST):
        cut(folder.checkpoint(step) / _FILE)
    before = sorted(folder.checkpoints.rglob("*"))
    ended = bench.attempt("damaged", *settings)
    refused = ended.code == _DAMAGED and "E-CKPT-NONE-USABLE" in ended.output
    verdicts.judge("o6", "all damaged", "" if refused else f"exit code {ended.code}: {ended.output[-300:]}")
    same = sorted(folder.checkpoints.rglob("*")) == before
    verdicts.judge("o7", "all damaged", "" if same else "the checkpoints were changed")
    verdicts.judge(
        "o8", "all damaged", "" if resumed_from(folder) == 0 and _starts(folder) == 1 else "it started again"
    )
    shutil.rmtree(folder.checkpoints)
    ended = bench.attempt("damaged", *settings)
    refused = ended.code == _DAMAGED and "E-CKPT-VANISHED" in ended.output
    verdicts.judge("o6", "all removed", "" if refused else f"exit code {ended.code}: {ended.output[-300:]}")
    verdicts.judge("o8", "all removed", "" if _starts(folder) == 1 else "it started again")


def _starts(folder: RunFolder) -> int:
    return folder.events.read_text().count('"kind": "run_started"')


ROWS = (
    Row("RS10", "one wrong bit in every kind of bytes of a checkpoint, at 3 places each", rs10),
    Row("RS11", "newest checkpoint cut, empty, missing, unreadable; all damaged; all removed", rs11),
)
