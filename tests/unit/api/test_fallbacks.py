"""The file of fallback layouts in a run folder: written once for a run and a machine, and never over an edited one."""

from dataclasses import replace

import pytest
from tests.expect import refused
from tests.unit.planner.run.test_check import CPU, RUN

from ingot.api import fallbacks
from ingot.schema.fallbacks import read_fallbacks
from ingot.schema.run_folder import RunFolder

TWO = replace(RUN, launch=replace(RUN.launch, nodes=2, min_ranks=1), parallel=replace(RUN.parallel, dp_shard=2))


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """`keep(run, cluster)` keeps the file, and returns whether it was written."""
    folder = RunFolder(tmp_path / "run")

    def call(run=TWO, cluster=CPU) -> bool:
        monkeypatch.setattr(fallbacks, "find_cluster", lambda name, base: cluster)
        before = folder.fallbacks.stat().st_ino if folder.fallbacks.exists() else 0
        fallbacks.keep_fallbacks(tmp_path, folder, run)
        read_fallbacks(folder.fallbacks, run)
        return folder.fallbacks.stat().st_ino != before

    call.folder = folder
    return call


def test_the_file_is_written_when_the_run_or_the_machine_is_another(keep):
    assert keep() and not keep()
    assert keep(cluster=replace(CPU, memory_bytes=CPU.memory_bytes // 2))
    smaller = replace(TWO, train=replace(TWO.train, micro_batch=2))
    assert keep(smaller) and not keep(replace(smaller, name="other"), CPU)
    assert [entry.nodes for entry in read_fallbacks(keep.folder.fallbacks, smaller).fewer_nodes] == [1]


def test_an_edited_file_is_refused_and_kept(keep):
    keep()
    text = keep.folder.fallbacks.read_text().replace("dp_shard=1", "dp_shard=2")
    keep.folder.fallbacks.write_text(text)
    with refused("E-FALLBACKS-READ"):
        keep()
    assert keep.folder.fallbacks.read_text() == text
