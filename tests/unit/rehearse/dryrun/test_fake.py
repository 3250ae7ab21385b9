"""Fake tensors do to memory, FLOPs and shapes what real ones do."""

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402

from ingot.rehearse.dryrun.fake import FakeProgram  # noqa: E402
from ingot.rehearse.dryrun.tracker import Tracker  # noqa: E402
from ingot.schema.arch import Arch  # noqa: E402
from ingot.trainer.model.transformer import Transformer  # noqa: E402

ARCH = Arch(
    vocab_size=640, d_model=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=176, max_seq_len=64,
    qk_norm=True, tied_embeddings=False,
)  # fmt: skip
DOCUMENTS = torch.arange(128, dtype=torch.int32).view(2, 64) // 24  # on the host, also for a fake program


def trained(dtype) -> Tracker:
    """Three steps of a small model, followed; the same program on real and on fake tensors."""
    with Tracker() as tracker:
        tracker.begin("build")
        with torch.device("meta"):
            model = Transformer(ARCH)
        model.to(dtype).to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for step in range(3):
            tracker.begin(f"step {step}")
            tokens = torch.zeros(2, 64, dtype=torch.long)
            for ids in (None, DOCUMENTS):
                model(tokens, tokens, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_faked_training_step_is_followed_like_a_real_one(dtype):
    real = trained(dtype)
    with FakeProgram() as fake_program:
        fake = trained(dtype)
    assert fake.flops == real.flops
    assert [event.name for event in fake.events] == [event.name for event in real.events]
    assert fake.peaks() == real.peaks()
    assert len(fake_program._known) > 100  # it did remember


def test_what_is_remembered_is_what_would_be_computed_again():
    def shapes(x, y):
        parts = x.split(2)
        results = [x @ y, x.t(), x[1:, 2], parts[1], x.add_(1), torch.cat(parts), x.expand(3, 4, 6), x.topk(2)[1]]
        return [(tuple(r.shape), r.stride(), r.storage_offset(), r.dtype) for r in results]

    expected = shapes(torch.ones(4, 6), torch.ones(6, 5))
    with FakeProgram():
        x, y = torch.ones(4, 6), torch.ones(6, 5)
        for _ in range(3):
            assert shapes(x, y) == expected
        for _ in range(3):
            view = x[1:, 2]
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x.add_(1) is x and x.split(2)[1].storage_offset() == 12


def test_real_tensors_stay_real_and_meta_ones_get_fake_memory():
    ranks = torch.arange(8).view(2, 4)
    with FakeProgram():
        assert ranks[:, 1].tolist() == [1, 5]
        with torch.device("meta"):
            layer = torch.nn.Linear(4, 4)
        layer.to(torch.bfloat16)
        assert not isinstance(layer.weight, FakeTensor) and layer.weight.is_meta
        layer.to_empty(device="cpu")
        assert isinstance(layer.weight, FakeTensor) and layer.weight.dtype == torch.bfloat16
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            layer.weight.sum().item()
