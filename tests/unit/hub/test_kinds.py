"""Models that no class of Hugging Face computes are refused, never written as another model."""

from dataclasses import fields, replace
from typing import get_args, get_type_hints

import pytest

from ingot.errors import ConfigError
from ingot.hub.arch_config import huggingface_config
from ingot.hub.kinds import CLASSES, class_problems, kind_of
from ingot.schema.arch import Arch

ARCH = Arch(vocab_size=64, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ffn=16)


@pytest.mark.parametrize("settings", [{}, {"qk_norm": True}, {"sliding_window": 4}], ids=str)
def test_a_cap_on_logits_is_not_exported(settings):
    kind_of(replace(ARCH, **settings))
    with pytest.raises(ConfigError) as caught:
        kind_of(replace(ARCH, logit_softcap=30.0, **settings))
    assert "logit_softcap" in caught.value.found


@pytest.mark.parametrize("kind", CLASSES)
def test_no_class_has_a_cap_on_logits(kind):
    assert any("logit_softcap" in text for text in class_problems(replace(ARCH, logit_softcap=30.0), kind))


@pytest.mark.parametrize("name", sorted({field.name for field in fields(Arch)} - {"moe", "mla"}))
def test_every_setting_of_a_model_is_exported_or_refused(name):
    before = getattr(ARCH, name)
    others = [value for value in get_args(get_type_hints(Arch)[name]) if value != before]
    after = others[0] if others else not before if isinstance(before, bool) else 2 * before or 4
    try:
        exported = huggingface_config(replace(ARCH, **{name: after}), eot_id=0, dtype="float32")
    except ConfigError:
        return
    assert exported != huggingface_config(ARCH, eot_id=0, dtype="float32")
