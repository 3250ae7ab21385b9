import os
import pickle
from pathlib import Path

import pytest
from tests.expect import refused

from ingot.errors import CheckpointError, ResourceError
from ingot.schema.checkpoint import FileEntry
from ingot.trainer.checkpoint import agree
from ingot.trainer.checkpoint.agree import from_all_ranks, from_rank_zero, on_all_ranks
from ingot.trainer.checkpoint.message import RankError, as_error, read_message, unpack_json
from ingot.trainer.checkpoint.part import RankBlocks, assemble


def outcome(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def exercise(rank, ranks):
    def fail_on(bad, error):
        def part():
            if rank in bad:
                raise error
            return rank * 10

        return part

    def refuse(parts):
        raise CheckpointError("E-CKPT-HASH", f"{parts} are refused")

    return [
        outcome(lambda: from_rank_zero(lambda: rank + 5)),
        outcome(lambda: from_rank_zero(fail_on([0], ValueError("no")))),
        outcome(lambda: from_rank_zero(fail_on([0], KeyError("no")))),
        outcome(lambda: from_rank_zero(fail_on([1], KeyError("never called")))),
        outcome(lambda: from_all_ranks(lambda: rank * 10, sum)),
        outcome(lambda: from_all_ranks(lambda: rank * 10, refuse)),
        outcome(lambda: from_all_ranks(fail_on([1, 2], CheckpointError("E-CKPT-HASH", f"by rank {rank}")), sum)),
        outcome(lambda: from_all_ranks(fail_on([2], TypeError("bug")), sum)),
        outcome(lambda: on_all_ranks(fail_on([1], OSError(28, "full")))),
    ], outcome(lambda: on_all_ranks(fail_on([], None)))


def test_all_ranks_hear_the_same(fork_ranks):
    results = fork_ranks(exercise, 3)
    assert [own for _, own in results] == [0, 10, 20]
    same = [
        5,
        "ValueError: no",
        "RankError: rank 0: KeyError: 'no'",
        0,
        30,
        "CheckpointError: [0, 10, 20] are refused",
        "CheckpointError: by rank 1",
        "RankError: rank 2: TypeError: bug",
        "OSError: [Errno 28] full",
    ]
    for shared, _ in results:
        assert shared == same


def refuse_by_name(rank, ranks):
    """A missing file, an error with facts, text that JSON escapes, and a value that has no JSON form."""

    def fail():
        raise CheckpointError("E-CKPT-SIZE", "ä\udcff", rule="r", fix="f", path="x", bytes=7, sizes=[1, 2])

    found = []
    for find in (lambda: Path("/no/such/file").read_bytes(), fail, object, lambda: Path("x"), lambda: "\udcff"):
        try:
            found.append(from_rank_zero(find))
        except CheckpointError as error:
            found.append((error.code, error.found, error.rule, error.fix, error.facts))
        except Exception as error:
            found.append((type(error).__name__, getattr(error, "filename", None)))
    return found


def test_errors_arrive_with_class_and_facts(fork_ranks):
    facts = {"path": "x", "bytes": 7, "sizes": [1, 2]}
    for missing, refused_, no_json, _, text in fork_ranks(refuse_by_name, 2):
        assert missing == ("FileNotFoundError", "/no/such/file")
        assert refused_ == ("E-CKPT-SIZE", "ä\udcff", "r", "f", facts)
        assert no_json == ("RankError", None)
        assert text == "\udcff"


def too_large(rank, ranks):
    agree.MAX_PART_BYTES = agree.MAX_RESULT_BYTES = 100
    found = []
    for call in (
        lambda: from_rank_zero(lambda: "x" * 101),
        lambda: from_all_ranks(lambda: "x" * (101 if rank else 1), len),
        lambda: from_all_ranks(lambda: rank, sum),
    ):
        try:
            found.append(call())
        except ResourceError as error:
            found.append((error.code, error.facts["most"]))
    return found


def test_a_message_has_a_largest_size(fork_ranks):
    refusal = ("E-RANKS-MESSAGE", 100)
    assert fork_ranks(too_large, 2) == [[refusal, refusal, 1]] * 2


@pytest.mark.parametrize("odd", [{("a", 1): 2}, float("nan"), {1, 2}, [object()]])
def test_an_error_with_odd_facts_is_sent(odd):
    """A rank that cannot send its error would keep the others waiting."""
    with refused("E-CKPT-SIZE"):
        read_message(as_error(CheckpointError("E-CKPT-SIZE", "x", rule="r", fix="f", odd=odd)), unpack_json)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize(
    "message",
    [
        *(b"", b"?1", b"+", b"+{", b"-", b"-{}", b"-[]", b"-null", b'-{"kind":"Path","found":"x"'),
        *(b"+" + b"[" * 100_000, b"+" + pickle.dumps(Bomb()), b"-" + pickle.dumps(Bomb()), pickle.dumps(Bomb())),
        b'-{"kind":"CheckpointError","code":"E-X","found":"","rule":"","fix":"","facts":7}',
        b'-{"kind":"OSError","found":"","errno":"x","strerror":"","filename":null}',
    ],
)
def test_a_hostile_message_is_an_error_and_runs_nothing(message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RankError):
        read_message(message, unpack_json)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["SystemExit", "Exception", "require", "catalogs", "__builtins__", "Preempted", "x"])
def test_only_errors_of_ingot_are_rebuilt_by_name(kind):
    with pytest.raises(RankError, match="found"):
        read_message(b'-{"kind":"%s","found":"found"}' % kind.encode(), unpack_json)


def test_the_blocks_of_a_rank_arrive_as_they_were():
    kinds = {"a": ("float32", (4, 6)), "step": ("float32", ())}
    written = [("a", (0, 0), (2, 6)), ("a", (2, 0), (2, 6)), ("step", (), ())]
    part = RankBlocks.pack(FileEntry(bytes=100, sha256="0" * 64), kinds, written, [1, 2**32 - 1, 3], 1.5)
    data = part.to_bytes()
    assert RankBlocks.from_bytes(data) == part and assemble([RankBlocks.from_bytes(data)]) == assemble([part])
    for wrong in (data + b"x", data[:-1], data[:9]):
        with pytest.raises(ValueError):
            RankBlocks.from_bytes(wrong)


def test_one_process_needs_no_group():
    assert from_rank_zero(lambda: 3) == 3
    assert from_all_ranks(lambda: 3, sum) == 3
    assert on_all_ranks(lambda: 4) == 4
    with pytest.raises(TypeError, match="bug"):
        on_all_ranks(lambda: (_ for _ in ()).throw(TypeError("bug")))
