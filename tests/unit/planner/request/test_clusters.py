"""Clusters by name: sizes, racks, slices, and what is refused."""

import json

import pytest
from tests.expect import named, refused

from ingot.config import to_dict
from ingot.machine.facts import read_cluster, write_cluster
from ingot.planner.request.clusters import find_cluster, load_cluster
from ingot.schema.cluster import Cluster
from ingot.theory.devices import devices


@pytest.mark.parametrize("name", devices())
def test_every_device_makes_a_cluster_with_a_published_peak(name):
    device = devices()[name]
    cluster = load_cluster(f"2x{device.node}x{name}")
    assert (cluster.nodes, cluster.devices_per_node, cluster.devices) == (2, device.node, 2 * device.node)
    assert cluster.peak_flops["bf16"] > 1e13 and not list(cluster.problems())
    assert cluster.price_source or not cluster.usd_per_hour, "a price has its date"


@pytest.mark.parametrize(
    "name, nodes, per_node, domain",
    [
        ("h200", 1, 1, 1),
        ("8xH100", 1, 8, 8),
        ("1024xh100", 128, 8, 8),
        ("128x8xh100", 128, 8, 8),
        ("72xgb200", 18, 4, 72),
        ("16x72xgb200", 288, 4, 72),
        ("2x36xgb200", 18, 4, 36),
        ("2x4xgb200", 2, 4, 8),
        ("nvl72", 18, 4, 72),
        ("16xnvl72", 288, 4, 72),
        ("v5p-256", 32, 4, 128),  # named by cores, two to a chip
        ("v5e-256", 64, 4, 256),
        ("4xv5e-256", 256, 4, 256),
        ("256xtpu-v5e", 64, 4, 256),
    ],
)
def test_sizes_of_clusters(name, nodes, per_node, domain):
    cluster = load_cluster(name)
    assert (cluster.nodes, cluster.devices_per_node, cluster.domain) == (nodes, per_node, domain)


@pytest.mark.parametrize(
    "name, code, fix",
    [
        ("8xh900", "E-DEVICE-UNKNOWN", "'h100'"),
        ("h100x8", "E-DEVICE-UNKNOWN", "8xh100"),
        ("", "E-DEVICE-UNKNOWN", "8xh100"),
        ("0xh100", "E-CLUSTER-SHAPE", "8xh100"),
        ("2x16xh100", "E-CLUSTER-SHAPE", "write 4x8xh100"),
        ("12xh100", "E-CLUSTER-SHAPE", "use 8 or 16"),
        ("9999999x8xh100", "E-CLUSTER-SHAPE", "fewer"),
        ("2x4xv5e-256", "E-CLUSTER-SHAPE", "write 4xv5e-256"),
    ],
)
def test_impossible_clusters_are_refused_with_a_fix(name, code, fix):
    with refused(code) as caught:
        load_cluster(name)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    "field, value, meant",
    [
        ("network_bandwidth", 400, ["50e9"]),
        ("memory_bandwidth", 3.35, ["3.35e12"]),
        ("peak_flops", {"bf16": 989}, ["989e12"]),
        ("link_bandwidth", -1.0, [0]),
        ("device", "gpu", ["cpu", "cuda", "tpu"]),
    ],
)
def test_wrong_units_in_a_file_are_told(tmp_path, field, value, meant):
    values = {"name": "mine", "device": "cuda", "memory_bytes": 1 << 30, field: value}
    write_cluster(tmp_path / "mine.json", Cluster(**values))
    with refused("E-CONFIG-SETTINGS", keys=[field]) as caught:
        read_cluster(tmp_path / "mine.json")
    assert named(caught.value.facts["problems"], *meant)


def test_a_machine_file_has_at_most_a_million_devices(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(to_dict(load_cluster("8xh100")) | {"nodes": 500_000}))
    with refused("E-CONFIG-SETTINGS", keys=["nodes"]):
        find_cluster(str(path))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("8xh1000", ["h100", "h200", "h800"]),
        ("A-1000", ["a100", "a800"]),
        ("b2000", ["b200", "b300"]),
        ("4090", ["rtx4090"]),
        ("l40", ["l40s", "l4"]),
        ("gb2000", ["gb200", "gb300"]),
        ("abacus", []),
    ],
)
def test_an_unknown_device_lists_its_neighbors(name, nearest):
    with refused("E-DEVICE-UNKNOWN", nearest=nearest):
        load_cluster(name)


@pytest.mark.parametrize("name", ["8xH-100", "8x NVIDIA H100", "8xh_100"])
def test_case_dashes_and_the_vendor_do_not_matter(name):
    assert load_cluster(name).device_name == load_cluster("8xh100").device_name
    assert load_cluster("RTX-4090").device_name == load_cluster("rtx4090").device_name
