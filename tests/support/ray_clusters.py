"""Ray clusters of this machine, for tests of elastic jobs."""

import contextlib
import os
import pathlib
import subprocess
import sys

from support.launched import own_environment

STORE_BYTES = 80_000_000  # of a node's objects; the least that Ray takes is 75 MB


@contextlib.contextmanager
def alone():
    """What is started here has the environment of a job: Ray hands it on to all its processes."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(own_environment() | {"RAY_USAGE_STATS_ENABLED": "0"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def started_cluster():
    """A Ray cluster of this machine whose head has no devices."""
    from ray.cluster_utils import Cluster

    with alone():
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        return Cluster(initialize_head=True, head_node_args=head)


def add_node(cluster, share):
    """A node with one device."""
    labels = {"core-share": str(share)}
    with alone():
        return cluster.add_node(num_cpus=1, labels=labels, object_store_memory=STORE_BYTES)


def drain(cluster, node):
    """As one who takes machines back does."""
    command = [pathlib.Path(sys.executable).with_name("ray"), "drain-node"]
    command += ["--address", cluster.address, "--node-id", node.node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
    command += ["--deadline-remaining-seconds", "60"]
    subprocess.run(command, check=True, capture_output=True, env=own_environment())
