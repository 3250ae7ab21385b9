"""A DCP folder gives exactly its tensors, or is refused with its own code; nothing in it is executed."""

import io
import os
import pickle
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.expect import refused
from tests.unit.trainer.convert.test_pickled import Calls

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex  # noqa: E402

from ingot.trainer.convert.dcp import DcpFolder  # noqa: E402

FILE = "__0_0.distcp"


def state():
    return {
        "a": torch.randn(6, 4),
        "b": torch.randn(5).bfloat16(),
        "half": torch.randn(3, 2, 2).half(),
        "scalar": torch.tensor(2.5),
        "turned": torch.randn(4, 3).t(),
        "part": torch.randn(9, 4)[2:5],
        "empty": torch.empty(0, 3),
    }


def test_every_tensor_comes_back_bit_for_bit(save_dcp):
    saved = state()
    folder = DcpFolder(save_dcp({"model": saved, "step": 7, "counts": torch.arange(3)}))
    assert folder.others == ["step"]
    assert folder.tensors.keys() == {f"model.{name}" for name in saved} | {"counts"}
    for name, tensor in saved.items():
        found = folder.read(f"model.{name}")
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


def save_sharded(rank, ranks, folder):
    """Save the state of two ranks: rows, columns, uneven rows and a copy on each."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    placements = {"rows": Shard(0), "columns": Shard(1), "uneven": Shard(0), "copy": Replicate()}
    tensors = {name: distribute_tensor(whole(name), mesh, [placement]) for name, placement in placements.items()}
    dcp.save(tensors, checkpoint_id=folder)


def whole(name: str):
    shapes = {"rows": (8, 3), "columns": (4, 6), "uneven": (5, 2), "copy": (7,)}
    return torch.randn(shapes[name], generator=torch.Generator().manual_seed(len(name)))


def test_tensors_that_two_ranks_saved_are_put_together(fork_ranks, tmp_path):
    fork_ranks(save_sharded, 2, tmp_path / "dcp")
    assert {"__0_0.distcp", "__1_0.distcp"} <= {path.name for path in (tmp_path / "dcp").iterdir()}
    folder = DcpFolder(tmp_path / "dcp")
    for name in ("rows", "columns", "uneven", "copy"):
        assert torch.equal(folder.read(name), whole(name)), name
    assert len(folder.tensors["columns"].blocks) == 2


@pytest.fixture
def folder(save_dcp) -> Path:
    return save_dcp(state())


def place_of(metadata, name: str):
    index = next(index for index in metadata.storage_data if index.fqn == name)
    return index, metadata.storage_data[index]


# -- hostile and damaged metadata --


def test_a_pickle_that_calls_is_refused_and_nothing_is_executed(folder, tmp_path):
    made = tmp_path / "made"
    (folder / ".metadata").write_bytes(pickle.dumps(Calls(os.system, f"touch {made}")))
    with refused("E-DCP-PICKLE") as caught:
        DcpFolder(folder)
    assert "posix.system" in caught.value.facts["reason"] and not made.exists()


def test_a_call_inside_of_good_metadata_is_refused(folder, with_metadata, tmp_path):
    made = tmp_path / "made"

    def plant(metadata):
        metadata.planner_data = {"a": Calls(os.system, f"touch {made}")}

    with_metadata(folder, plant)
    with refused("E-DCP-PICKLE"):
        DcpFolder(folder)
    assert not made.exists()


def test_an_unknown_class_is_refused(folder, with_metadata):
    def plant(metadata):
        metadata.planner_data = io.BytesIO

    with_metadata(folder, plant)
    with refused("E-DCP-PICKLE") as caught:
        DcpFolder(folder)
    assert "_io.BytesIO" in caught.value.facts["reason"]


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_truncated_metadata_are_refused(folder, keep):
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[:keep])
    with refused("E-DCP-PICKLE"):
        DcpFolder(folder)


@pytest.mark.parametrize("content", [None, [], {"state_dict_metadata": {}}, "text", 5])
def test_another_object_than_metadata_is_refused(folder, content):
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    with refused("E-DCP-PICKLE"):
        DcpFolder(folder)


def test_metadata_with_changed_bytes_never_crash(folder):
    """Every third byte, one at a time: read, or refused by an error of this reader."""
    from ingot.errors import CheckpointError

    good = (folder / ".metadata").read_bytes()
    outcomes = set()
    for number, at in enumerate(range(0, len(good), 3)):
        data = bytearray(good)
        data[at] ^= (1, 0x80, 0xFF)[number % 3]
        (folder / ".metadata").write_bytes(data)
        try:
            found = DcpFolder(folder)
            for name in ("a", "scalar"):
                if name in found.tensors:
                    found.read(name)
            outcomes.add("read")
        except CheckpointError as error:
            outcomes.add(error.code)
    assert {"read", "E-DCP-PICKLE", "E-DCP-BLOCKS"} <= outcomes


def test_a_folder_without_metadata_is_refused(folder):
    (folder / ".metadata").unlink()
    with refused("E-DCP-READ", file=".metadata"):
        DcpFolder(folder)


def test_metadata_that_are_not_a_file_are_refused(folder):
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")  # to open it would wait for ever
    with refused("E-DCP-READ", file=".metadata"):
        DcpFolder(folder)


@pytest.mark.parametrize("file", ["../secret.distcp", "/etc/passwd", "sub/x.distcp", "..", "", "x.pt", "a\0.distcp", 5])
def test_places_outside_of_the_folder_are_refused(folder, with_metadata, file):
    def move(metadata):
        index, place = place_of(metadata, "a")
        metadata.storage_data[index] = replace(place, relative_path=file)

    with_metadata(folder, move)
    with refused("E-DCP-PATH", name="a"):
        DcpFolder(folder)


@pytest.mark.parametrize(
    "change", [{"offset": -1}, {"length": -5}, {"offset": 2**80}, {"offset": 1.5}, {"length": True}]
)
def test_places_that_are_no_numbers_are_refused(folder, with_metadata, change):
    def move(metadata):
        index, place = place_of(metadata, "a")
        metadata.storage_data[index] = replace(place, **change)

    with_metadata(folder, move)
    with refused("E-DCP-PICKLE"):
        DcpFolder(folder)


def test_blocks_that_share_bytes_are_refused(folder, with_metadata):
    """Otherwise a small file could be any number of large tensors."""

    def share(metadata):
        index, place = place_of(metadata, "a")
        _, other = place_of(metadata, "b")
        metadata.storage_data[index] = replace(place, offset=other.offset + 1)

    with_metadata(folder, share)
    with refused("E-DCP-BLOCKS", file=FILE):
        DcpFolder(folder)


@pytest.mark.parametrize(
    ("chunks", "code"),
    [
        ([((0, 0), (6, 3))], "E-DCP-BLOCKS"),  # a hole
        ([((0, 0), (6, 4)), ((1, 0), (5, 4))], "E-DCP-BLOCKS"),  # an overlap, and no place for the second
        ([((0, 0), (4, 4)), ((2, 0), (2, 4))], "E-DCP-BLOCKS"),
        ([], "E-DCP-BLOCKS"),
        ([((1, 0), (6, 4))], "E-DCP-PICKLE"),  # outside
        ([((0,), (6,))], "E-DCP-PICKLE"),
        ([((0, 0), (-6, -4))], "E-DCP-PICKLE"),
    ],
)
def test_blocks_with_holes_or_overlaps_are_refused(folder, with_metadata, chunks, code):
    def cut(metadata):
        metadata.state_dict_metadata["a"].chunks = [
            ChunkStorageMetadata(torch.Size(o) if min(o, default=0) >= 0 else o, s) for o, s in chunks
        ]

    with_metadata(folder, cut)
    with refused(code):
        DcpFolder(folder).read("a")


def test_two_shards_that_overlap_are_refused(fork_ranks, tmp_path, with_metadata):
    """Both have their bytes; together they have as many elements as the tensor, but not each once."""
    fork_ranks(save_sharded, 2, tmp_path / "dcp")

    def shift(metadata):
        chunks = metadata.state_dict_metadata["rows"].chunks
        second = next(chunk for chunk in chunks if chunk.offsets[0])
        index = next(i for i in metadata.storage_data if i.fqn == "rows" and i.offset == second.offsets)
        place = metadata.storage_data.pop(index)
        second.offsets = torch.Size((3, 0))
        metadata.storage_data[MetadataIndex("rows", second.offsets)] = place

    with_metadata(tmp_path / "dcp", shift)
    with refused("E-DCP-BLOCKS", name="rows") as caught:
        DcpFolder(tmp_path / "dcp").read("rows")
    assert "overlap" in caught.value.found


def test_a_shard_whose_file_is_missing_is_refused(fork_ranks, tmp_path):
    fork_ranks(save_sharded, 2, tmp_path / "dcp")
    (tmp_path / "dcp" / "__1_0.distcp").unlink()
    with refused("E-DCP-READ", file="__1_0.distcp", name="rows"):
        DcpFolder(tmp_path / "dcp").read("rows")


def test_a_shard_without_a_place_is_refused(folder, with_metadata):
    def drop(metadata):
        del metadata.storage_data[place_of(metadata, "a")[0]]

    with_metadata(folder, drop)
    with refused("E-DCP-BLOCKS", name="a"):
        DcpFolder(folder).read("a")


@pytest.mark.parametrize(("shape", "code"), [((10**6, 10**6), "E-DCP-BLOCKS"), ((2**62, 2**62), "E-DCP-BLOCKS")])
def test_a_shape_beyond_the_file_takes_no_memory(folder, with_metadata, shape, code):
    def grow(metadata):
        entry = metadata.state_dict_metadata["a"]
        entry.size, entry.chunks[0].sizes = shape, shape

    with_metadata(folder, grow)
    with refused(code, name="a"):
        DcpFolder(folder).read("a")


@pytest.mark.parametrize(
    ("dtype", "code"), [("float64", "E-DCP-DTYPE"), ("int8", "E-DCP-DTYPE"), ("bfloat16", "E-DCP-ARCHIVE")]
)
def test_a_dtype_that_differs_or_is_not_read_is_refused(folder, with_metadata, dtype, code):
    def change(metadata):
        metadata.state_dict_metadata["a"].properties.dtype = getattr(torch, dtype)

    with_metadata(folder, change)
    with refused(code, name="a"):
        DcpFolder(folder).read("a")


def test_another_shape_in_the_archive_than_in_the_metadata_is_refused(folder, with_metadata):
    def turn(metadata):
        entry = metadata.state_dict_metadata["a"]
        entry.size = entry.chunks[0].sizes = torch.Size((4, 6))

    with_metadata(folder, turn)
    with refused("E-DCP-ARCHIVE", name="a"):
        DcpFolder(folder).read("a")


def test_transformed_bytes_are_refused(folder, with_metadata):
    def transform(metadata):
        index, place = place_of(metadata, "a")
        metadata.storage_data[index] = replace(place, transform_descriptors=["zstd"])

    with_metadata(folder, transform)
    with refused("E-DCP-FORM", name="a"):
        DcpFolder(folder)


# -- hostile and damaged archives --


def with_archive(folder: Path, with_metadata, archive: bytes) -> DcpFolder:
    """Put `archive` in the place of the tensor "a", in a file of its own."""
    (folder / "own.distcp").write_bytes(archive)

    def point(metadata):
        index, place = place_of(metadata, "a")
        metadata.storage_data[index] = replace(place, relative_path="own.distcp", offset=0, length=len(archive))

    with_metadata(folder, point)
    return DcpFolder(folder)


def archive_of(folder: Path, with_metadata) -> bytes:
    found = {}
    with_metadata(folder, lambda metadata: found.update(place=place_of(metadata, "a")[1]))
    place = found["place"]
    return (folder / FILE).read_bytes()[place.offset : place.offset + place.length]


def rewritten(archive: bytes, compression: int = zipfile.ZIP_STORED, **entries: bytes) -> bytes:
    """Return the archive with other entries; names with "/" as "__"."""
    out = io.BytesIO()
    changed = {name.replace("__", "/").replace("_pkl", ".pkl"): data for name, data in entries.items()}
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for info in old.infolist():
            name = info.filename.partition("/")[2]
            new.writestr(f"archive/{name}", changed.get(name, old.read(info)))
    return out.getvalue()


def test_a_rewritten_archive_is_read(folder, with_metadata):
    """The control of the cases below."""
    archive = archive_of(folder, with_metadata)
    before = DcpFolder(folder).read("a")
    assert torch.equal(with_archive(folder, with_metadata, rewritten(archive)).read("a"), before)


def test_a_call_in_an_archive_is_refused_and_not_made(folder, with_metadata, tmp_path):
    made = tmp_path / "made"
    hostile = pickle.dumps(Calls(os.system, f"touch {made}"))
    there = with_archive(folder, with_metadata, rewritten(archive_of(folder, with_metadata), data_pkl=hostile))
    with refused("E-DCP-PICKLE", name="a"):
        there.read("a")
    assert not made.exists()


def rebuilt(*arguments, name=b"torch._utils\n_rebuild_tensor_v2\n", kind=b"ctorch\nFloatStorage\n") -> bytes:
    """Return a data.pkl that rebuilds a tensor from storage 0 with start, shape and strides."""
    storage = b"(X\x07\0\0\0storage" + kind + b"X\x01\0\0\x000X\x03\0\0\0cpuK\x18tQ"
    rest = b"".join(pickle.dumps(argument, 2)[2:-1] for argument in arguments)
    return b"\x80\x02c" + name + b"(" + storage + rest + b"tR."


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (rebuilt(1, (6, 4), (4, 1)), "E-DCP-ARCHIVE"),  # one element after the end
        (rebuilt(0, (6, 4), (2**40, 1)), "E-DCP-ARCHIVE"),
        (rebuilt(0, (6, 4), (4,)), "E-DCP-ARCHIVE"),
        (rebuilt(-1, (6, 4), (4, 1)), "E-DCP-PICKLE"),
        (rebuilt(0, (6, 4), (-4, 1)), "E-DCP-PICKLE"),
        (rebuilt(0, (24,), (1,)), "E-DCP-ARCHIVE"),
        (rebuilt(0, [6, 4], (4, 1)), "E-DCP-PICKLE"),
        (rebuilt(0, (6, 4), (4, 1), kind=b"ctorch\nHalfStorage\n"), "E-DCP-ARCHIVE"),
        (rebuilt(0, (6, 4), (4, 1), kind=b"ctorch\nDoubleStorage\n"), "E-DCP-PICKLE"),
        (rebuilt(0, (6, 4), (4, 1), kind=b"K\x05"), "E-DCP-ARCHIVE"),
        (rebuilt(), "E-DCP-ARCHIVE"),
        (b"N.", "E-DCP-ARCHIVE"),
        (b"N" * 20_000 + b".", "E-DCP-ARCHIVE"),
    ],
)
def test_archives_of_something_else_are_refused(folder, with_metadata, data, code):
    archive = archive_of(folder, with_metadata)
    control = rewritten(archive, data_pkl=rebuilt(0, (6, 4), (4, 1)))
    assert with_archive(folder, with_metadata, control).read("a").shape == (6, 4)
    there = with_archive(folder, with_metadata, rewritten(archive, data_pkl=data))
    with refused(code, name="a"):
        there.read("a")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda archive: rewritten(archive, data__0=b""),
        lambda archive: rewritten(archive, data__0=b"123"),  # no whole elements
        lambda archive: rewritten(archive, byteorder=b"big"),
        lambda archive: rewritten(archive, zipfile.ZIP_DEFLATED),
        lambda archive: archive.replace(b"data/0", b"data/9"),
        lambda archive: archive[: len(archive) // 2] + bytes(len(archive) - len(archive) // 2),
        lambda archive: bytes(len(archive)),
    ],
    ids=["no bytes", "part of an element", "big-endian", "compressed", "no entry", "torn", "zeros"],
)
def test_archives_that_are_not_whole_are_refused(folder, with_metadata, spoil):
    there = with_archive(folder, with_metadata, spoil(archive_of(folder, with_metadata)))
    with refused("E-DCP-ARCHIVE", name="a"):
        there.read("a")


def test_a_flipped_bit_of_a_tensor_is_found(folder, with_metadata):
    """torch.distributed.checkpoint itself loads it in silence."""
    archive = archive_of(folder, with_metadata)
    bits = DcpFolder(folder).read("a").numpy().tobytes()
    at = archive.index(bits) + len(bits) // 2
    flipped = bytearray(archive)
    flipped[at] ^= 1
    there = with_archive(folder, with_metadata, bytes(flipped))
    with refused("E-DCP-ARCHIVE", name="a"):
        there.read("a")


def test_a_directory_of_many_entries_is_refused(folder, with_metadata):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as many:
        for number in range(700):
            many.writestr(f"archive/{'x' * 200}{number}", b"")
    there = with_archive(folder, with_metadata, out.getvalue())
    with refused("E-DCP-BLOCKS", name="a"):  # more bytes than the tensor and an archive need
        there.read("a")


def test_a_truncated_file_is_refused(folder):
    size = (folder / FILE).stat().st_size
    os.truncate(folder / FILE, size // 2)
    there, codes = DcpFolder(folder), []
    for name in there.tensors:
        try:
            there.read(name)
        except Exception as error:
            codes.append(error.code)
    assert codes and set(codes) == {"E-DCP-READ"}


def test_any_byte_of_a_file_may_be_damaged(folder):
    """A tensor is read as it was saved, or not at all."""
    from ingot.errors import CheckpointError

    good, saved = (folder / FILE).read_bytes(), {}
    for name in DcpFolder(folder).tensors:
        saved[name] = DcpFolder(folder).read(name)
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    found = 0
    for at in range(0, len(good), 31):
        data = bytearray(good)
        data[at] ^= 0x41
        (copy / FILE).write_bytes(data)
        there = DcpFolder(copy)
        for name, tensor in saved.items():
            try:
                assert torch.equal(there.read(name), tensor)
            except CheckpointError as error:
                found += error.code in ("E-DCP-ARCHIVE", "E-DCP-PICKLE")
    assert found > 10
