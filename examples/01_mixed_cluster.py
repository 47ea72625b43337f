"""Train one model on two unequal devices, at the speed of both together and with the same bits.

    hxla run --mesh cpu-1.0-0.33 examples/01_mixed_cluster.py            (or: make demo)
    hxla run --mesh cpu-1.0-0.33 examples/01_mixed_cluster.py --long     (or: make demo ARGS=--long)

It takes two to four minutes on two quiet cores. With `--long` the model learns to spell.
Two processes share this machine, one with a whole core and one with a third of a core, and a small
GPT learns Python from the sources of the standard library. One job is opened four times:

- a few steps with all microbatches on the fast device, then on the slow one: their speeds alone
  add up to the attainable speed, that of 1.33 cores;
- the same steps with even counts: the fast device waits, and both do the work of 2 x 0.33 cores;
- the whole training with planned counts, which follow the measured speeds.

After those steps all four have the same parameters, to the last bit.

Its times mean something only where each process gets its share of a core. So it says that the
machine is busy in two cases: the fast process got less than 0.85 of its share while it worked, or
the ratio of the devices' speeds is not that of their shares (a factor below 0.75 or above 1.5).
The parameters are the same in any case.
"""

import argparse
import pathlib
import statistics
import sys
import time

import gpt
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from matplotlib.figure import Figure

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--long", action="store_true", help="train until it spells")
parser.add_argument("--steps", type=int, help="default: 24, with --long 140")
parser.add_argument("--compared-steps", type=int, default=3, help="of each of the four ways")
parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/demo"))
args = parser.parse_args()
num_steps = args.steps or (140 if args.long else 24)
args.folder.mkdir(parents=True, exist_ok=True)


class SmallGPT(gpt.GPT):
    """0.5 million parameters that spell after some minutes on one core.

    Each position also embeds the three bytes before it, which a first layer would have to learn to
    look up, and each block begins as the identity.
    """

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs, width=128, layers=2)
        self.before = nnx.List([nnx.Embed(gpt.BYTES, 128, rngs=rngs) for _ in range(3)])
        for block in self.blocks:
            for last in (block.attn["out"], block.down):
                last.kernel[...] = jnp.zeros_like(last.kernel)

    def __call__(self, text_BT: jax.Array) -> jax.Array:
        T = text_BT.shape[1]
        x_BTD = self.tok(text_BT) + self.pos(jnp.arange(T))
        for i, embed in enumerate(self.before, 1):
            x_BTD = x_BTD + embed(jnp.pad(text_BT, ((0, 0), (i, 0)))[:, :T])
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.tok.attend(self.norm(x_BTD))


text = gpt.library()["text"]
seen, held_out = {"text": text[:-512]}, {"text": text[-512:]}  # the last files of the alphabet
rate = optax.warmup_cosine_decay_schedule(0.0, 6e-3, -(-num_steps // 10), num_steps)
job = hxla.Job(
    SmallGPT(nnx.Rngs(0)),
    seen,
    gpt.loss,
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1)),
    batch_size=160,  # of 128 bytes: enough work to hide an update and an exchange of every step
)
plan = job.plan(microbatch_size=4)  # counts are even as long as nothing is measured
num = plan.num_microbatches
if len(plan.counts) != 2:
    sys.exit("it compares two devices: start it with hxla run --mesh cpu-1.0-0.33")


def sha256(session: hxla.Session) -> str:
    state = session.state
    return hxla.fingerprint((state.params, state.aux, state.opt_state), session.gather)


records, hashes, cpu_seconds = {}, {}, {}
for name, counts in {"fast": (num, 0), "slow": (0, num), "even": plan.counts}.items():
    with job.open(plan.with_counts(counts), steps=args.compared_steps) as session:
        began = time.process_time()
        records[name] = list(session)
        cpu_seconds[name] = time.process_time() - began
        hashes[name] = sha256(session)

with job.open(plan, steps=num_steps, balance=True, run_dir=args.folder) as session:
    records["planned"] = []
    for record in session:
        records["planned"].append(record)
        if session.step_number == args.compared_steps:
            hashes["planned"] = sha256(session)
    evaluation = session.evaluate(held_out)
    result = session.result()

if jax.process_index() != 0:
    sys.exit()


def median_seconds(name: str, device: int | None = None) -> float:
    """Of a step, or of what a device computes in it, once it runs smoothly."""
    later = records[name][len(records[name]) // 3 :]
    return statistics.median(r.seconds if device is None else r.busy_seconds[device] for r in later)


def least_seconds(name: str, device: int) -> float:
    """What a device computes in its fastest step after the first."""
    return min(r.busy_seconds[device] for r in records[name][1:])


tokens = records["even"][0].num_tokens
alone = [tokens / least_seconds("fast", 0), tokens / least_seconds("slow", 1)]
attainable = sum(alone)
shares = [device.core_share for device in hxla.load_cluster(plan.mesh_file or plan.cluster).devices]
apart, wanted = alone[0] / alone[1], shares[0] / shares[1]
got = cpu_seconds["fast"] / sum(record.seconds for record in records["fast"])
if got < 0.85 * shares[0] or not 0.75 < apart / wanted < 1.5:
    print(
        "\nthis machine is busy: the times below mean nothing\n"
        f"(while it worked, the fast process got {got:.2f} of a core; its share is {shares[0]:g}.\n"
        f"Alone, it is {apart:.1f} times as fast as the slow one; by their shares, {wanted:.1f})"
    )
print(f"\nattainable      {attainable:7,.0f} bytes/s, the sum of both devices' speeds alone")
for name in ("even", "planned"):
    speed = tokens / median_seconds(name)
    print(f"{name + ' counts':15} {speed:7,.0f} bytes/s, {speed / attainable:.2f} of attainable")
speed_up = median_seconds("even") / median_seconds("planned")
print(f"speed-up        {speed_up:7.2f}")
print(f"loss            {evaluation.loss:7.2f} nats per byte of files that it has not seen")
is_same = len(set(hashes.values())) == 1
verdict = "identical" if is_same else "DIFFERENT"
print(f"parameters      {verdict} after {args.compared_steps} steps")
for name, found in hashes.items():
    print(f"  {name:8} {found}")
print("\n" + gpt.write(result.model, "class ", 500, temperature=0.7))

figure = Figure(figsize=(9, 3.2), layout="constrained", dpi=150)
bars, losses = figure.subplots(1, 2)
for row, name in enumerate(("even", "planned")):
    for d, device in enumerate(plan.replica_names):
        count = records[name][-1].counts[d]
        label = f"{name}, {device}: {count} microbatches"
        busy, seconds = median_seconds(name, d), median_seconds(name)
        bars.barh(label, busy, color="#2f6f9f", label="busy" if row + d == 0 else None)
        idle = max(0.0, seconds - busy)
        bars.barh(label, idle, left=busy, color="#d9a441", label="idle" if row + d == 0 else None)
bars.invert_yaxis()
bars.set_xlabel("seconds per step")
bars.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
losses.plot([r.loss for r in records["even"]], label="even", color="#d9a441", lw=4)
losses.plot([r.loss for r in records["planned"]], label="planned: the same bits", color="#2f6f9f")
losses.plot(num_steps, evaluation.loss, "o", label="text it has not seen", color="#2f6f9f")
losses.set_xlabel("step")
losses.set_ylabel("loss (nats per byte)")
losses.legend(frameon=False)
picture = args.folder / "mixed_cluster.png"
figure.savefig(picture)
print(f"picture: {picture}\nreport: {args.folder / 'report.html'}")
sys.exit(not is_same)
