"""WARC files packed in every way, with what hostile and careless writers put into them."""

import gzip
import io
import random
import resource

import pytest
from fastwarc.stream_io import ZstdWriter, zstd_train_dictionary_from_samples

from ingot.data.sources.bounded import Limits
from ingot.data.sources.warc import read_warc


def record(number, body=b"words and words ", length=None):
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>" + body
    head = (
        b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:%d>\r\nWARC-Target-URI: http://a.example/%d\r\n"
        b"Content-Type: application/http\r\nContent-Length: %d\r\n\r\n"
    )
    return head % (number, number, len(block) if length is None else length) + block + b"\r\n\r\n"


def zstd(records, dictionary=None, compressed_dictionary=False):
    out = io.BytesIO()
    writer = ZstdWriter(out, dictionary=dictionary, compress_dictionary_frame=compressed_dictionary)
    for one in records:
        writer.write(one)
        writer.finish()
    writer.close()
    return out.getvalue()


def outcomes(tmp_path, data, limits=None):
    """('kept' or the rule, last digit of the URL) per pair."""
    path = tmp_path / "x.warc"
    path.write_bytes(data)
    pairs = read_warc(path, "web", limits)
    return [(drop.rule.removeprefix("read.") if drop else "kept", document.url[-1:]) for document, drop in pairs]


RECORDS = [record(i, b"lorem ipsum %d " % (i * 7919) * 40) for i in range(5)]
DICTIONARY = zstd_train_dictionary_from_samples(
    [record(i, b"lorem ipsum %d " % (i * 7919) * 40) for i in range(999)], 4096
)


@pytest.mark.parametrize("packed", [(None, False), (DICTIONARY, False), (DICTIONARY, True)])
def test_zstd_frames_also_with_dictionary_and_damage(tmp_path, packed):
    data = zstd(RECORDS, *packed)
    assert outcomes(tmp_path, data) == [("kept", str(i)) for i in range(5)]
    frames = data.split(b"\x28\xb5\x2f\xfd")
    damaged = bytearray(data)
    second = len(b"\x28\xb5\x2f\xfd".join(frames[:-3])) + 4
    damaged[second + 8 : second + 14] = b"\xff" * 6
    found = outcomes(tmp_path, bytes(damaged))
    assert [end for rule, end in found if rule == "kept"] == ["0", "1", "3", "4"]
    assert [rule for rule, _ in found if rule != "kept"] == ["bad_record"]
    assert outcomes(tmp_path, data[:-9])[-1][0] == "truncated_file"


def test_one_zstd_frame_over_all_records(tmp_path):
    assert [rule for rule, _ in outcomes(tmp_path, zstd([b"".join(RECORDS)]))] == ["kept"] * 5


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: zstd([data])])
def test_empty_members_hide_nothing(tmp_path, pack):
    """fastwarc takes an empty member for the end of the file."""
    data = pack(RECORDS[0]) + pack(b"") * 3 + pack(RECORDS[1]) + pack(b"\r\n") + pack(RECORDS[2]) + pack(b"")
    kept = [end for rule, end in outcomes(tmp_path, data) if rule == "kept"]
    assert kept == ["0", "1", "2"]


def test_member_that_holds_no_record_is_named(tmp_path):
    data = gzip.compress(RECORDS[0]) + gzip.compress(b"") + gzip.compress(b"note to self") + gzip.compress(RECORDS[1])
    assert outcomes(tmp_path, data) == [("kept", "0"), ("bad_record", ""), ("kept", "1")]


def test_padding_hides_nothing(tmp_path):
    data = gzip.compress(RECORDS[0]) + bytes(3000) + gzip.compress(RECORDS[1]) + bytes(500)
    assert [end for rule, end in outcomes(tmp_path, data) if rule == "kept"] == ["0", "1"]


def test_a_hundred_thousand_members(tmp_path):
    data = gzip.compress(RECORDS[0]) + gzip.compress(b"") * 100_000 + gzip.compress(RECORDS[1])
    assert outcomes(tmp_path, data) == [("kept", "0"), ("kept", "1")]


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: zstd([data]), lambda data: data])
def test_record_that_inflates_beyond_its_limit_is_not_inflated(tmp_path, pack):
    limits = Limits(block_bytes=1 << 20, ratio_floor_bytes=1 << 20)
    data = pack(record(0)) + pack(record(1, bytes(60 << 20))) + pack(record(2))
    assert outcomes(tmp_path, data, limits) == [("kept", "0"), ("too_large", "1"), ("kept", "2")]


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: zstd([data])])
@pytest.mark.parametrize("others", [[], [4, 5]])
def test_records_behind_a_large_one_in_the_same_stream(tmp_path, pack, others):
    """Around it there is no way; through it there is. Another member of several records may follow."""
    large = record(1, random.Random(1).randbytes(3 << 20))
    data = pack(record(0) + large + record(2) + record(3))
    if others and pack is gzip.compress:
        data += pack(b"".join(map(record, others)))
    found = outcomes(tmp_path, data, Limits(block_bytes=1 << 20))
    rest = [("kept", str(number)) for number in (others if pack is gzip.compress else [])]
    assert found == [("kept", "0"), ("too_large", "1"), ("kept", "2"), ("kept", "3"), *rest]


def test_bomb_within_a_stream_of_many_records_is_left(tmp_path):
    data = gzip.compress(record(0) + record(1, bytes(60 << 20)) + record(2))
    found = outcomes(tmp_path, data, Limits(block_bytes=1 << 20, ratio_floor_bytes=1 << 20))
    assert found[0] == ("kept", "0") and ("truncated_file", "1") in found


@pytest.mark.parametrize("length", [5_000_000_000, 2_000_000])
def test_five_gigabytes_that_are_not_there_cost_one_record(tmp_path, length):
    """The file goes on for longer than one record may be: the length leads past its end, or into its middle."""
    following = [record(i % 10, b"words " * 200) for i in range(3000)]
    found = outcomes(tmp_path, record(7) + record(8, length=length) + b"".join(following), Limits(block_bytes=1 << 20))
    assert found[:2] == [("kept", "7"), ("bad_record", "8")] and len(found) == 3002
    assert all(rule == "kept" for rule, _ in found[2:])
    packed = gzip.compress(record(7) + record(8, length=5_000_000_000) + b"".join(following))
    assert outcomes(tmp_path, packed, Limits(block_bytes=1 << 20)) == [("kept", "7"), ("truncated_file", "8")]


def test_zeros_behind_a_record_cost_that_member(tmp_path):
    bomb = gzip.compress(record(0) + bytes(60 << 20))
    found = outcomes(tmp_path, bomb + gzip.compress(record(1)), Limits(ratio_floor_bytes=1 << 20))
    assert [end for rule, end in found if rule == "kept"] == ["0", "1"] and len(found) == 3


def test_nested_gzip_is_no_record(tmp_path):
    data = gzip.compress(record(0)) + gzip.compress(gzip.compress(record(1))) + gzip.compress(record(2))
    found = outcomes(tmp_path, data)
    assert [end for rule, end in found if rule == "kept"] == ["0", "2"] and ("bad_record", "") in found


def test_lying_lengths_are_not_read_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.data.sources.records._MAX_WASTED_BYTES", 1 << 20)
    found = outcomes(tmp_path, b"".join(record(i % 10, length=50_000) for i in range(3000)))
    assert len(found) < 100 and ("truncated_file", "") in found


def test_memory_stays_bounded_over_a_large_file(tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (tmp_path / "x.warc").open("wb") as file:
        for number in range(40):
            file.write(record(number % 10, bytes(4 << 20)))
    assert sum(1 for _ in read_warc(tmp_path / "x.warc", "web")) == 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
