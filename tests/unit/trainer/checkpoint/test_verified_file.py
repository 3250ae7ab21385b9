"""A file that is flushed and compared in groups, here of four chunks, while it is written."""

import errno
import fcntl
import os
import random

import pytest
from tests.expect import refused

from ingot.trainer.checkpoint import verified_file as module
from ingot.trainer.checkpoint.verified_file import VerifiedFile, verified_file

CHUNK, GROUP = 4096, 4 * 4096
SIZES = [0, 1, CHUNK, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP, 6 * GROUP + CHUNK + 5]


@pytest.fixture(params=["direct", "cached"])
def way(request, monkeypatch):
    """Small groups, on a file system with direct writes (if the one of the tests has them) and on one without."""
    monkeypatch.setattr(module, "_CHUNK", CHUNK)
    monkeypatch.setattr(module, "_GROUP", GROUP)
    if request.param == "cached":
        monkeypatch.setattr(module, "_bypass_cache", lambda file, on: False)
    return request.param


def content_of(size: int) -> memoryview:
    return memoryview(random.Random(size).randbytes(size))


def write(path, content: memoryview, pieces: int = 7) -> None:
    """Write `content` in pieces of random sizes."""
    cuts = sorted(random.Random(1).choices(range(len(content) + 1), k=pieces - 1))
    with verified_file(path, len(content)) as file:
        for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            file.write(content[begin:end])


@pytest.mark.parametrize("size", SIZES)
def test_the_file_has_the_bytes(tmp_path, way, size):
    write(tmp_path / "x", content_of(size))
    assert (tmp_path / "x").read_bytes() == content_of(size)


@pytest.mark.parametrize("size", [GROUP, 3 * GROUP, 3 * GROUP + 1])
@pytest.mark.parametrize("group", [0, 1, 2, 3])
def test_a_byte_that_the_disk_changed_is_noticed_in_every_group(tmp_path, way, monkeypatch, size, group):
    """The wrong byte is there as soon as its group was flushed, which is the last moment before it is read."""
    place, flushed, flush = min((group + 1) * GROUP, size) - 1, [], os.fsync

    def damage(fd):
        flush(fd)
        flushed.append(fd)
        if len(flushed) == place // GROUP + 1:
            with (tmp_path / "x").open("r+b") as file:
                file.seek(place)
                right = file.read(1)[0]
                file.seek(place)
                file.write(bytes([right ^ 16]))

    monkeypatch.setattr(module.os, "fsync", damage)
    with refused("E-CKPT-READ-BACK", path=str(tmp_path / "x")):
        write(tmp_path / "x", content_of(size))


@pytest.mark.parametrize("size", [1, CHUNK, GROUP, GROUP + 7])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_is_noticed(tmp_path, way, monkeypatch, size, change):
    flush = os.fsync

    def damage(fd):
        flush(fd)
        if (tmp_path / "x").stat().st_size == size:
            os.truncate(tmp_path / "x", size + change)

    monkeypatch.setattr(module.os, "fsync", damage)
    with refused("E-CKPT-READ-BACK"):
        write(tmp_path / "x", content_of(size))


def test_groups_are_compared_while_later_ones_are_written(tmp_path, way, monkeypatch):
    flushed, flush = [], os.fsync
    monkeypatch.setattr(module.os, "fsync", lambda fd: (flush(fd), flushed.append(fd)))
    with verified_file(tmp_path / "x", 6 * GROUP) as file:
        file.write(content_of(6 * GROUP))
        assert len(flushed) >= 4  # at most two wait


def test_a_wrong_group_ends_the_write_at_once(tmp_path, way, monkeypatch):
    monkeypatch.setattr(module.np, "array_equal", lambda a, b: False)
    with refused("E-CKPT-READ-BACK"):
        write(tmp_path / "x", content_of(40 * GROUP))
    assert (tmp_path / "x").stat().st_size <= 5 * GROUP


def flags_of(monkeypatch) -> list[bool]:
    """Return a list that gets, for each write of a file that is verified, whether it bypasses the page cache."""
    seen, write_it = [], VerifiedFile._write

    def watched(self, data):
        seen.append(bool(fcntl.fcntl(self._file.fileno(), fcntl.F_GETFL) & os.O_DIRECT))
        write_it(self, data)

    monkeypatch.setattr(VerifiedFile, "_write", watched)
    return seen


def test_large_files_bypass_the_page_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", CHUNK)
    monkeypatch.setattr(module, "_GROUP", GROUP)
    seen = flags_of(monkeypatch)
    with (tmp_path / "probe").open("wb", buffering=0) as probe:
        if not module._bypass_cache(probe, True):
            pytest.skip("the file system of the tests has no direct writes")
    write(tmp_path / "small", content_of(GROUP - 1))
    assert not any(seen)
    seen.clear()
    write(tmp_path / "large", content_of(2 * GROUP + CHUNK + 1))
    assert seen == [True] * 9 + [False]  # the last chunk is no whole block


def test_a_file_system_that_refuses_direct_writes_late(tmp_path, way, monkeypatch):
    write_it = VerifiedFile._write

    def refusing(self, data):
        if fcntl.fcntl(self._file.fileno(), fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        write_it(self, data)

    monkeypatch.setattr(VerifiedFile, "_write", refusing)
    write(tmp_path / "x", content_of(2 * GROUP + 5))
    assert (tmp_path / "x").read_bytes() == content_of(2 * GROUP + 5)


def test_a_full_disk_is_an_error_of_the_disk(tmp_path, way, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(VerifiedFile, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "x", content_of(2 * GROUP))
