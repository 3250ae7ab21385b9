"""The identity of an experiment: settings that a model does not use are no part of it."""

from dataclasses import replace

from ingot.config import to_dict, to_toml
from ingot.planner.request.presets import load_model
from ingot.schema.arch import Arch, Moe
from ingot.schema.changes import identity
from ingot.schema.run import DEFAULTS, Data, RunConfig, Train, settings_sha256
from ingot.theory.rules import load_run, run_from_dict

TINY = Arch(
    vocab_size=4096, d_model=128, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=64, d_ffn=344, max_seq_len=256
)
RUN = RunConfig(
    name="demo",
    model=TINY,
    data=Data(tokens="tokens/train"),
    train=Train(steps=100, seq_len=64, global_batch=8, micro_batch=4),
)
# Of this run before there were experts, latent attention and windows, by the code of that time.
EARLIER = "c26b94bc20f3f63f123cc52f7490e3344ad3dfa4c3b98793a316522d8bbbafae"
EXPERTS = Moe(num_experts=8, top_k=2, d_expert=172)


def with_model(**changes) -> RunConfig:
    return replace(RUN, model=replace(TINY, **changes))


def test_a_run_that_passes_all_its_steps_is_refused():
    (problem,) = replace(RUN, data=replace(RUN.data, skip=("1-70", "60-99", "100-200"))).problems()
    assert problem[0] == "data.skip" and "all 100 steps of the run" in problem[1]
    assert not list(replace(RUN, data=replace(RUN.data, skip=("1-70", "72-200", "72"))).problems())


def test_a_dense_run_continues_its_earlier_checkpoints():
    assert RUN.training_sha256() == EARLIER
    assert run_from_dict(to_dict(RUN)).training_sha256() == EARLIER


def identity_of(run: RunConfig) -> dict:
    return identity(run.settings(), DEFAULTS)


def test_what_a_model_uses_is_part_of_the_experiment():
    assert identity_of(with_model(sliding_window=32))["model.sliding_window"] == 32
    assert identity_of(with_model(logit_softcap=30.0))["model.logit_softcap"] == 30.0
    assert "model.logit_softcap" not in identity_of(RUN)
    settings = identity_of(with_model(moe=EXPERTS))
    assert {key for key in settings if key.startswith("model.moe.")} == {"model.moe.num_experts", "model.moe.d_expert"}
    assert not any(key.startswith("model.mla.") for key in settings)
    mixed = with_model(moe=replace(EXPERTS, z_loss=1e-3))
    assert len({run.training_sha256() for run in (RUN, mixed, with_model(moe=EXPERTS))}) == 3


# Of a run with experts: settings that come later must not change it.
WITH_EXPERTS = "6e5a39266d8bf61c8e82c75090ae68ed5a6a5e0a9e89baad9f50ea7fd4cb9910"


def test_a_setting_that_came_later_does_not_change_earlier_runs_with_experts():
    assert with_model(moe=EXPERTS).training_sha256() == WITH_EXPERTS
    written_out = identity_of(with_model(moe=EXPERTS)) | {"model.moe.noise": 0.0, "model.mla.v_dim": 0}
    assert settings_sha256(written_out) == WITH_EXPERTS
    assert settings_sha256(written_out | {"model.moe.noise": 0.1}) != WITH_EXPERTS
    resting = identity_of(with_model(moe=replace(EXPERTS, bias_rate=0.1, bias_steps=9)))
    assert resting["model.moe.bias_steps"] == 9


def test_a_window_that_hides_nothing_is_refused():
    (problem,) = with_model(sliding_window=256).problems()
    assert problem[0] == "model.sliding_window" and "hides nothing in sequences of at most 256 tokens" in problem[1]
    assert not list(with_model(sliding_window=255).problems())


def test_biases_that_never_rest_have_no_last_step():
    steps = RUN.train.steps
    (problem,) = with_model(moe=replace(EXPERTS, bias_rate=0.1, bias_steps=steps)).problems()
    assert problem[0] == "model.moe.bias_steps" and f"all {steps} steps of the run" in problem[1]
    assert not list(with_model(moe=replace(EXPERTS, bias_rate=0.1, bias_steps=steps - 1)).problems())


def test_a_run_file_shows_experts_where_there_are_some(tmp_path):
    assert "moe" not in to_toml(RUN) and "mla" not in to_toml(RUN)
    (tmp_path / "run.toml").write_text(to_toml(with_model(moe=EXPERTS)))
    assert "[model.moe]\nnum_experts = 8" in (tmp_path / "run.toml").read_text()
    assert load_run(tmp_path / "run.toml") == with_model(moe=EXPERTS)


def test_one_line_gives_a_run_experts(tmp_path):
    line = "moe = { num_experts = 8, top_k = 2, d_expert = 172 }"
    (tmp_path / "run.toml").write_text(to_toml(RUN))
    assert load_run(tmp_path / "run.toml", [f"model.{line}"]) == with_model(moe=EXPERTS)
    (tmp_path / "run.toml").write_text(to_toml(RUN).replace("[model]\n", f"[model]\n{line}\n"))
    assert load_run(tmp_path / "run.toml") == with_model(moe=EXPERTS)


def test_the_quickstarts_model_is_the_one_above():
    assert load_model("tiny").arch == TINY
