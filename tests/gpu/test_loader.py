"""The same batches on a GPU, through pinned buffers and a side stream, also when the trainer is slower or faster."""

import numpy as np
import pytest
import torch

from ingot.config import to_dict
from ingot.data.lineage.verify import block_digests
from ingot.schema.tokens import Shard, TokenManifest
from ingot.storage import sha256_bytes, write_json
from ingot.trainer.loader.loader import Loader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def folder(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 500, 300_000).astype("<u2")
    tokens.tofile(tmp_path / "web-00000.tokens")
    blocks = block_digests(tmp_path / "web-00000.tokens", 4096)
    (tmp_path / "web-00000.blocks").write_bytes(blocks)
    shard = Shard(
        name="web-00000",
        source="web",
        tokens=len(tokens),
        documents=1,
        text_bytes=1,
        blocks_sha256=sha256_bytes(blocks),
        documents_sha256="",
    )
    manifest = TokenManifest(
        dtype="uint16",
        vocab_size=500,
        eot_id=0,
        tokenizer_sha256="",
        corpus_sha256="",
        split="train",
        block_bytes=4096,
        seed=0,
        shards=(shard,),
    )
    write_json(tmp_path / "manifest.json", to_dict(manifest))
    return tmp_path


@pytest.mark.parametrize("mask_documents", [False, True])
def test_batches_on_the_gpu_are_those_of_the_cpu(folder, mask_documents):
    settings = {"seq_len": 128, "global_batch": 32, "micro_batch": 8, "seed": 1, "last_step": 60}
    settings["mask_documents"] = mask_documents
    with Loader(folder, **settings) as cpu, Loader(folder, **settings, device="cuda") as gpu:
        assert gpu.device.index == torch.cuda.current_device()
        for expected, batch in zip(cpu, gpu, strict=True):
            assert batch.inputs.is_cuda
            busy = torch.ones(2000, 2000, device="cuda") @ torch.ones(2000, 2000, device="cuda")  # the trainer is late
            assert torch.equal(batch.inputs.cpu(), expected.inputs)
            assert torch.equal(batch.targets.cpu(), expected.targets)
            if mask_documents:
                assert torch.equal(batch.document_ids, expected.document_ids)
            assert busy[0, 0].item() == 2000
