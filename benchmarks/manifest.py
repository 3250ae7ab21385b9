"""The time of rank 0 alone in a save and a load of Llama 3 405B's blocks, at tp 8 x dp_shard 128 and ZeRO-3.

    python benchmarks/manifest.py LAYERS STAGES      8 16: 16,384 ranks, 8 layers each

No tensor is made and no rank started: the parts are what ranks would send, the files are holes of the right size.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ingot.schema.checkpoint import CheckpointManifest, FileEntry, LedgerSegment, file_of, segment_file
from ingot.trainer.checkpoint.manifest import MANIFEST, is_finished, read_manifest, write_manifest
from ingot.trainer.checkpoint.message import pack_json, unpack_manifest
from ingot.trainer.checkpoint.part import RankBlocks, assemble

T = TypeVar("T")
TP, DP = 8, 128
D, KV, F = 16_384, 1_024, 53_248
# Name -> shape, the dim that tensor parallelism cuts.
BLOCK: dict[str, tuple[tuple[int, ...], int | None]] = {
    "q": ((D, D), 0),
    "k": ((KV, D), 0),
    "v": ((KV, D), 0),
    "o": ((D, D), 1),
    "gate": ((F, D), 0),
    "up": ((F, D), 0),
    "down": ((D, F), 1),
    "attention_norm": ((D,), None),
    "ffn_norm": ((D,), None),
}


def blocks(rank: int, layers: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]]:
    """Name, whole shape, offsets, sizes, whether the rank writes it."""
    tp, dp, stage = rank % TP, rank // TP % DP, rank // TP // DP
    for layer in range(stage * layers, (stage + 1) * layers):
        for part, (shape, cut) in BLOCK.items():
            offsets, sizes = [0] * len(shape), list(shape)
            if cut is not None:
                sizes[cut] //= TP
                offsets[cut] = tp * sizes[cut]
            sizes[0] //= DP
            offsets[0] += dp * sizes[0]
            written, name = cut is not None or tp == 0, f"blocks.{layer}.{part}.weight"
            for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq"):
                yield f"{kind}.{name}", shape, tuple(offsets), tuple(sizes), written
            yield f"optim.step.{name}", (), (), (), written and not any(offsets)


def make_part(rank: int, layers: int) -> RankBlocks:
    held = list(blocks(rank, layers))
    written = [(name, offsets, sizes) for name, _, offsets, sizes, mine in held if mine]
    checksums = [hash(block) & 0xFFFFFFFF for block in written]
    kinds = {name: ("float32", shape) for name, shape, *_ in held}
    return RankBlocks.pack(FileEntry(bytes=1 << 40, sha256="0" * 64), kinds, written, checksums)


def timed(label: str, do: Callable[[], T]) -> T:
    started = time.perf_counter()
    result = do()
    print(f"{label:40} {time.perf_counter() - started:7.2f} s")
    return result


def main(layers: int, stages: int) -> None:
    sent = [make_part(rank, layers).to_bytes() for rank in range(TP * DP * stages)]
    print(f"{len(sent):,} ranks send {sum(map(len, sent)) / 1e6:.1f} MB to rank 0")
    parts = timed("save: unpack the parts", lambda: [RankBlocks.from_bytes(part) for part in sent])
    cuts, tensors = timed("save: cuts, and that they hold everything", lambda: assemble(parts))
    print(f"{sum(len(cuts[t.cut].ranks) for t in tensors.values()):,} blocks in {len(cuts)} cuts")
    manifest = CheckpointManifest(
        step=1, tokens=0, config_sha256="", settings={}, data_fingerprint="", layout={}, world=len(parts),
        files={file_of(rank): part.file for rank, part in enumerate(parts)}, cuts=cuts, tensors=tensors,
        ledger=(LedgerSegment(file=segment_file(1, 1), first_step=1, last_step=1, sha256="0" * 64),),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        for name, entry in manifest.files.items():
            with (folder / name).open("wb") as file:
                file.truncate(entry.bytes)
        timed("save: write the manifest", lambda: write_manifest(folder, manifest))
        print(f"manifest {(folder / MANIFEST).stat().st_size / 1e6:.1f} MB")
        timed("save: is an older one finished (prune)", lambda: is_finished(folder))
        read = timed("load: read and check the manifest", lambda: read_manifest(folder))
    sent_back = timed("load: pack it for the others", lambda: pack_json(read))
    timed("load: unpack it, on every rank", lambda: unpack_manifest(sent_back))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
