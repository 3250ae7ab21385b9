"""Reports about the health of a machine, from lines that kernels and drivers wrote, and what follows from them."""

import json
import os
import sys

import pytest

from ingot.machine.health import nvidia
from ingot.machine.health.kernel_log import KernelLog, read_message
from ingot.machine.health.nvidia import NvidiaSmi
from ingot.machine.health.report import HealthReport, HealthVerdict, node_name
from ingot.machine.health.report_file import ReportFile
from ingot.machine.health.rules import CORRECTED_SECONDS, LINK_SECONDS, HealthRules, xid_verdict
from ingot.machine.health.sources import bus_address, concerns, open_sources, own_gpus

# Messages as published in reports of faults: (message, kind, device, code, count)
_LINES = [
    (
        "NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        ("xid", "GPU 0000:91:00", 79, 1),
    ),
    (
        "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.",
        ("xid", "GPU 0000:10:1c", 63, 1),
    ),
    ("NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000", ("xid", "GPU 0000:01:00", 31, 1)),
    (
        "EDAC MC0: 78 CE memory scrubbing error on CPU_SrcID#0_MC#0_Chan#0_DIMM#1 (channel:0 slot:1 page:0xd6db0b "
        "offset:0x8c0 grain:32 syndrome:0x0 -  OVERFLOW err_code:0x0008:0x00c0 socket:0)",
        ("ecc_corrected", "memory CPU_SrcID#0_MC#0_Chan#0_DIMM#1", 0, 78),
    ),
    (
        "EDAC MC3: 1 UE memory read error on CPU_SrcID#0_MC#3_Chan#0_DIMM#0 (channel:0 slot:0 page:0x7e025e grain:32)",
        ("ecc_uncorrected", "memory CPU_SrcID#0_MC#3_Chan#0_DIMM#0", 0, 1),
    ),
    ("EDAC MC0: 1 UE memory scrubbing error on DIMM_A1", ("ecc_scrubbed", "memory DIMM_A1", 0, 1)),
    ("mlx5_core 0000:53:00.0 mlx5_3: Port: 1 Link DOWN", ("link_down", "network mlx5_3 port 1", 0, 1)),
    ("mlx5_core 0000:53:00.0 mlx5_3: Port: 1 Link ACTIVE", ("link_up", "network mlx5_3 port 1", 0, 1)),
    ("mlx5_core 0000:53:00.0 enp83s0f0np0: Link down", ("link_down", "network enp83s0f0np0", 0, 1)),
    ("igc 0000:05:00.0 eth5: NIC Link is Down", ("link_down", "network eth5", 0, 1)),
    ("igc 0000:05:00.0 eth5: NIC Link is Up 100 Mbps Full Duplex, Flow Control: RX", ("link_up", "network eth5", 0, 1)),
    ("mce: [Hardware Error]: Machine check events logged", ("machine_check", "processor", 0, 1)),
    (
        "Memory failure: 0x1a2b3c: Killing python:4242 due to hardware memory corruption",
        ("ecc_uncorrected", "memory page 0x1a2b3c", 0, 1),
    ),
]
_HARMLESS = [
    "NVRM: GPU at PCI:0000:91:00: GPU-b6c3b2be-c55b-d076-fa0e-d464e4c7e08b",
    "NVRM: Xid (PCI:0000:66:00): abc, pid=2280636",
    "EDAC MC0: 0 CE memory read error on CPU_SrcID#0",
    "EDAC skx MC0: ADDR 0xd6db0b8c0",
    "ata1: SATA link down (SStatus 0 SControl 300)",
    "br-lan: port 1(lan1) entered disabled state",
    "Memory failure: 0x7740c0: recovery action for dirty page: Recovered",
]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(("message", "expected"), _LINES)
def test_published_messages_of_kernels_are_read(message, expected):
    report = read_message(message)
    assert report is not None and report.node == node_name()
    assert (report.kind, report.device, report.code, report.count) == expected


@pytest.mark.parametrize("message", _HARMLESS)
def test_other_messages_of_kernels_are_no_reports(message):
    assert read_message(message) is None


def test_the_kernel_log_has_reports_from_now_on_only(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:91:00): 48, DBE\n")
    source = KernelLog(log)
    assert source.poll() == []
    with log.open("a") as file:
        file.write("4,2,2,-;NVRM: Xid (PCI:0000:91:00): 79, GPU has fallen off the bus.\n SUBSYSTEM=pci\n")
    assert [(report.code, report.words) for report in source.poll()] == [(79, "GPU has fallen off the bus.")]
    assert source.poll() == []
    source.close()


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="this user may not read the kernel's log")
def test_the_log_of_this_kernel_is_read_without_waiting():
    source = KernelLog()
    source.poll()
    source.close()


@pytest.mark.parametrize(
    ("code", "words", "verdict"),
    [
        (79, "GPU has fallen off the bus", HealthVerdict.DRAIN),
        (74, "NVLink: fatal error detected on link 3", HealthVerdict.DRAIN),
        (64, "Row Remapper: failed", HealthVerdict.DRAIN),
        (48, "DBE", HealthVerdict.DISCARD),
        (94, "Contained error", HealthVerdict.DISCARD),
        (95, "Uncontained error", HealthVerdict.DISCARD),
        (63, "Row Remapper: New row marked for remapping", HealthVerdict.WARN),
        (92, "High single-bit ECC error rate", HealthVerdict.WARN),
        (9999, "new in a later driver", HealthVerdict.WARN),
        (13, "Graphics SM Warp Exception", HealthVerdict.IGNORE),
        (154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", HealthVerdict.DRAIN),
        (154, "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)", HealthVerdict.IGNORE),
    ],
)
def test_the_consequence_of_an_xid(code, words, verdict):
    assert xid_verdict(code, words) is verdict


def test_a_thing_is_found_once_and_a_rate_of_corrected_errors_when_it_doubles():
    clock = Clock()
    rules = HealthRules(clock)
    fallen = HealthReport(kind="xid", device="GPU 0", code=79, words="fallen off the bus")
    assert [(f.verdict, f.words) for f in rules.judge([fallen, fallen])] == [
        (HealthVerdict.DRAIN, "GPU 0: XID 79: fallen off the bus")
    ]
    one = HealthReport(kind="ecc_corrected", device="memory A")
    found = [n for n in range(1, 45) if rules.judge([one])]
    assert found == [10, 20, 40]
    assert not rules.judge([HealthReport(kind="ecc_corrected", device="memory B", count=9)])
    clock.now = CORRECTED_SECONDS + 1  # a day later those are forgotten
    assert not rules.judge([one])
    assert rules.judge([HealthReport(kind="ecc_corrected", device="memory A", count=9)])


def test_a_link_that_flaps_is_no_loss_and_one_that_stays_down_is():
    clock = Clock()
    rules = HealthRules(clock)
    down, up = (HealthReport(kind=kind, device="network mlx5_0 port 1") for kind in ("link_down", "link_up"))
    assert not rules.judge([down])
    clock.now = LINK_SECONDS - 1
    assert not rules.judge([up])
    clock.now = 3 * LINK_SECONDS
    assert not rules.judge([down])
    clock.now += LINK_SECONDS
    assert [f.verdict for f in rules.judge([])] == [HealthVerdict.DRAIN]
    assert not rules.judge([])


def test_only_memory_that_returned_wrong_data_forbids_a_save():
    kinds = {
        "ecc_uncorrected": HealthVerdict.DISCARD,
        "ecc_scrubbed": HealthVerdict.DRAIN,
        "row_remap_failure": HealthVerdict.DRAIN,
        "link_lost": HealthVerdict.DRAIN,
    }
    for kind, verdict in kinds.items():
        (finding,) = HealthRules().judge([HealthReport(kind=kind, device="memory A")])
        assert finding.verdict is verdict


def test_a_file_of_reports_is_read_line_by_line_for_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "node-a")
    path = tmp_path / "health.jsonl"
    path.write_text(json.dumps({"kind": "xid", "code": 48}) + "\n")
    source = ReportFile(path)
    assert source.poll() == []
    with path.open("a") as file:
        for line in (
            {"kind": "xid", "code": 79, "device": "GPU 3"},
            {"kind": "xid", "code": 79, "node": "node-b"},
            {"kind": "no such kind"},
        ):
            file.write(json.dumps(line) + "\n")
        file.write('{"kind": "temperature", "device"')
    found = source.poll()
    assert [(r.kind, r.device, r.node) for r in found] == [
        ("xid", "GPU 3", "node-a"),
        ("silent_source", str(path), "node-a"),
    ]
    with path.open("a") as file:
        file.write(': "GPU 1"}\n')
    assert [(r.kind, r.device) for r in source.poll()] == [("temperature", "GPU 1")]
    path.write_text('{"kind": "link_down"}\n')  # a monitor that begins its file again
    assert [r.kind for r in source.poll()] == ["link_down"]


def test_a_file_that_comes_later_is_read_from_its_beginning(tmp_path):
    source = ReportFile(tmp_path / "later.jsonl")
    assert source.poll() == []
    (tmp_path / "later.jsonl").write_text('{"kind": "ecc_uncorrected"}\n')
    assert [r.kind for r in source.poll()] == ["ecc_uncorrected"]


def _smi(tmp_path, *outputs: str) -> tuple[NvidiaSmi, Clock]:
    clock, text = Clock(), tmp_path / "answer"

    def answer(n: int) -> None:
        text.write_text(outputs[n])

    answer(0)
    source = NvidiaSmi([sys.executable, "-c", f"print(open({str(text)!r}).read(), end='')"], clock)
    source.answer = answer
    return source, clock


def _ask(source: NvidiaSmi, clock: Clock) -> list[HealthReport]:
    clock.now += nvidia.SECONDS
    assert source.poll() == []
    source._running.wait(30)
    return source.poll()


def test_counters_of_nvidia_smi_are_reported_when_they_grow(tmp_path):
    before = "00000000:3B:00.0, 4, 0, No, No, Not Active\n00000000:5E:00.0, [N/A], [N/A], [N/A], [N/A], Not Active\n"
    after = "00000000:3B:00.0, 16, 1, Yes, No, Active\n00000000:5E:00.0, [N/A], [N/A], [N/A], Yes, Not Active\n"
    source, clock = _smi(tmp_path, before, after, 'Field "x" is not a valid field to query.\n')
    assert _ask(source, clock) == []
    source.answer(1)
    found = [(r.device, r.kind, r.count) for r in _ask(source, clock)]
    assert found == [
        ("GPU 00000000:3B:00.0", "ecc_corrected", 12),
        ("GPU 00000000:3B:00.0", "ecc_uncorrected", 1),
        ("GPU 00000000:3B:00.0", "row_remap_pending", 1),
        ("GPU 00000000:3B:00.0", "temperature", 1),
        ("GPU 00000000:5E:00.0", "row_remap_failure", 1),
    ]
    source.answer(2)
    assert [r.kind for r in _ask(source, clock)] == ["silent_source"]
    source.close()


def test_nvidia_smi_that_hangs_is_left_and_reported():
    clock = Clock()
    source = NvidiaSmi([sys.executable, "-c", "import time; time.sleep(60)"], clock)
    assert source.poll() == [] and source.poll() == []
    hanging = source._running
    clock.now += nvidia.ANSWER_SECONDS + 1
    assert [r.kind for r in source.poll()] == ["silent_source"]
    assert hanging.wait(30) < 0
    assert source.poll() == [] and source._running is None  # not asked again at once
    source.close()


def test_the_gpus_of_other_jobs_do_not_count(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '00000000:3B:00.0\\n00000000:5E:00.0\\n00000000:AF:00.0\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    own = own_gpus({"CUDA_VISIBLE_DEVICES": "0, 2"})
    assert own == {"0000:3b:00", "0000:af:00"} == {bus_address("0000:3b:00"), bus_address("00000000:AF:00.0")}
    for device, is_own in (("GPU 0000:3b:00", True), ("GPU 00000000:5E:00.0", False), ("memory DIMM_A1", True)):
        assert concerns(HealthReport(kind="xid", device=device), own) is is_own
        assert concerns(HealthReport(kind="xid", device=device), None)
    assert own_gpus({}) is None and own_gpus({"CUDA_VISIBLE_DEVICES": "GPU-b6c3"}) is None


def test_a_machine_without_nvidia_smi_has_its_other_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    sources = open_sources(tmp_path / "health.jsonl")
    assert sources[0].name == str(tmp_path / "health.jsonl") and "nvidia-smi" not in [s.name for s in sources]
    for source in sources:
        source.close()
