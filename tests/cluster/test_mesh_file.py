"""Mesh files: those that ship, those that are wrong, and what is written."""

import csv
import itertools
import re
import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hxla import Cluster, Device, Link, MeshError, NetworkCard, Node, Rate, Speed, load_cluster
from support.inside.cluster import dump_cluster
from support.inside.core import find, names
from support.paths import ROOT
from support.tiers import examples

SHIPPED = names("meshes")
DESCRIBED = [name for name in SHIPPED if not name.startswith("cpu-")]


@pytest.fixture
def load(tmp_path):
    def write_and_load(text):
        path = tmp_path / "mesh.toml"
        path.write_text(text)
        return load_cluster(str(path)).model_copy(update={"file": ""})

    return write_and_load


@pytest.mark.parametrize("name", SHIPPED)
def test_a_cluster_that_is_written_reads_back_the_same(name, load):
    cluster = load_cluster(name)
    assert load(dump_cluster(cluster)) == cluster


def floats(low, high):
    return st.floats(low, high).map(lambda x: float(f"{x:.15g}"))


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
SIZES = st.lists(st.integers(1, 2**40), max_size=3, unique=True).map(sorted)
LINKS = st.builds(
    Link,
    bytes_per_second=floats(1e3, 1e13),
    latency_seconds=floats(1e-9, 1),
    curve=SIZES.flatmap(
        lambda sizes: st.tuples(*(st.tuples(st.just(s), floats(1, 1e13)) for s in sizes))
    ),
    source=WORDS,
)
NETWORK_CARDS = st.builds(
    NetworkCard, bytes_per_second=floats(1e3, 1e13), duplex=st.booleans(), source=WORDS
)
SPEEDS = st.builds(
    Speed, model=WORDS, steps_per_second=floats(1e-9, 1e9), batch_size=st.integers(1, 9)
)
DEVICES = st.builds(
    Device,
    kind=WORDS.filter(lambda kind: kind != "cpu"),
    memory_bytes=st.none() | st.integers(1, 2**50),
    memory_bytes_per_second=st.none() | floats(1e3, 1e13),
    rates=st.sampled_from(["float64", "float32", "bfloat16"]).flatmap(
        lambda dtype: st.tuples(
            st.builds(
                Rate,
                dtype=st.just(dtype),
                flops_per_second=floats(1e3, 1e16),
                measured=st.booleans(),
                source=WORDS,
            )
        )
    ),
    speeds=st.lists(SPEEDS, max_size=2, unique_by=lambda s: s.model).map(tuple),
    source=WORDS,
)


@st.composite
def clusters(draw):
    devices, nodes = [], []
    for name in draw(st.lists(WORDS, min_size=1, max_size=3, unique=True)):
        inside = draw(st.lists(DEVICES, min_size=1, max_size=3))
        link = draw(LINKS) if len(inside) > 1 else None
        card = draw(st.none() | NETWORK_CARDS)
        for _ in range(draw(st.integers(1, 2))):
            devices += [d.model_copy(update={"node": len(nodes)}) for d in inside]
            nodes.append(Node(name=name, link=link, network_card=card))
    default = draw(LINKS) if len(nodes) > 1 else None
    return Cluster(
        name=draw(WORDS), devices=tuple(devices), nodes=tuple(nodes), default_link=default
    )


@settings(max_examples=examples(25, 200), suppress_health_check=list(HealthCheck))
@given(cluster=clusters())
def test_any_cluster_that_is_written_reads_back_the_same(cluster, load):
    assert load(dump_cluster(cluster)) == cluster


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_shipped_figure_has_its_source(name):
    cluster = load_cluster(name)
    links = [n.link for n in cluster.nodes if n.link] + [link for *_, link in cluster.links]
    links += [cluster.default_link] if cluster.default_link else []
    for device in cluster.devices:
        assert device.memory_bytes
        assert device.memory_bytes_per_second
        assert device.rate("float32")
    values = [*links, *cluster.devices]
    values += [v for d in cluster.devices for v in (*d.rates, *d.speeds)]
    assert all(value.source for value in values)


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_two_devices_of_a_shipped_cluster_are_linked(name):
    cluster = load_cluster(name)
    for i, j in itertools.combinations(range(len(cluster.devices)), 2):
        assert cluster.link(i, j).seconds(1 << 20) > 0


def test_a_kind_has_the_same_figures_in_every_shipped_file():
    known = {}
    for name in DESCRIBED:
        for device in load_cluster(name).devices:
            device = device.model_copy(update={"node": 0})
            assert known.setdefault(device.kind, device) == device, name
    assert len(known) >= 7


def test_whales_clusters_are_as_the_paper_has_them():
    for num in (8, 4):
        cluster = load_cluster(f"whale-{num}v100-{num}p100")
        kinds = [(d.kind[6:10], d.memory_bytes >> 30, d.node) for d in cluster.devices]
        assert kinds == [("V100", 32, 0)] * num + [("P100", 16, 1)] * num
        v100, p100 = cluster.devices[0], cluster.devices[-1]
        ratio = v100.speed("resnet50").steps_per_second / p100.speed("resnet50").steps_per_second
        assert ratio == pytest.approx(1.66, abs=0.03)


def test_shipped_speeds_are_the_measured_ones():
    data = ROOT.parent / "shared/data/gavel/isolated_throughputs.csv"
    if not data.is_file():
        pytest.skip("the measurements are not beside this checkout")
    with data.open() as file:
        rows = [r for r in csv.DictReader(file) if r["source_file"].startswith("simulation")]
    alone = {
        (row["gpu_type"], row["job_type"].lower().replace("-", "")): float(
            row["steps_per_s_isolated"]
        )
        for row in rows
        if row["scale_factor"] == "1"
    }
    checked = 0
    for device in load_cluster("easyscale-v100-p100-t4").devices:
        for speed in device.speeds:
            job = f"{speed.model} (batch size {speed.batch_size})"
            measured = alone[device.kind[6:10].lower(), job]
            assert speed.steps_per_second == pytest.approx(measured, rel=5e-4)
            checked += 1
    assert checked == 3 * (32 + 16)


def test_like_nodes_and_named_pairs():
    cluster = load_cluster("easyscale-v100-p100-t4")
    assert [d.node for d in cluster.devices[30:34]] == [3, 3, 4, 4]
    assert cluster.link(0, 7) == cluster.nodes[0].link
    assert cluster.link(0, 8) == cluster.default_link  # another node of the same sort


def test_measured_curves_pairs_and_cards_are_read(load):
    cluster = load(
        """
name = "two"
[[node]]
name = "b"
[[node.device]]
kind = "A"
count = 2
uuids = ["GPU-1", "GPU-2"]
source = "NVML"
[node.device.rates]
bfloat16 = { teraflops_per_second = 0.3, measured = true }
float32 = { teraflops_per_second = 0.1, source = "mine" }
[node.link]
gigabytes_per_second = 5
curve = [
    { message_bytes = 1000, gigabytes_per_second = 0.1 },
    { message_bytes = 1e6, gigabytes_per_second = 5 },
]
[node.network_card]
gigabytes_per_second = 2
duplex = false
[[node]]
name = "a"
[[node.device]]
kind = "B"
[[link]]
between = ["b", "a"]
gigabytes_per_second = 1
latency_microseconds = 20
"""
    )
    assert [d.uuid for d in cluster.devices] == ["GPU-1", "GPU-2", None]
    assert cluster.devices[1].rate("bfloat16").flops_per_second == 3e11
    assert cluster.devices[1].rate("bfloat16").measured
    assert [r.source for r in cluster.devices[0].rates] == ["mine", "NVML"]
    assert cluster.link(0, 1).curve == ((1e3, 1e8), (1e6, 5e9))
    assert cluster.link(2, 0).latency_seconds == 2e-5
    assert cluster.network_card(0) == NetworkCard(bytes_per_second=2e9, duplex=False)
    assert cluster.network_card(1).bytes_per_second == 1e9
    assert cluster.network_card(1).duplex
    assert load(dump_cluster(cluster)) == cluster


DEVICE = '[[device]]\nkind = "A"\n'
NODES = """
[[node]]
name = "left"
[node.link]
gigabytes_per_second = 10
[[node.device]]
kind = "A"
count = 2
[[node]]
name = "right"
[[node.device]]
kind = "B"
"""
LINK = "[[link]]\ngigabytes_per_second = 1\n"
HOSTILE = {
    "negative speed": (
        DEVICE + "[device.rates]\nfloat32 = { teraflops_per_second = -1 }",
        r"device\.0\.rates\.float32\.teraflops_per_second: .* equal to (1e-12|0\.0{11}1), found -1",
    ),
    "negative measured speed": (
        DEVICE + "[device.speeds]\nbert = { steps_per_second = -2.0, batch_size = 1 }",
        r"device\.0\.speeds\.bert\.steps_per_second: .*found -2\.0",
    ),
    "a batch of nothing": (
        DEVICE + "[device.speeds]\nbert = { steps_per_second = 1, batch_size = 0 }",
        r"device\.0\.speeds\.bert\.batch_size: .*found 0",
    ),
    "zero memory": (DEVICE + "memory_gib = 0", r"device\.0\.memory_gib: .*found 0"),
    "less than a byte": (DEVICE + "memory_gib = 1e-12", r"device\.0\.memory_gib: .*found 1e-12"),
    "memory that is no number": (
        DEVICE + "memory_gib = nan",
        r"device\.0\.memory_gib: .*finite.*found nan",
    ),
    "memory without end": (DEVICE + "memory_gib = inf", r"device\.0\.memory_gib: .*found inf"),
    "memory in words": (DEVICE + 'memory_gib = "16"', r"device\.0\.memory_gib: .*found '16'"),
    "memory that is true": (DEVICE + "memory_gib = true", r"device\.0\.memory_gib: .*found True"),
    "no bandwidth": (
        DEVICE + "memory_gigabytes_per_second = 0.0",
        r"device\.0\.memory_gigabytes_per_second: .*found 0\.0",
    ),
    "a speed that is no number": (
        DEVICE + "[device.rates]\nfloat32 = { teraflops_per_second = nan }",
        r"float32\.teraflops_per_second: .*finite.*found nan",
    ),
    "an unknown dtype": (
        DEVICE + "[device.rates]\nfloat_32 = { teraflops_per_second = 1 }",
        r"device\.0\.rates\.float_32: unknown key, did you mean 'float32'",
    ),
    "an unknown key of a rate": (
        DEVICE + "[device.rates]\nfloat32 = { teraflop_per_second = 1 }",
        r"float32\.teraflops_per_second: missing(.|\n)*did you mean 'teraflops_per_second'",
    ),
    "an unknown key of a speed": (
        DEVICE + "[device.speeds]\nbert = { steps_per_second = 1, batch = 1 }",
        r"speeds\.bert\.batch: unknown key, did you mean 'batch_size'",
    ),
    "an unknown key of a link": (
        NODES + LINK + "latency_seconds = 1",
        r"link\.0\.latency_seconds: unknown key, did you mean 'latency_microseconds'",
    ),
    "an unknown key of a node": (
        NODES + 'kinds = "x"',
        r"node\.1\.device\.0\.kinds: unknown key, did you mean 'kind'",
    ),
    "an unknown key of a file": (
        "devices = 3\n" + DEVICE,
        r"devices: unknown key, did you mean 'device'",
    ),
    "a share of a GPU's core": (DEVICE + "core_share = 0.5", r"core_share is for kind 'cpu'"),
    "no devices": ("", r"device: missing, add \[\[device\]\]"),
    "a node without devices": (
        '[[node]]\nname = "a"',
        r"node\.0\.device: missing",
    ),
    "one table": ('[device]\nkind = "A"', r"device: .*write \[\[device\]\]"),
    "too many": (DEVICE + "count = 1000000000", r"device\.0\.count: .*found 1000000000"),
    "a device of no node": (
        DEVICE + NODES + LINK,
        r"device: belongs to no node, write it as \[\[node\.device\]\]",
    ),
    "a node's name twice": (
        NODES.replace("right", "left") + LINK,
        r"node\.1\.name: 'left' names an earlier node",
    ),
    "a device in two nodes": (
        NODES.replace('kind = "A"\ncount = 2', 'kind = "A"\ncount = 2\nuuids = ["x", "y"]')
        + 'uuids = ["y"]\n'
        + LINK,
        r"node\.1\.device\.0\.uuids: 'y' is in node\.0\.device\.0\.uuids too",
    ),
    "a device twice": (
        DEVICE + 'count = 2\nuuids = ["x", "x"]',
        r"device\.0\.uuids: 'x' is in device\.0\.uuids too",
    ),
    "more cards than devices": (
        DEVICE + 'uuids = ["x", "y"]',
        r"device\.0\.uuids: names 2 cards, the table describes 1",
    ),
    "cards of several nodes": (
        '[[node]]\nname = "a"\ncount = 2\n[[node.device]]\nkind = "A"\nuuids = ["x"]\n' + LINK,
        r"uuids: names 1 cards, the table describes 2",
    ),
    "no link inside": (
        NODES.replace("[node.link]\ngigabytes_per_second = 10\n", "") + LINK,
        r"node\.0\.link: missing for 'left' of 2 devices; add \[node\.link\]",
    ),
    "no link between": (
        NODES,
        r"link: missing between nodes 'left' and 'right'.*between = \[\"left\", \"right\"\]",
    ),
    "no link between like nodes": (
        NODES.replace('"right"', '"right"\ncount = 2') + LINK + 'between = ["left", "right"]',
        r"link: missing between nodes 'right' and 'right'",
    ),
    "a link to nowhere": (
        NODES + LINK + LINK + 'between = ["left", "rihgt"]',
        r"link\.1\.between: no node 'rihgt', did you mean 'right'",
    ),
    "a link to itself": (
        NODES + LINK + LINK + 'between = ["left", "left"]',
        r"link\.1\.between: there is one node 'left'",
    ),
    "a link of three": (
        NODES + LINK + LINK + 'between = ["left", "right", "left"]',
        r"link\.1\.between: .*at most 2",
    ),
    "a link twice": (
        NODES + (LINK + 'between = ["left", "right"]\n') + LINK + 'between = ["right", "left"]',
        r"link\.1: repeats the link between 'left' and 'right'",
    ),
    "two defaults": (NODES + LINK + LINK, r"link\.1: repeats the default"),
    "a link without nodes": (DEVICE + LINK, r"link: there are no nodes to link"),
    "a link that stands": (
        NODES + LINK.replace("= 1", "= 0"),
        r"link\.0\.gigabytes_per_second: .*found 0",
    ),
    "a latency below zero": (
        NODES + LINK + "latency_microseconds = -1",
        r"link\.0\.latency_microseconds: .*found -1",
    ),
    "a curve that turns back": (
        NODES
        + LINK
        + "curve = [{ message_bytes = 9, gigabytes_per_second = 1 }, "
        + "{ message_bytes = 8, gigabytes_per_second = 1 }]",
        r"link\.0\.curve: message_bytes must grow",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_wrong_mesh_file_gives_one_error_with_file_key_and_reason(name, load):
    text, message = HOSTILE[name]
    with pytest.raises(MeshError) as caught:
        load(f'name = "x"\n{text}')
    assert "mesh.toml has faults:\n" in str(caught.value)
    assert re.search(message, str(caught.value)), caught.value


def test_all_faults_come_at_once(load):
    with pytest.raises(MeshError) as caught:
        load(
            'nam = "x"\n'
            + NODES.replace('"A"', '"A"\nmemory_gib = -1').replace('"B"', '"B"\ncuont = 2')
            + '[[link]]\nbetween = ["left", "up"]\ngigabytes_per_second = nan\n'
        )
    lines = str(caught.value).splitlines()
    keys = [line.split(":")[0].strip() for line in lines[1:]]
    assert sorted(keys) == sorted(
        [
            "name",
            "nam",
            "node.0.device.0.memory_gib",
            "node.1.device.0.cuont",
            "link.0.gigabytes_per_second",
            "link.0.between",
            "link",
        ]
    )


def test_shipped_files_are_read_by_people():
    for name in DESCRIBED:
        text = find("meshes", name).read_text()
        assert tomllib.loads(text)["description"]
        assert max(map(len, text.splitlines())) <= 120


def test_the_documented_file_is_one(load):
    *_, example = re.findall(
        r"```toml\n(.*?)```", (ROOT / "docs/how-to/mesh-files.md").read_text(), re.S
    )
    cluster = load(example)
    assert len(cluster.devices) == 17
    assert cluster.link(0, 8).seconds(1 << 16) == pytest.approx(65536 / 2e9)
    assert cluster.link(0, 16).bytes_per_second == 6.25e9
