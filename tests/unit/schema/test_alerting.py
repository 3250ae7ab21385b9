"""The settings of alerts: channels without secrets, in a section that most run files do not have."""

from dataclasses import replace

import pytest
from tests.expect import refused

from ingot.config import load, to_toml
from ingot.planner.request.presets import load_model
from ingot.schema.alerting import Alerts, EmailChannel, UrlChannel
from ingot.schema.run import Data, RunConfig, Train

SECRET = "https://hooks.example/services/T0/B0/s3cr3t"
TRAIN = Train(steps=10, seq_len=8, global_batch=2, micro_batch=2)
RUN = RunConfig(name="demo", model=load_model("tiny").arch, data=Data(tokens="t"), train=TRAIN)


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(RUN))
    return path


def test_a_run_without_alerts_has_no_section_and_one_with_them_keeps_it(run_file):
    assert "alerts" not in run_file.read_text() and not load(RunConfig, run_file).alerts.has_channel
    email = EmailChannel(host="smtp.example.org", sender="run@example.org", to=("me@example.org",))
    alerts = Alerts(budget_usd=5e6, slack=UrlChannel(url_env="SLACK_URL"), email=email)
    run_file.write_text(to_toml(replace(RUN, alerts=alerts)))
    assert load(RunConfig, run_file).alerts == alerts and alerts.has_channel
    assert RUN.training_sha256() == replace(RUN, alerts=alerts).training_sha256()


@pytest.mark.parametrize(
    "setting",
    [
        f"alerts.slack.url_env={SECRET}",
        f'alerts.slack="{SECRET}"',
        f'alerts.webhook.url="{SECRET}"',
        "alerts.email.password_env=s3cr3t!",
    ],
)
def test_a_secret_in_a_run_file_is_refused_without_showing_it(run_file, setting):
    with refused("E-CONFIG-SETTINGS") as error:
        load(RunConfig, run_file, [setting])
    assert "s3cr3t" not in f"{error.value} {error.value.facts}"


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("alerts.email.to", ["alerts.email.host=h", "alerts.email.sender=a@b"]),
        ("alerts.email.host", ["alerts.email.sender=a@b"]),
        ("alerts.email.sender", ["alerts.email.host=h", 'alerts.email.to=["a@b"]',
          'alerts.email.sender="a@b\\nBcc: c@d"']),
        ("alerts.email.security", ["alerts.email.host=h", "alerts.email.sender=a@b", 'alerts.email.to=["a@b"]',
          "alerts.email.user_env=U", "alerts.email.password_env=P", "alerts.email.security=none"]),
        ("alerts.email.user_env", ["alerts.email.user_env=U"]),
        ("alerts.mfu_least", ["alerts.mfu_least=0.5"]),
        ("alerts.checkpoint_intervals", ["alerts.checkpoint_intervals=1"]),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(run_file, key, setting):
    with refused("E-CONFIG-SETTINGS") as error:
        load(RunConfig, run_file, setting)
    assert error.value.facts["keys"] == [key]
