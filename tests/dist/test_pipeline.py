"""Pipelines against one process, in float64: every schedule gives the loss and the gradients of the whole model."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.expect import refused
from torch import nn

from ingot.schema.arch import Arch
from ingot.schema.parallel import TWO_STAGES, Parallel
from ingot.theory.schedule import Channel, build_table, peak_in_flight, schedule_problems
from ingot.trainer.mesh.mesh import build_mesh
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer
from ingot.trainer.parallel.pipeline import PipelineExecutor, cut_stage
from ingot.trainer.parallel.recompute import recompute
from ingot.trainer.parallel.split_backward import SplitBackward, split_linears

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v")
ARCH = Arch(
    vocab_size=29,
    d_model=16,
    num_layers=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ffn=20,
    tied_embeddings=False,
)
BATCH, TOKENS = 2, 6
CPU = torch.device("cpu")


class Token:
    """Something that lives as long as the graph that holds it."""


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, held):
        ctx.token = Token()
        held.append(weakref.ref(ctx.token))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], None


class Toy(nn.Module):
    """Residual layers between an embedding and a head. Its outputs are views on purpose (`x.view_as(x)`)."""

    def __init__(self, arch):
        super().__init__()
        self.embed = nn.Embedding(arch.vocab_size, arch.d_model)
        self.blocks = nn.ModuleDict(
            {str(i): nn.Linear(arch.d_model, arch.d_model, bias=False) for i in range(arch.num_layers)}
        )
        self.norm = nn.LayerNorm(arch.d_model)
        self.head = nn.Linear(arch.d_model, arch.vocab_size, bias=False)
        self.held = []

    def forward(self, x, targets=None, document_ids=None, *, per_token=False):
        if self.embed is not None:
            x = self.embed(x)
        shift = 0 if document_ids is None else document_ids[..., None] / 7
        for block in self.blocks.values():
            x = x + torch.tanh(block(x) + shift)
        x = _Hold.apply(x, self.held)
        if self.norm is None:
            return x.view_as(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return nats if per_token else nats.sum()


def make(kind, arch=ARCH):
    torch.manual_seed(5)
    model = kind(arch).double()
    if kind is Transformer:
        initialize(model, arch, 5)
    return model


def batch_of(micro_batches, seed=0, documents=True):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, ARCH.vocab_size, (micro_batches, BATCH, TOKENS + 1), generator=generator)
    starts = torch.randint(0, 2, (micro_batches, BATCH, TOKENS), generator=generator)
    return SimpleNamespace(
        inputs=ids[..., :-1], targets=ids[..., 1:], document_ids=starts.cumsum(-1).int() if documents else None
    )


def one_process(kind, batch):
    """A plain loop over the whole model."""
    model, total = make(kind), 0.0
    for i in range(len(batch.inputs)):
        documents = None if batch.document_ids is None else batch.document_ids[i]
        loss = model(batch.inputs[i], batch.targets[i], documents) / batch.inputs.numel()
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.numpy() for name, p in model.named_parameters()}


class Calls:
    """Data parallelism over one rank: it writes down who called."""

    def __init__(self):
        self.made = []

    def before_backward(self, stage, last):
        self.made.append(("before", stage, last))

    def after_backward(self, stage, last):
        self.made.append(("after", stage, last))


def program(kind, name, pp, micro_batches, stage_layers=(), recomputed="none", router_loss=None, **degrees):
    """This rank's part of the pipeline, its stages in `.stages`. Collective."""
    per_rank = 2 if name in TWO_STAGES and pp > 1 else 1
    table = build_table(name, pp, micro_batches, per_rank)
    mesh = build_mesh(Parallel(pp=pp, schedule=name, **degrees), "cpu")
    layers = stage_layers or [ARCH.num_layers // table.stages] * table.stages
    stages, splits = {}, any(action.kind == "I" for row in table.rows for action in row)
    split = SplitBackward() if splits else None
    for number in table.stages_of(mesh.index("pp")):
        stages[number] = make(kind)
        if table.stages > 1:
            cut_stage(stages[number], number, layers)
        if split is not None:
            split_linears(stages[number], split)
        if recomputed != "none":
            recompute(stages[number].blocks, recomputed, 1)
    return PipelineExecutor(
        stages,
        table,
        mesh,
        Calls(),
        d_model=ARCH.d_model,
        dtype=torch.float64,
        device=CPU,
        router_loss=router_loss,
        split=split,
    )


def gradients_of(pipeline):
    named = [pair for stage in pipeline.stages.values() for pair in stage.named_parameters()]
    return {name: parameter.grad.numpy() for name, parameter in named}


def check(results, expected):
    """results: (loss, gradients) of every rank. The ranks' parameters make up the whole model, none twice."""
    loss, gradients = expected
    assert sum(ours for ours, _ in results) == pytest.approx(loss, rel=1e-12)
    names = [name for _, own in results for name in own]
    assert sorted(names) == sorted(gradients)
    for _, own in results:
        for name, gradient in own.items():
            assert np.abs(gradient - gradients[name]).max() < 1e-12 * np.abs(gradients[name]).max(), name


def train(rank, ranks, kind, name, micro_batches, *options):
    pipeline = program(kind, name, ranks, micro_batches, *options)
    loss = pipeline.train(batch_of(micro_batches))
    return loss.item(), gradients_of(pipeline)


def legal(pp, micro_batches):
    return [
        name
        for name in SCHEDULES
        if not list(schedule_problems(name, pp, micro_batches, 2 if name in TWO_STAGES else 1))
    ]


def check_all(fork_ranks, pp, kind, names, micro_batches, *options):
    """Several schedules, one after the other on the same forked ranks."""

    def train_all(rank, ranks):
        return [train(rank, ranks, kind, name, micro_batches, *options) for name in names]

    expected = one_process(kind, batch_of(micro_batches))
    for name, results in zip(names, zip(*fork_ranks(train_all, pp), strict=True), strict=True):
        print(name)  # shown when the check fails
        check(results, expected)


@pytest.mark.parametrize(
    "pp, kind",
    [(2, Toy), (2, Transformer), *(pytest.param(4, kind, marks=pytest.mark.slow) for kind in (Toy, Transformer))],
)
def test_every_schedule_equals_one_process(fork_ranks, pp, kind):
    check_all(fork_ranks, pp, kind, SCHEDULES, 2 * pp)


@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_fewer_micro_batches_than_ranks(fork_ranks, micro_batches):
    names = legal(4, micro_batches)
    assert {"gpipe", "1f1b", "zb_h1"} <= set(names)
    check_all(fork_ranks, 4, Toy, names, micro_batches)


@pytest.mark.parametrize(
    "layers", [*(pytest.param(layers, marks=pytest.mark.slow) for layers in ((1, 5, 2, 0), (0, 3, 4, 1))), (3, 0, 5, 0)]
)
@pytest.mark.parametrize("names, pp", [(("1f1b", "zb_h1"), 4), (("interleaved", "zb_v"), 2)])
def test_uneven_stages(fork_ranks, names, pp, layers):
    check_all(fork_ranks, pp, Transformer, names, 4, layers)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_recomputed_stages(fork_ranks, how):
    check_all(fork_ranks, 2, Transformer, ("1f1b", "zb_v"), 4, (), how)


def test_one_rank_needs_no_messages(fork_ranks):
    def alone(rank, ranks):
        pipeline = program(Transformer, "1f1b", 1, 3)
        assert not pipeline.channels.groups
        return pipeline.train(batch_of(3)).item(), gradients_of(pipeline)

    check(fork_ranks(alone, 1), one_process(Transformer, batch_of(3)))


def test_several_steps_and_shapes(fork_ranks):
    # Channels begin anew in every step, with or without documents, and an evaluation may come between two steps.
    def steps(rank, ranks):
        pipeline, losses = program(Transformer, "interleaved_zb", ranks, 4), []
        for seed, documents in ((1, True), (2, False), (3, True)):
            batch = batch_of(4, seed, documents)
            losses.append(pipeline.train(batch).item())
            short = batch.inputs[0, :, :4]
            pipeline.forward_only(short, None, None, per_token=False)
        return losses

    losses = [sum(column) for column in zip(*fork_ranks(steps, 2), strict=True)]
    expected = [one_process(Transformer, batch_of(4, *how))[0] for how in ((1, True), (2, False), (3, True))]
    assert losses == pytest.approx(expected, rel=1e-12)


def test_every_pipeline_has_its_own_data(fork_ranks):
    def train_two(rank, ranks):
        pipeline = program(Toy, "zb_v", 2, 4, dp_replicate=2)
        data_rank = rank % 2
        return data_rank, pipeline.train(batch_of(4, seed=data_rank)).item(), gradients_of(pipeline)

    results = fork_ranks(train_two, 4)
    for data_rank in (0, 1):
        own = [(loss, gradients) for data, loss, gradients in results if data == data_rank]
        check(own, one_process(Toy, batch_of(4, seed=data_rank)))


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_the_scale_multiplies_gradients_but_not_the_loss(fork_ranks, name):
    def scaled(rank, ranks):
        pipeline = program(Toy, name, ranks, 4)
        loss = pipeline.train(batch_of(4), torch.tensor(8.0, dtype=torch.float64))
        assert not loss.requires_grad and loss.dtype == torch.float64
        return loss.item(), {name: gradient / 8 for name, gradient in gradients_of(pipeline).items()}

    check(fork_ranks(scaled, 2), one_process(Toy, batch_of(4)))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_forward_only_gives_the_result_to_the_last_stage(fork_ranks, name):
    def score(rank, ranks):
        pipeline, batch = program(Transformer, name, ranks, 4), batch_of(1)
        arguments = batch.inputs[0], batch.targets[0], batch.document_ids[0]
        nats = pipeline.forward_only(*arguments, per_token=True)
        logits = pipeline.forward_only(batch.inputs[0], None, None, per_token=False)
        is_last = pipeline.table.rank_of_stage[-1] == rank
        assert (nats is not None) == (logits is not None) == is_last
        return (nats.numpy(), logits.numpy()) if is_last else None

    batch, model = batch_of(1), make(Transformer)
    with torch.no_grad():
        nats = model(batch.inputs[0], batch.targets[0], batch.document_ids[0], per_token=True)
        logits = model(batch.inputs[0])
    (result,) = [r for r in fork_ranks(score, 2) if r is not None]
    for ours, theirs in zip(result, (nats, logits), strict=True):
        assert np.abs(ours - theirs.numpy()).max() < 1e-12


def test_data_parallelism_is_told_of_every_backward_and_of_the_last(fork_ranks):
    def calls(name, ranks):
        pipeline = program(Toy, name, ranks, 4)
        pipeline.train(batch_of(4))
        number = {stage: n for n, stage in pipeline.stages.items()}
        return [(when, number[stage], last) for when, stage, last in pipeline.data.made]

    results = fork_ranks(lambda rank, ranks: [calls(name, ranks) for name in SCHEDULES], 2)
    for made in [made for of_rank in results for made in of_rank]:
        for stage in {stage for _, stage, _ in made}:
            for when in ("before", "after"):
                assert [last for w, s, last in made if (w, s) == (when, stage)] == [False] * 3 + [True]
            order = [when for when, s, _ in made if s == stage]
            assert all(order[:i].count("before") >= order[:i].count("after") for i in range(len(order)))


def test_the_output_of_a_stage_ends_before_its_backward(fork_ranks):
    """The graph of a stage is all that its backward needs. Losses that wait for their backward have no gradients."""

    def alive(name, ranks):
        pipeline, outputs, seen = program(Transformer, name, ranks, 4), [], []
        for stage in pipeline.stages.values():
            stage.register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
        pipeline.data.before_backward = lambda *_: seen.append(sum(ref() is not None for ref in outputs))
        pipeline.train(batch_of(4))
        last = pipeline.stages.get(pipeline.table.stages - 1)
        return len(outputs), seen, last is not None and last.readout.late

    for results in fork_ranks(lambda rank, ranks: [alive(name, ranks) for name in SCHEDULES], 2):
        for name, (outputs, seen, late) in zip(SCHEDULES, results, strict=True):
            assert outputs == len(seen) and set(seen) == {0}, name
            assert not late or name not in ("1f1b", "interleaved", "zb_h1")
    assert [results[0][2] for results in fork_ranks(lambda rank, ranks: [alive("gpipe", ranks)], 2)] == [False, True]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_v"])
def test_bytes_sent(fork_ranks, name):
    """Per micro-batch and boundary between ranks, one hidden state each way: B x T x D numbers and nothing else."""

    def count(rank, ranks):
        pipeline, sent, send = program(Toy, name, ranks, 8), [], dist.isend
        channel_of = {group: channel for channel, group in pipeline.channels.groups.items()}

        def counted(tensor, dst, group):
            sent.append((channel_of[group].kind, channel_of[group].receiver, tensor.numel() * tensor.itemsize))
            return send(tensor, dst, group)

        dist.isend = counted
        pipeline.train(batch_of(8))
        totals = {}
        for kind, receiver, size in sent:
            totals[kind, receiver] = totals.get((kind, receiver), 0) + size
        return totals

    hidden = BATCH * TOKENS * ARCH.d_model * 8
    boundaries = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb_v": 1}[name]  # downwards between neighbors
    for rank, totals in enumerate(fork_ranks(count, 4)):
        down, up = (rank + 1) % 4, (rank - 1) % 4
        expected = {("activation", down): boundaries if rank < 3 else boundaries - 1}
        expected["gradient", up] = boundaries if rank > 0 else boundaries - 1
        if name == "zb_v":  # and the way back up
            expected = {("activation", down): 1, ("gradient", up): 1, ("activation", up): 1, ("gradient", down): 1}
            expected = {(kind, to): 1 for kind, to in expected if abs(to - rank) == 1}
        assert totals == {key: n * 8 * hidden for key, n in expected.items() if n}


@pytest.mark.parametrize("name, kind", [("gpipe", "activation"), ("1f1b", "gradient"), ("zb_v", "activation")])
def test_receives_in_another_order_than_the_senders_give_another_result(fork_ranks, name, kind):
    def swapped(rank, ranks):
        pipeline = program(Toy, name, ranks, 4)
        channel = Channel(kind, 0, 1) if kind == "activation" else Channel(kind, 1, 0)
        if rank == channel.receiver:
            order = pipeline.channels.order
            first, second, *others = order[channel]
            order[channel] = (second, first, *others)
        return pipeline.train(batch_of(4)).item(), gradients_of(pipeline)

    results = fork_ranks(swapped, 2)
    with pytest.raises(AssertionError):
        check(results, one_process(Toy, batch_of(4)))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h1", "zb_v"])
def test_sent_tensors_and_activations_are_let_go(fork_ranks, name):
    micro_batches = 24

    def watch(rank, ranks):
        pipeline, sends, alive = program(Toy, name, ranks, micro_batches), [], []
        channels, stages = pipeline.channels, pipeline.stages
        send, forward = channels.send, pipeline._forward

        def counted_send(parcel, tensor):
            send(parcel, tensor)
            sends.append(sum(map(len, channels._leaving.values())))

        def counted_forward(action, step):
            forward(action, step)
            alive.append(sum(token() is not None for stage in stages.values() for token in stage.held))

        channels.send = counted_send
        pipeline._execute["F"] = counted_forward
        pipeline.train(batch_of(micro_batches))
        assert not channels._leaving and not channels._coming
        assert not any(token() for stage in stages.values() for token in stage.held)
        return max(sends), max(alive), peak_in_flight(pipeline.table)[rank]

    for most_sends, most_alive, peak in fork_ranks(watch, 4):
        assert most_sends < 12  # some per channel, not all micro-batches
        assert most_alive == peak if name in ("1f1b", "interleaved") else most_alive <= peak


class Router(Toy):
    """A stage that records its router_loss arguments."""

    recorded: list

    def forward(self, x, targets=None, document_ids=None, *, positions_T=None, router_loss=None, per_token=False):
        if router_loss is not None:
            keys, weight = router_loss
            self.__dict__.setdefault("recorded", []).append((keys.tolist(), weight.item()))
        return super().forward(x, targets, None, per_token=per_token)


@pytest.mark.parametrize("degrees", [{"dp_replicate": 2}, {"cp": 2, "ulysses": 2}, {"dp_shard": 2}], ids=str)
@pytest.mark.parametrize("name, pp", [("1f1b", 1), ("zb_v", 2)])
def test_routers_get_the_keys_of_their_sequences_and_the_weight_of_a_nat(fork_ranks, name, pp, degrees):
    micro_batches, step = 4, 3

    def recorded(rank, ranks):
        pipeline = program(Router, name, pp, micro_batches, router_loss=lambda *both: both, **degrees)
        batch = batch_of(micro_batches, documents=False)
        batch.step = step
        pipeline.train(batch, torch.tensor(8.0))
        pipeline.forward_only(batch.inputs[0], None, None, per_token=False)  # without a router_loss
        return pipeline.data_rank, [getattr(stage, "recorded") for stage in pipeline.stages.values()]  # noqa: B009

    data_ranks, cp = (1, 2) if "cp" in degrees else (2, 1)
    own = micro_batches * BATCH
    for data_rank, stages in fork_ranks(recorded, 2 * pp):
        first = (step * data_ranks + data_rank) * own
        weight = 8 / (own * TOKENS / cp)
        expected = [([first + i * BATCH, first + i * BATCH + 1], weight) for i in range(micro_batches)]
        assert all(sorted(stage) == expected for stage in stages)


def test_a_batch_of_another_size_is_refused(fork_ranks):
    def train_with_three(rank, ranks):
        pipeline = program(Toy, "1f1b", 1, 2)
        with refused("E-MICRO-BATCHES", found=3, expected=2):
            pipeline.train(batch_of(3))

    fork_ranks(train_with_three, 1)
