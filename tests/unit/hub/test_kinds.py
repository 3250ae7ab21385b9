"""Models that no class of Hugging Face computes are refused, never written as another model."""

from dataclasses import replace

import pytest
from tests.expect import named, refused

from ingot.hub.kinds import CLASSES, class_problems, kind_of
from ingot.schema.arch import Arch

ARCH = Arch(vocab_size=64, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ffn=16)


@pytest.mark.parametrize("settings", [{}, {"qk_norm": True}, {"sliding_window": 4}], ids=str)
def test_a_cap_on_logits_is_not_exported(settings):
    kind_of(replace(ARCH, **settings))
    with refused("E-HF-EXPORT") as caught:
        kind_of(replace(ARCH, logit_softcap=30.0, **settings))
    assert named(caught.value.facts["problems"], "model.logit_softcap", 30.0)


@pytest.mark.parametrize("kind", CLASSES)
def test_no_class_has_a_cap_on_logits(kind):
    assert any("logit_softcap" in text for text in class_problems(replace(ARCH, logit_softcap=30.0), kind))
