"""Messages between pipeline ranks. NCCL has no tags, so each channel has a fixed order of messages (theory/schedule).

Every channel (one direction between two ranks) has its own process group. On a shared communicator, NCCL executes sends
and receives in the order in which they were posted, so two directions of traffic could wait for each other forever
(PyTorch warns about this: with a bound device all messages of a group share one communicator).
"""

import time
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.theory.schedule import Channel, Message, ScheduleTable, channel_order
from ingot.theory.schedule.table import needed_by, sent_by
from ingot.trainer.mesh.collectives import started
from ingot.trainer.mesh.mesh import Mesh, own_group

Parcel = tuple[Channel, Message]


class Channels:
    """This rank's ends of all channels of `table`. The constructor is collective over the world.

    dtype: the dtype of all messages. Receives are posted in the order of the sends. Sent tensors stay in memory until
    they have arrived. waited_seconds: the time that the host has waited in `receive` so far; close to 0 on GPUs.
    """

    def __init__(self, table: ScheduleTable, mesh: Mesh, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.waited_seconds = 0.0
        self.order = channel_order(table)
        self.ranks = mesh.ranks("pp")
        self.groups = open_groups(list(self.order), mesh, device)
        self._made, self._used = _positions(table)
        self._posted: dict[Channel, int] = {}
        self._coming: dict[Parcel, tuple[dist.Work, Tensor]] = {}
        self._leaving: dict[int, list[tuple[int, dist.Work, Tensor]]] = {}

    def start(self) -> None:
        """Begin a step. Call before the first message of the step."""
        self._posted = dict.fromkeys(self.order, 0)

    def send(self, parcel: Parcel, tensor: Tensor) -> None:
        """Start to send `tensor`, which must not change until it has arrived. Does not wait."""
        channel, _ = parcel
        tensor = tensor.contiguous()
        self._leaving.setdefault(channel.receiver, []).append((self._used[parcel], self._send(channel, tensor), tensor))

    def expect(self, parcel: Parcel, shape: tuple[int, ...]) -> None:
        """Post receives for this message and for all earlier messages on its channel that have no receive yet."""
        channel, message = parcel
        order = self.order[channel]
        for upcoming in order[self._posted[channel] : order.index(message) + 1]:
            buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
            self._coming[channel, upcoming] = (self._receive(channel, buffer), buffer)
            self._posted[channel] += 1

    def receive(self, parcel: Parcel) -> Tensor:
        """Wait for an expected message and return it. On GPUs only the device waits."""
        work, buffer = self._coming.pop(parcel)
        began = time.monotonic()
        work.wait()
        self.waited_seconds += time.monotonic() - began
        self._release(parcel[0].sender, self._made[parcel])
        return buffer

    def _release(self, peer: int, position: int) -> None:
        """Free the sent tensors that `peer` has used. position: the point in its row of the table that `peer` reached.

        The sends cannot be polled: with Gloo a send is complete only after a wait.
        """
        kept = []
        for used, work, tensor in self._leaving.get(peer, ()):
            if used <= position:
                work.wait()
            else:
                kept.append((used, work, tensor))
        self._leaving[peer] = kept

    def finish(self) -> None:
        """Wait for all sends. Call after the last message of a step."""
        for leaving in self._leaving.values():
            for _, work, _ in leaving:
                work.wait()
        self._leaving.clear()

    def pass_on(self, channel: Channel, tensor: Tensor) -> None:
        """Send `tensor` outside the order of the table, and wait until it has arrived."""
        self._send(channel, tensor.contiguous()).wait()

    def take(self, channel: Channel, shape: tuple[int, ...]) -> Tensor:
        """Receive a tensor that the channel's sender sends with `pass_on`."""
        buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._receive(channel, buffer).wait()
        return buffer

    def _send(self, channel: Channel, tensor: Tensor) -> dist.Work:
        group = self.groups[channel]
        return started(dist.isend(tensor, self.ranks[channel.receiver], group=group), group, message=True)

    def _receive(self, channel: Channel, buffer: Tensor) -> dist.Work:
        group = self.groups[channel]
        return started(dist.irecv(buffer, self.ranks[channel.sender], group=group), group, message=True)


def _positions(table: ScheduleTable) -> tuple[dict[Parcel, int], dict[Parcel, int]]:
    """Return for every message the position of its creation in the sender's row and of its use in the receiver's."""
    made, used = {}, {}
    for row in table.rows:
        for position, action in enumerate(row):
            if sent := sent_by(table, action):
                made[sent] = position
            if need := needed_by(table, action):
                used[need] = position
    return made, used


def open_groups(channels: Iterable[Channel], mesh: Mesh, device: torch.device) -> dict[Channel, dist.ProcessGroup]:
    """Make a process group for each channel of this rank. Collective over the world: all ranks make the groups of all
    pipelines in the same order.

    Each pair exchanges one element here: NCCL connects two ranks at their first message, for which the host waits, and
    in the middle of a schedule the other rank may be waiting for another message.
    """
    lines = mesh.devices.mesh.flatten(1).T.tolist()  # the global ranks of every pipeline
    me, groups = mesh.index("pp"), {}
    for together in _disjoint(channels):
        pairs = [[line[c.sender], line[c.receiver]] for c in together for line in lines]
        group = own_group(pairs, mesh.timeout, "pipeline_channel")
        for channel in together:
            if me in (channel.sender, channel.receiver):
                groups[channel] = group
                one = torch.zeros(1, device=device)
                if me == channel.sender:
                    dist.send(one, mesh.ranks("pp")[channel.receiver], group=group)
                else:
                    dist.recv(one, mesh.ranks("pp")[channel.sender], group=group)
    return groups


def _disjoint(channels: Iterable[Channel]) -> Iterator[list[Channel]]:
    """Divide the channels into a small number of lists; no two channels of a list share a rank."""
    left = sorted(channels)
    while left:
        part, seen = [], set()
        for channel in left:
            if seen.isdisjoint(channel[1:]):
                part.append(channel)
                seen.update(channel[1:])
        left = [channel for channel in left if channel not in part]
        yield part
