"""A pickle is read as data: nothing is called, and no name is looked up, whatever the bytes are."""

import contextlib
import os
import pickle
import pickletools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.trainer.convert.pickled import Pairs, PickledCall, PickleRefused, read_pickle

MOST = 16 << 20


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_plain_data_comes_back():
    value = [1, -5, 2**40, True, None, 1.5, "text", b"bytes", (), (1,), (1, 2, 3, 4), [[]]]
    assert read_pickle(pickle.dumps(value), (), MOST) == value
    found = read_pickle(pickle.dumps({"a": 1, "b": {"c": (2,)}}), (), MOST)
    assert isinstance(found, Pairs) and found.get("a") == 1 and found.get("b").get("c") == (2,)
    assert found.get("missing") is None


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_call_is_recorded_and_not_made(tmp_path, protocol):
    made = tmp_path / "made"
    data = pickle.dumps(Calls(os.mkdir, str(made)), protocol)
    with pytest.raises(PickleRefused, match=r"posix\.mkdir"):
        read_pickle(data, (), MOST)
    found = read_pickle(data, {"posix.mkdir"}, MOST)  # even if the name were expected
    assert isinstance(found, PickledCall) and found.name == "posix.mkdir" and found.arguments == (str(made),)
    assert not made.exists()
    pickle.loads(data)
    assert made.exists()


@pytest.mark.parametrize("name", ["os.system", "posix.system", "builtins.eval", "torch.load", "torch.Size "])
def test_names_that_are_not_expected_are_refused(name):
    module, _, attribute = name.rpartition(".")
    data = f"c{module}\n{attribute}\n(S'true'\ntR.".encode()
    with pytest.raises(PickleRefused) as caught:
        read_pickle(data, {"torch.Size"}, MOST)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"(.",
        b"N",
        b"NN.",
        b"h\x05.",  # a memo that was not set
        b"\x8a\xff" + b"\x01" * 255 + b".",  # an integer of 2,040 bits
        b"\x8d" + b"\xff" * 8 + b".",  # a text of 2**64 bytes
        b"}(NNNu.",
        b"}Na.",  # a value appended to a dict
        b"(i__main__\nX\n.",
        b"P1\n.",
        b"\x82\x01.",  # an extension code
        b"cos\nsystem\n\x8c\x04true\x85\x81}b}b.",
        b"\xff.",
    ],
)
def test_damaged_pickles_are_refused(data):
    with pytest.raises(PickleRefused):
        read_pickle(data, {"os.system"}, MOST)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data):
    with contextlib.suppress(PickleRefused):
        read_pickle(data, {"torch.Size"}, 1 << 16)


@given(st.data())
def test_a_pickle_with_changed_bytes_is_read_or_refused(data):
    good = bytearray(pickle.dumps({"a": [1, (2, "x")], "b": {"c": 3.5}}))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PickleRefused):
        read_pickle(bytes(good), (), 1 << 16)


@pytest.mark.parametrize(
    "data",
    [
        b"]" * 500_000 + b".",
        b"(" * 500_000 + b".",
        b"N" + b"".join(b"r" + i.to_bytes(4, "little") for i in range(100_000)) + b".",
        b"]" + b"]a" * 250_000 + b".",
        b"\x8c\x01x" * 300_000 + b".",
        pickle.dumps(["😀" + "x" * 3_000_000], 4),
    ],
    ids=["lists", "marks", "memo", "pairs", "texts", "wide text"],
)
def test_objects_count_against_the_memory(data):
    """Objects of a hundred bytes for one byte of the pickle end at the limit."""
    most = 8 << 20
    tracemalloc.start()
    try:
        with pytest.raises(PickleRefused):
            read_pickle(data, (), most)
        assert tracemalloc.get_traced_memory()[1] < most + 6 * len(data)
    finally:
        tracemalloc.stop()


def test_deep_values_are_refused_or_freed_without_a_crash():
    deep = b"N" + b"\x85" * 200_000 + b"."
    assert read_pickle(deep, (), 1 << 30)
    with pytest.raises(PickleRefused):
        read_pickle(deep, (), 1 << 20)


def test_every_opcode_of_pickles_is_read_or_refused():
    """No opcode that does something is passed over in silence."""
    passed = []
    for opcode in pickletools.opcodes:
        if opcode.arg is None and opcode.name != "STOP":
            with contextlib.suppress(PickleRefused):
                read_pickle(opcode.code.encode("latin1") + b"N.", (), MOST)
                passed.append(opcode.name)
    assert passed == []
