"""Assumptions changed by name: values with units, and no unknown names."""

from dataclasses import replace

import pytest
from tests.expect import named, refused

from ingot.planner.request.amounts import parse_bandwidth
from ingot.planner.request.assumptions import assume, with_properties
from ingot.planner.request.clusters import load_cluster
from ingot.planner.run.outlook import Assumptions
from ingot.schema.software import INGOT

CLUSTER = load_cluster("2x8xh100")


@pytest.mark.parametrize("text", ["400Gb/s", "400 gbps", "50GB/s", "50 GB/s", "400Gbit/s", "50000 MB/s"])
def test_bits_and_bytes_per_second(text):
    assert parse_bandwidth(text) == pytest.approx(50e9)


def test_facts_and_assumptions_are_told_apart_by_their_names():
    cluster, assumptions = assume(
        CLUSTER, Assumptions(), ["network_bandwidth=400Gb/s", "restart-seconds=20min", "spares=4", "sharp=true"]
    )
    assert cluster == replace(CLUSTER, network_bandwidth=50e9, sharp=True)
    assert assumptions == Assumptions(restart_seconds=1200, spares=4)
    assert assume(CLUSTER, Assumptions(), []) == (CLUSTER, Assumptions())


@pytest.mark.parametrize(
    ("setting", "code", "fix"),
    [
        ("network_bandwidth=400Gb", "E-BANDWIDTH-FORMAT", "50GB/s"),
        ("memory_bytes=80Gb", "E-SIZE-BITS", "80GB or memory_bytes=80GiB"),
        ("restart_seconds=soon", "E-ASSUME-VALUE", ""),
        ("restart_seconds=-5", "E-ASSUME-VALUE", ""),
        ("network=1", "E-ASSUME-UNKNOWN", "network_kind"),
        ("device=cpu", "E-ASSUME-UNKNOWN", ""),
        ("spares", "E-OPTION-PAIR", "spares=VALUE"),
        ("restart_source=mine", "E-ASSUME-UNKNOWN", ""),
    ],
)
def test_others_are_refused_with_a_fix(setting, code, fix):
    with refused(code) as caught:
        assume(CLUSTER, Assumptions(), [setting])
    assert fix in caught.value.fix


@pytest.mark.parametrize(("setting", "meant"), [("network_bandwidth=400", "50e9"), ("nodes=0", 1)])
def test_impossible_values_are_refused_by_the_rules_of_a_cluster(setting, meant):
    with refused("E-CONFIG-SETTINGS", keys=[setting.partition("=")[0]]) as caught:
        assume(CLUSTER, Assumptions(), [setting])
    assert named(caught.value.facts["problems"], meant)


def test_software_by_its_properties():
    tuned = with_properties(INGOT, ["kernels=tuned", "overlap_tensor=true"], "rowwise")
    assert (tuned.kernels, tuned.overlap_tensor, tuned.recipe) == ("tuned", True, "rowwise")
    assert tuned.name == "kernels tuned, overlap_tensor true, recipe rowwise"
    assert with_properties(INGOT, []) is INGOT
    with refused("E-CONFIG-SETTINGS", keys=["kernels"], meant={"kernels": ["tuned"]}):
        with_properties(INGOT, ["kernels=tunde"])
    with refused("E-SOFTWARE-UNKNOWN", given="kernel"):
        with_properties(INGOT, ["kernel=tuned"])
