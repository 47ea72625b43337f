"""Train on a Ray cluster that grows and shrinks, and get the same bits.

    pip install 'hxla[ray]'
    python examples/13_ray.py

It starts a cluster on this machine, with a share of a core for each node. On a cluster of yours,
`hxla run --elastic --ray auto train.py` is enough. The job trains the GPT of 12_elastic.py on two
nodes, a third joins, and the first is drained as before a preemption. It ends with the SHA-256 of
an undisturbed run on one process.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

from ray.cluster_utils import Cluster

SCRIPT = pathlib.Path(__file__).with_name("12_elastic.py")
STORE_BYTES = 80_000_000  # of a node's objects

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()
train = [str(SCRIPT), "--steps", str(args.steps)]


def digest(text):
    """What the job prints in the end."""
    [found] = [line.split()[-1] for line in text.splitlines() if "sha256" in line]
    return found


def add_node(share):
    labels = {"core-share": str(share)}
    return cluster.add_node(num_cpus=1, labels=labels, object_store_memory=STORE_BYTES)


def wait_for(members):
    """Until a generation of so many nodes has trained for ten steps."""
    while job.poll() is None:
        events = [json.loads(x) for x in log.read_text().splitlines()] if log.exists() else []
        formed = [e["generation"] for e in events if e["what"] == "Form"]
        done = [e["step"] for e in events if e["what"] == "Completed"]
        trained = done[-1] - formed[-1]["first_step"] if done and formed else 0
        if trained >= 10 and len(formed[-1]["members"]) == members:
            return
        time.sleep(0.1)


undisturbed = subprocess.run(
    [sys.executable, "-m", "hxla", "run", "-n", "1", *train],
    capture_output=True,
    text=True,
    check=True,
)
head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
with tempfile.TemporaryDirectory() as folder:
    log = pathlib.Path(folder, "events.jsonl")
    first, _ = add_node(0.5), add_node(0.5)
    command = [sys.executable, "-m", "hxla", "run", "--elastic", "--ray", cluster.address]
    command += ["--events", str(log), *train]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    wait_for(2)
    add_node(0.5)
    print("a third node joins")
    wait_for(3)
    print("the first node is drained")
    drain = [str(pathlib.Path(sys.executable).with_name("ray")), "drain-node"]
    drain += ["--address", cluster.address, "--node-id", first.node_id]
    drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "an example"]
    subprocess.run([*drain, "--deadline-remaining-seconds", "120"], check=True, capture_output=True)
    printed, _ = job.communicate()
    for event in map(json.loads, log.read_text().splitlines()):
        if event["what"] == "Form":
            generation = event["generation"]
            names = ", ".join(generation["members"])
            print(f"from step {generation['first_step']:3}: {names}")
cluster.shutdown()
print("sha256", digest(printed), "undisturbed:", digest(undisturbed.stdout))
sys.exit(digest(printed) != digest(undisturbed.stdout))
