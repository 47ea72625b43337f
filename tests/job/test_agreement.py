"""Processes that would train apart are told so, all of them and at once."""

import functools
import json

import pytest

import hxla
from support.inside.job import agree
from support.launched import end_of, slurm_tasks
from support.tiers import rows

SCRIPT = """
import json, os, signal, time
import jax, numpy as np, optax
from flax import nnx
import hxla
from support.inside.launch import ServiceStatuses
from support.training import train_with

hxla.join()
print(json.dumps(["joined", jax.process_count(), jax.process_index()]), flush=True)
odd = jax.process_index() == 1
rng = np.random.default_rng(0)
data = {"x": rng.normal(size=(64, 4)).astype(np.float32), "y": np.zeros(64, np.float32)}


def loss(model, batch):
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


def steep(model, batch):
    return 3 * loss(model, batch)


def part(size):
    return {name: x[:size] for name, x in data.items()}


def last(size):
    return {name: x[-size:] for name, x in data.items()}


def args(data=data, loss=loss, rate=0.1, **options):
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    usual = {"batch_size": 16, "microbatch_size": 8, "steps": 4, "counts": "even"}
    return (model, data, loss, optax.sgd(rate)), usual | options


def train(**options):
    given, named = args(**options)
    return train_with(*given, **named)


def flips(record, session):
    if odd and record.step == 2:
        held = session._store.held[0]
        held.params = [held.params[0], held.params[1] + 1]


def own_loop(batches):
    given, named = args()
    job = hxla.Job(*given, batch_size=16, config={"watchdog": {"compare_steps": 2}})
    with job.open(job.plan(microbatch_size=8, counts="even"), steps=4) as session:
        for batch in batches:
            session.step(batch)


def own_plan(counts):
    given, named = args()
    job = hxla.Job(*given, batch_size=16)
    plan = job.plan(microbatch_size=8, counts="even").with_counts(counts)
    with job.open(plan, steps=4) as session:
        return session.result()


def posts():
    return ServiceStatuses().statuses()


def freezes(record, session):
    if record.step == 2:
        sha256 = hxla.fingerprint(session.state.params)
        print(json.dumps(["nothing", sha256, record.loss]), flush=True)
    if odd and record.step == 2:
        while (posts()[1].step, posts()[1].phase) != (1, "callback"):
            time.sleep(0.05)
        count = posts()[0].count
        while posts()[0].count < count + 2:  # between the two it has read all posts
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGSTOP)


def some(like, other):
    return other if odd else like


CASES = {
    "rate": lambda: train(rate=some(0.1, 0.2)),
    "loss": lambda: train(loss=some(loss, steep)),
    "seed": lambda: train(seed=some(0, 1)),
    "data": lambda: train(data=some(data, {"x": data["x"] + 1, "y": data["y"]})),
    "dtype": lambda: train(data=some(data, data | {"x": data["x"].astype(np.float16)})),
    "length": lambda: train(data=part(some(64, 48))),
    "steps": lambda: train(steps=some(4, 5)),
    "setting": lambda: train(config=some(None, {"communication": {"clip_norm": 0.5}})),
    "several": lambda: train(seed=some(0, 1), rate=some(0.1, 0.2), nonfinite=some("stop", "skip")),
    "counts": lambda: train(counts=some([1, 1], [2, 0])),
    "plan": lambda: own_plan(some((1, 1), (2, 0))),
    "batch size": lambda: train(batch_size=some(16, 32)),
    "folder": lambda: train(checkpoint_dir=some(None, "checkpoints")),
    "evaluation": lambda: train(eval_data=part(some(16, 24))),
    "every": lambda: train(eval_data=part(16), eval_every=some(2, 3)),
    "own batch": lambda: own_loop([part(16), part(16), some(part(16), last(16))]),
    "frozen": lambda: train(
        callbacks=[freezes], config={"watchdog": {"heartbeat_timeout_seconds": 4}}
    ),
    "state": lambda: train(callbacks=[flips], config={"watchdog": {"compare_steps": 3}}),
}
for name in os.environ["CASES"].split(","):
    try:
        found = CASES[name]()
        print(json.dumps([name, "trained", found and found.sha256]), flush=True)
    except hxla.HxlaError as error:
        print(json.dumps([name, type(error).__name__, str(error)]), flush=True)
"""

DIFFERENT = {
    "rate": ["update program", "dense<-1.000000e-01>", "dense<-2.000000e-01>"],
    "loss": ["microbatch program", "dense<3.000000e+00> : tensor<f32> on rank 1"],
    "seed": ["seed: 0 on rank 0; 1 on rank 1"],
    "data": ["data of step 1: ['x']: float32[8, 4] with CRC-32 "],
    "dtype": ["float32[8, 4] with CRC-32 ", "float16[8, 4] with CRC-32 "],
    "length": ["number of examples: 64 on rank 0; 48 on rank 1"],
    "steps": ["steps: 4 on rank 0; 5 on rank 1"],
    "setting": ["config.communication.clip_norm: None on rank 0; 0.5 on rank 1"],
    "several": ["seed: 0 on rank 0; 1 on rank 1", "nonfinite: stop on rank 0; skip on rank 1"],
    "plan": ["plan.replicas.0.num_microbatches: 1 on rank 0; 2 on rank 1"],
    "counts": ["counts: [1, 1] on rank 0; [2, 0] on rank 1"],
    "batch size": ["batch_size: 16 on rank 0; 32 on rank 1"],
    "folder": ["checkpoint_dir: None on rank 0; checkpoints on rank 1"],
    "evaluation": ["examples of the evaluation: 16 on rank 0; 24 on rank 1"],
    "every": ["eval_every: 2 on rank 0; 3 on rank 1"],
    "own batch": ["batch of step 3: ['x']"],
    "state": ["after 3 steps the replicas of the state", "rank 1 has another kernel than rank 0"],
}


#: One of each kind: a program, data, a plan, several settings, a batch, a folder, and the state.
QUICK = ("rate", "data", "plan", "several", "own batch", "folder", "state")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What two tasks of Slurm say of a case: one step tries the quick ones, another the rest."""

    @functools.cache
    def said(names):
        folder = tmp_path_factory.mktemp("agreement")
        # Most cases compile the same programs.
        env = {"CASES": ",".join(names), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        tasks = slurm_tasks(folder, SCRIPT, 2, env)
        ends = [end_of(tasks[0])]
        if "frozen" in names:
            tasks[1].kill()
        ends.append(end_of(tasks[1]))
        found = {"end": (tasks[0].returncode, ends[0][1])}
        for rank, (out, err) in enumerate(ends):
            assert tasks[rank].returncode == 0 or "frozen" in names, err[-3000:]
            for line in out.splitlines():
                if line.startswith('["'):
                    name, *row = json.loads(line)
                    found.setdefault(name, {})[rank] = row
        return found

    rest = tuple(name for name in DIFFERENT if name not in QUICK)
    return lambda name: said(rest if name in rest else (*QUICK, "frozen"))[name]


@pytest.mark.parametrize("name", rows(DIFFERENT, *QUICK))
def test_what_differs_is_one_error_on_every_rank_with_both_values(name, told):
    assert told(name)[0] == told(name)[1]
    error, message = told(name)[0]
    assert error == "LaunchError"
    for words in DIFFERENT[name]:
        assert words in message


def test_tasks_of_a_batch_system_join_in_place(told):
    assert told("joined") == {0: [2, 0], 1: [2, 1]}


def test_tasks_of_a_batch_system_see_that_one_of_them_is_frozen(told):
    """Without a launcher they tell each other where they are through the coordination service."""
    code, err = told("end")
    assert code == 76, err
    assert "hxla watchdog: rank 1 has not answered for " in err
    assert "; it was at step 2 in phase 'callback'; ending the job" in err


def test_processes_that_agree_train_to_the_same_bits(told):
    [(sha256, loss), other] = told("nothing").values()
    assert sha256
    assert [sha256, loss] == other


def test_of_programs_that_differ_the_unlike_lines_are_told_side_by_side():
    """A line more renumbers all that follow, and they still count as alike."""
    one = "%0 = sine %x\n%1 = multiply %0, 2.0\n%2 = add %1, %x"
    two = "%0 = cosine %y\n%1 = sine %x\n%2 = multiply %1, 3.0\n%3 = add %2, %x"
    texts = [json.dumps({"update program": text}) for text in (one, two, one)]
    with pytest.raises(hxla.LaunchError) as error:
        agree("programs", {"update program": one}, lambda what, text: tuple(texts))
    said = str(error.value).splitlines()[1:-1]
    assert said == [
        "  update program: ranks 0, 2 and rank 1 have different ones",
        "    nothing on ranks 0, 2; cosine on rank 1",
        "    multiply , 2.0 on ranks 0, 2; multiply , 3.0 on rank 1",
    ]
