"""The snapshots of all ranks in the memory of the nodes: keep them, and continue from them without a checkpoint.

The keeper of a node (keeper.py) has the snapshots of its own ranks, and copies of those of other nodes. After a failure
the ranks ask all keepers what they have. If every rank's image of one save is somewhere, training continues from it:
each rank takes its own image from its node, or from the node that has a copy.
"""

import contextlib
import os
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot.errors import CheckpointError, IngotError, ResourceError
from ingot.machine.topology import far_apart, node_path
from ingot.schema.accepted import read_accepted
from ingot.schema.checkpoint import CheckpointManifest, FileEntry, LedgerSegment, file_of, segments_of
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_atomic
from ingot.trainer.checkpoint.agree import from_all_ranks, from_rank_zero, rank, world
from ingot.trainer.checkpoint.files import CheckpointFacts, FileContents, facts_of
from ingot.trainer.checkpoint.images import SECONDS, Connection, KeptImage, part_of_image, receive_image
from ingot.trainer.checkpoint.keeper import Peer, asking, keeper_name, reach_local, reach_peer, start_keeper
from ingot.trainer.checkpoint.message import RankError, pack_json, unpack_json, unpack_manifest
from ingot.trainer.checkpoint.part import RankBlocks, assemble

_SLOWEST_BYTES_PER_SECOND = 10e6
_ELSEWHERE = "192.0.2.1"  # no machine has it (RFC 5737): the way there is that to other machines


def open_replicas(
    copies: int, folder: RunFolder, owner: int, first_rank: int, warn: Callable[[str], None]
) -> "Replicas | None":
    """Find the keepers of all nodes, or start them. Collective. None, after a warning, if one does not start.

    copies: on how many other nodes a node's snapshots are kept, at most all. owner: the process that starts this
    node's ranks again. first_rank: the lowest rank of this node.
    """
    name = keeper_name(owner, folder.root)

    def own_keeper() -> dict[str, Any] | None:
        if rank() != first_rank:
            return None
        start_keeper(name, owner, _own_address())
        with contextlib.closing(asking(name)) as keeper:
            return {"peer": keeper.ask({"do": "where"}), "path": node_path()}

    try:
        found: list[dict | None] = from_all_ranks(own_keeper, list)
    except (IngotError, OSError) as error:
        warn(f"WARNING   no snapshot is kept in memory: {getattr(error, 'found', error)}")
        return None
    nodes = [Peer(**where["peer"]) for where in found if where is not None]
    paths = [tuple(where["path"]) for where in found if where is not None]
    node = sum(where is not None for where in found[: first_rank + 1]) - 1
    others = len(nodes) - 1
    if copies > others:
        room = f"the job has {others} other nodes" if others else "the job has one node, whose snapshots end with it"
        warn(f"note      checkpoint.replicas = {copies}, but {room}")
    return Replicas(name, nodes, node, first_rank, far_apart(paths, node, min(copies, others)))


def _own_address() -> str:
    """Return the address of this node on the network of the ranks; "" without other nodes."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", world())) == world():
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing: it chooses the interface
        found = probe.getsockname()[0]
    if found.startswith("127.") and os.environ["MASTER_ADDR"] not in ("127.0.0.1", "localhost"):
        # The first node's own name often means itself.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((_ELSEWHERE, 9))
            found = probe.getsockname()[0]
    return found


@dataclass
class Copied:
    """The end of keeping one snapshot, over all ranks. nodes: the number that has each image, at least. bytes: of all
    images once. failures: why copies are missing."""

    step: int
    nodes: int
    bytes: int
    seconds: float
    failures: list[str]


@dataclass
class Replicas:
    """The keepers that this rank uses. name: of its node. nodes: where all keepers listen. node: this one's number.

    first_rank: the lowest rank of this node. keep_on: the numbers of the nodes that keep copies of its snapshots.
    """

    name: str
    nodes: list[Peer]
    node: int
    first_rank: int
    keep_on: list[int]
    _saves: int = 0

    def begin(self) -> None:
        """Announce that this rank changes the memory of its snapshot: the keeper lets go of it."""
        self._saves += 1
        with contextlib.suppress(OSError), contextlib.closing(asking(self.name)) as keeper:
            keeper.ask({"do": "begin", "rank": rank()})

    def keep(
        self,
        fd: int,
        size: int,
        attempt: int,
        facts: CheckpointFacts,
        contents: FileContents,
        ledger: tuple[LedgerSegment, ...],
        segment: bytes,
    ) -> "Copying":
        """Begin to keep a snapshot, which is the first `size` bytes of the memory `fd`, and to copy it to other nodes.

        attempt: the number of this start of the ranks. The other arguments are those of the save.
        """
        # All ranks count the same saves. A number of its own, because a roll-back can save a step twice.
        name = f"{facts.epoch}-{attempt}-{self._saves}"
        image = KeptImage(rank=rank(), snapshot=name, step=facts.step, epoch=facts.epoch, world=world(), bytes=size)
        unhashed = FileEntry(bytes=size, sha256="")
        blocks = RankBlocks.pack(unhashed, contents.kinds, contents.written, [0] * len(contents.written))
        about = [b64encode(blocks.to_bytes())]
        if rank() == 0:
            about.append(pack_json({"facts": facts, "ledger": ledger, "segment": b64encode(segment).decode()}))
        peers = [self.nodes[number] for number in self.keep_on]
        return Copying(self.name, fd, image, about, peers)

    def held(self) -> list[tuple[KeptImage, bytes]]:
        """Return the images of the keeper of this node, each with its blocks."""
        with contextlib.closing(asking(self.name)) as keeper:
            return [(KeptImage(**image), about.encode()) for image, about in keeper.ask({"do": "list"})]

    def newest(self, folder: RunFolder, epoch: int, at_least: int) -> "MemoryCheckpoint | None":
        """Return the newest snapshot of which every rank's image is in memory; None if there is none. Collective.

        epoch: of this attempt; images of another attempt than this and the last one are old. at_least: on rank 0, the
        step of the newest checkpoint, which an older snapshot does not replace.
        """

        def choose(held: list[list]) -> dict[str, Any] | None:
            by_node = [one for one in held if one is not None]
            return _choose(by_node, {epoch, epoch - 1}, at_least)

        plan = from_all_ranks(
            lambda: [[asdict(i), a.decode()] for i, a in self.held()] if rank() == self.first_rank else None, choose
        )
        if plan is None:
            return None
        holders = [list(map(int, nodes)) for nodes in plan["holders"]]
        images = [KeptImage(**one) for one in plan["images"]]

        def manifest() -> CheckpointManifest:
            about = self._ledger_of(images[0], holders[0])
            return _manifest(folder, images, [b64decode(one) for one in plan["blocks"]], about)

        # The blocks of all ranks are needed on rank 0 alone, and the manifest on all.
        return MemoryCheckpoint(self, images, holders, from_rank_zero(manifest, pack_json, unpack_manifest))

    def _ledger_of(self, image: KeptImage, holders: Sequence[int]) -> dict[str, Any]:
        with contextlib.closing(self.connect(holders)) as keeper:
            return unpack_json(keeper.ask({"do": "ledger", "rank": image.rank}).encode())

    def connect(self, holders: Sequence[int]) -> Connection:
        """Connect to the nearest keeper of `holders`. Raises OSError if none answers."""
        if self.node in holders:
            return asking(self.name)
        failure = OSError("no node has the snapshot")
        for number in holders:
            try:
                return reach_peer(self.nodes[number])
            except OSError as error:
                failure = error
        raise failure

    def adopt(self, snapshot: str, epoch: int) -> None:
        """Record that the attempt `epoch` continued from `snapshot`: the next one may do so as well."""
        self._order({"do": "adopt", "snapshot": snapshot, "epoch": epoch})

    def forget(self, after: int) -> None:
        """Let go of images of steps beyond `after`: the run has gone back, or their state is not fit to continue."""
        self._order({"do": "forget", "after": after})

    def retain(self, snapshot: str) -> None:
        """Let go of all images but those of `snapshot`: of ranks that were on this node before."""
        self._order({"do": "retain", "snapshot": snapshot})

    def _order(self, request: dict[str, Any]) -> None:
        if rank() == self.first_rank:
            with contextlib.suppress(OSError, IngotError, RankError), contextlib.closing(asking(self.name)) as keeper:
                keeper.ask(request)


class Copying:
    """A snapshot on its way to the keepers, in a thread."""

    def __init__(self, name: str, fd: int, image: KeptImage, about: list[bytes], peers: list[Peer]):
        self._name, self._fd, self._image, self._about, self._peers = name, fd, image, about, peers
        self._failures: list[str] = []
        self._nodes, self._seconds = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            with contextlib.closing(reach_local(self._name)) as keeper:
                keeper.socket.settimeout(SECONDS + self._image.bytes / _SLOWEST_BYTES_PER_SECOND)
                socket.send_fds(keeper.socket, [b"+"], [self._fd])
                answer = keeper.ask({"do": "keep", "image": self._image, "peers": self._peers}, *self._about)
            self._failures, self._nodes = answer["failures"], 1 + answer["copies"]
        except (OSError, IngotError) as error:
            self._failures = [f"the keeper of this node: {getattr(error, 'found', error)}"]
        self._seconds = time.perf_counter() - began

    @property
    def snapshot(self) -> str:
        return self._image.snapshot

    def wait(self) -> dict[str, Any]:
        """Wait until the keepers have the snapshot. Returns what `summary` takes, of this rank."""
        self._thread.join()
        failures = [f"rank {self._image.rank}: {one}" for one in self._failures]
        return {"nodes": self._nodes, "bytes": self._image.bytes, "seconds": self._seconds, "failures": failures}


def summary(step: int, ranks: Sequence[dict[str, Any]]) -> Copied:
    """Return the end of keeping the snapshot of `step` from that on each rank."""
    return Copied(
        step=step,
        nodes=min(one["nodes"] for one in ranks),
        bytes=sum(one["bytes"] for one in ranks),
        seconds=max(one["seconds"] for one in ranks),
        failures=[failure for one in ranks for failure in one["failures"]][:_MOST_FAILURES],
    )


_MOST_FAILURES = 8  # that an event names


def _choose(by_node: list[list], epochs: set[int], at_least: int) -> dict[str, Any] | None:
    """Choose the newest whole snapshot from what the keepers hold. Returns the image and blocks of each rank, and the
    nodes that have it."""
    found: dict[str, dict[int, tuple[KeptImage, str, list[int]]]] = {}
    for node, held in enumerate(by_node):
        for values, about in held:
            image = KeptImage(**values)
            if image.epoch in epochs and image.step >= at_least:
                found.setdefault(image.snapshot, {}).setdefault(image.rank, (image, about, []))[2].append(node)
    whole = [
        images
        for images in found.values()
        if 0 in images and images.keys() == set(range(images[0][0].world)) and _agree(images.values())
    ]
    if not whole:
        return None
    newest = max(whole, key=lambda images: (images[0][0].step, images[0][0].epoch))
    chosen = [newest[number] for number in range(len(newest))]
    return {
        "images": [asdict(image) for image, _, _ in chosen],
        "blocks": [about for _, about, _ in chosen],
        "holders": [nodes for _, _, nodes in chosen],
    }


def _agree(images) -> bool:
    return len({(image.step, image.world) for image, _, _ in images}) == 1


def _manifest(
    folder: RunFolder, images: Sequence[KeptImage], blocks: Sequence[bytes], about: dict[str, Any]
) -> CheckpointManifest:
    """Return the manifest of a snapshot, as its save would have written it, and complete the ledger of the run."""
    files = [FileEntry(bytes=image.bytes, sha256=image.sha256) for image in images]
    cuts, tensors = assemble(
        [replace(RankBlocks.from_bytes(one), file=file) for one, file in zip(blocks, files, strict=True)]
    )
    facts, ledger = facts_of(about["facts"]), segments_of(about["ledger"])
    last = folder.ledger / ledger[-1].file
    if not last.exists():  # its save did not come so far
        write_atomic(last, b64decode(about["segment"]))
    return CheckpointManifest(
        **{name: getattr(facts, name) for name in facts.__dataclass_fields__},
        world=len(files),
        files={file_of(number): file for number, file in enumerate(files)},
        cuts=cuts,
        tensors=tensors,
        ledger=ledger,
        accepted=tuple(read_accepted(folder.accepted)),
    )


@dataclass
class MemoryCheckpoint:
    """A snapshot of all ranks in the memory of the nodes. images, holders: of each rank, and the nodes that have it.

    own_bytes, peer_bytes: of the tensors that this rank took from its node, and from others.
    """

    replicas: Replicas
    images: list[KeptImage]
    holders: list[list[int]]
    manifest: CheckpointManifest
    own_bytes: int = 0
    peer_bytes: int = 0
    _fds: list[int] = field(default_factory=list)

    def __post_init__(self):
        self._found: dict[tuple[str, ...], Path] = {}
        self._numbers = {file_of(number): number for number in range(len(self.images))}

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def path(self) -> Path:
        """The name of this snapshot in messages; no file has it."""
        return Path("memory", f"step-{self.step:08d}")

    def find(self, file: str, keys: Sequence[str]) -> Path:
        """Return a path at which this process can read the tensors `keys` of the checkpoint file `file`, with the bytes
        that were saved.

        Raises CheckpointError if no node has them any more, or they have changed.
        """
        number = self._numbers[file]
        image, near = self.images[number], self.replicas.node in self.holders[number]
        request = {"do": "lend" if near else "read", "rank": number, "snapshot": image.snapshot}
        if (file, *keys) in self._found:
            return self._found[file, *keys]
        try:
            with contextlib.closing(self.replicas.connect(self.holders[number])) as keeper:
                # The keeper first compares the image with its hash, and those for other ranks beside it.
                every = sum(one.bytes for one in self.images)
                keeper.socket.settimeout(SECONDS + every / _SLOWEST_BYTES_PER_SECOND)
                size = keeper.ask(request | ({} if near else {"keys": list(keys)}))
                if near:
                    _, (fd,), _, _ = socket.recv_fds(keeper.socket, 1, 1)
                else:
                    fd, sha256 = receive_image(keeper, size)
                self._fds.append(fd)
                if not near and keeper.receive().decode() != sha256:
                    raise OSError("it arrived with other bytes than were sent")
        except (OSError, ResourceError, RankError, ValueError) as error:
            raise _lost(self.path, number, getattr(error, "found", str(error))) from None
        taken = sum(end - begin for begin, end in part_of_image(fd, keys)[1])
        if near:
            self.own_bytes += taken
        else:
            self.peer_bytes += taken
        self._found[file, *keys] = Path(f"/proc/self/fd/{fd}")
        return self._found[file, *keys]

    def close(self) -> None:
        """Give back the memory of the images."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._found.clear()


def _lost(path: Path, number: int, why: str) -> CheckpointError:
    return CheckpointError(
        "E-REPLICA-LOST",
        f"{path}: the snapshot of rank {number} cannot be used ({why})",
        rule="a run continues from snapshots in memory only if every byte of them is as it was saved",
        fix="none is needed: the run continues from its newest checkpoint",
        rank=number,
    )
