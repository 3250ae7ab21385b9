"""Reads manifests of version 1, which said file, key, offsets and sizes once per block."""

from ingot.schema.checkpoint import file_of, key_of, pack_crc32


def upgraded(values: dict) -> dict:
    """The values of a version 1 manifest as those of a version 2 manifest.

    Raises ValueError, KeyError, TypeError or AttributeError for values that version 1 never wrote.
    """
    numbers: dict[tuple, int] = {}
    tensors = {}
    for name, entry in values["tensors"].items():
        rows, checksums = [], []
        for chunk in entry["chunks"]:
            rank = int(chunk["file"].removeprefix("rank-").removesuffix(".safetensors"))
            if chunk["file"] != file_of(rank) or chunk["key"] != key_of(name, chunk["offsets"]):
                raise ValueError(f"tensor {name} has a block {chunk['key']!r} in {chunk['file']!r}")
            rows.append((tuple(chunk["offsets"]), tuple(chunk["sizes"]), rank))
            checksums.append(chunk["crc32"])
        tensors[name] = {
            "dtype": entry["dtype"],
            "shape": entry["shape"],
            "cut": numbers.setdefault(tuple(rows), len(numbers)),
            "crc32": pack_crc32(checksums),
        }
    cuts = [
        {"offsets": [row[0] for row in rows], "sizes": [row[1] for row in rows], "ranks": [row[2] for row in rows]}
        for rows in numbers
    ]
    return values | {"version": 2, "world": len(values["rng"]), "cuts": cuts, "tensors": tensors}
