"""One of several processes that time sums over all of them, made of the simulation's messages."""

import argparse
import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import collective_messages as messages  # noqa: E402

AXIS = "workers"
#: A sender, its receiver, the chunks that it sends, and whether the receiver adds them to its own.
Message = tuple[int, int, Sequence[int], bool]


def table(name: str, n: int) -> tuple[int, list[list[Message]]]:
    """How many chunks an array has, and the messages of each round.

    Args:
        name: An algorithm of the simulation, or one of the two forms of a message between two.
        n: Workers.
    """
    there, back = (0, 1, (0,), False), (1, 0, (0,), False)
    if name == "ping-pong":
        return 1, [[there], [back]]
    if name == "exchange":
        return 1, [[there, back]]
    return getattr(messages, name.replace("-", "_"))(n)


def pairs_of(sent: Sequence[Message], n: int) -> list[tuple[int, int]]:
    """The pairs of a round in which all workers exchange in pairs, none of any other round."""
    ways = {(a, b) for a, b, *_ in sent}
    pairs = sorted((a, b) for a, b in ways if a < b and (b, a) in ways)
    return pairs if 2 * len(pairs) == n else []


def one_round(x_CM: jax.Array, sent: Sequence[Message], n: int, by_permutes: bool) -> jax.Array:
    """All messages of a round, by one collective.

    Args:
        x_CM: What a worker holds: C chunks of M numbers.
        sent: The messages.
        n: Workers.
        by_permutes: Whether pairs exchange by a permute, too.
    """
    [count] = {len(chunks) for _, _, chunks, _ in sent}
    [adds] = {adds for *_, adds in sent}
    away, back = np.zeros((n, count), int), np.zeros((n, count), int)
    receives, is_first = np.zeros(n, bool), np.zeros(n, bool)
    for a, b, chunks, _ in sent:
        away[a], back[b], receives[b], is_first[a] = chunks, chunks, True, a < b
    rank = jax.lax.axis_index(AXIS)
    out_KM, place_K = x_CM[jnp.asarray(away)[rank]], jnp.asarray(back)[rank]
    pairs = pairs_of(sent, n)
    if pairs and not by_permutes:
        # Of two parts each keeps its own and sends the other.
        own_KM = x_CM[place_K] if adds else jnp.zeros_like(out_KM)
        order = jnp.where(jnp.asarray(is_first)[rank], 0, 1)
        both_2KM = jnp.roll(jnp.stack([own_KM, out_KM]), order, axis=0)
        got_KM = jax.lax.psum_scatter(both_2KM, AXIS, axis_index_groups=pairs)
        return x_CM.at[place_K].set(got_KM)
    got_KM = jax.lax.ppermute(out_KM, AXIS, [(a, b) for a, b, *_ in sent])
    if not adds:
        got_KM -= x_CM[place_K]
    return x_CM.at[place_K].add(jnp.where(jnp.asarray(receives)[rank], got_KM, 0))


def program(case: Sequence, n: int) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """So many sums one after another, each divided by the workers, and what they start with."""
    form, num_bytes, repeats = case
    name, _, by_permutes = form.partition(", ")
    mesh = jax.make_mesh((n,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(AXIS)
    chunks, rounds = (1, []) if name == "psum" else table(name, n)
    adds = name == "psum" or rounds[0][0][-1]

    def once(x_CM: jax.Array) -> jax.Array:
        if name == "psum":
            x_CM = jax.lax.psum(x_CM, AXIS)
        for sent in rounds:
            x_CM = one_round(x_CM, sent, n, bool(by_permutes))
        return x_CM / (n if adds else 1)

    def run(x_1CM: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, repeats, lambda _, x: once(x), x_1CM[0])[None]

    shape = (n, chunks, num_bytes // 4 // chunks)
    start = jax.make_array_from_callback(
        shape,
        jax.sharding.NamedSharding(mesh, spec),
        lambda index: np.full((1, *shape[1:]), 1.0 + (index[0].start or 0), np.float32),
    )
    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return run, start


def is_right(name: str, n: int, found: jax.Array) -> bool:
    """Whether this worker holds the mean of all; of messages between two, what they brought."""
    [shard] = found.addressable_shards
    own, rank = np.asarray(shard.data), jax.process_index()
    between = {"ping-pong": 1.0 if rank < 2 else rank + 1.0, "exchange": own.flat[0]}
    return bool(np.allclose(own, between.get(name, (n + 1) / 2), rtol=1e-6))


def hurry() -> None:
    """Go before the other work of the machine, which the links leave nearly all of its time."""
    with contextlib.suppress(PermissionError):
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), -15)


def main() -> None:
    """Every case in turns; each process says when it began each and when it had ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("coordinator")
    parser.add_argument("workers", type=int)
    parser.add_argument("rounds", type=int)
    parser.add_argument("cases", help="JSON: lists of a form, bytes and repeats")
    parser.add_argument("rank", type=int)
    args = parser.parse_args()
    n, cases = args.workers, json.loads(args.cases)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(args.coordinator, n, args.rank)
    programs = [program(case, n) for case in cases]
    barrier, nothing = program(("psum", 4, 1), n)
    times: list[list[tuple[float, float]]] = [[] for _ in cases]
    wrong = [0] * len(cases)
    for turn in range(args.rounds + 1):  # the first compiles and connects
        for k in range(len(cases))[:: -1 if turn % 2 else 1]:
            run, start = programs[k]
            jax.block_until_ready(barrier(nothing))
            began = time.monotonic()
            found = jax.block_until_ready(run(start))
            if turn:
                times[k].append((began, time.monotonic()))
            wrong[k] += not is_right(cases[k][0], n, found)
        if turn == 0:
            hurry()
    print("RESULT " + json.dumps([times, wrong]), flush=True)


if __name__ == "__main__":
    main()
