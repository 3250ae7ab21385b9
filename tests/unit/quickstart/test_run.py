"""The stages of the quickstart as they are printed, and its plan on a machine that is too busy to be measured."""

from types import SimpleNamespace

import pytest
from tests.expect import refused

from ingot.errors import ResourceError
from ingot.machine.facts import read_machine, this_cluster
from ingot.quickstart import run as quickstart
from ingot.quickstart.run import QuickstartRun
from ingot.rehearse.calibrate import calibrate as calibration
from ingot.schema.tokens import Shard, TokenManifest


@pytest.fixture
def printed():
    return []


@pytest.fixture
def stages(tmp_path, printed):
    output = SimpleNamespace(say=printed.append)
    return QuickstartRun(tmp_path, warcs=(), workers=1, output=output, quiet=True)


@pytest.fixture
def prepared():
    shard = Shard(name="guide-0", source="guide", tokens=1_300_000, documents=1_950, text_bytes=6 << 20,
                  blocks_sha256="5" * 64, documents_sha256="6" * 64)  # fmt: skip
    return SimpleNamespace(
        train=TokenManifest(dtype="uint16", vocab_size=4096, eot_id=0, tokenizer_sha256="7" * 64,
                            corpus_sha256="8" * 64, split="train", block_bytes=1 << 20, seed=1, shards=(shard,))
    )  # fmt: skip


def failing(monkeypatch, code):
    def calibrate(uncalibrated):
        raise ResourceError(code, "calibration did not finish within 300 s", rule="r", fix="f")

    monkeypatch.setattr(calibration, "calibrate", calibrate)


def test_a_machine_that_is_too_busy_to_be_measured_gets_a_plan_without_a_time(stages, printed, prepared, monkeypatch):
    failing(monkeypatch, "E-CALIBRATION-TIMEOUT")
    config, plan = stages.plan(prepared)
    assert plan.step_seconds == 0.0 and plan.total_memory_bytes > 0 and config.parallel.world_size == 2
    before, *_ = printed
    assert before.startswith("4/9 plan") and "measuring this machine" in before and "5 min" in before
    text = " ".join(" ".join(printed).split())
    assert "time unknown" in text and "the speed of this machine is not measured: calibration did not" in text
    assert stages.paths.run_file.exists() and not stages.paths.machine.exists()  # measured by the next start
    failing(monkeypatch, "E-CALIBRATION-RANK")
    with refused("E-CALIBRATION-RANK"):
        stages.plan(prepared)


def test_a_machine_is_measured_once_for_a_folder(stages, printed, monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda uncalibrated: uncalibrated)
    first, notice = stages.measured_machine()
    assert first == this_cluster(read_machine(), first.devices) and notice == "" and len(printed) == 1
    failing(monkeypatch, "E-CALIBRATION-RANK")
    assert stages.measured_machine() == (first, "") and len(printed) == 1


def test_stages_are_printed_in_80_columns_with_their_times_in_one(stages, printed, monkeypatch):
    monkeypatch.setattr(quickstart, "format_seconds", lambda seconds: "2 min 35 s")
    with stages.stage("doctor") as lines:
        lines += ["2 cores \u00b7 19.0 GiB of memory free \u00b7 no GPU \u00b7 12 of 12 checks ok", "word " * 40]
    with stages.stage("crawl") as lines:
        lines.append("3,909 pages of documentation \u00b7 5 WARC files \u00b7 8.6 MiB")
    assert max(map(len, printed)) <= 80
    assert [line.index("2 min 35 s") for line in printed if "/9" in line] == [70, 70]
    assert printed[1].strip() == "12 of 12 checks ok"  # items stay whole
