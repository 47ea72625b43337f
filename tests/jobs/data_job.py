"""A job that `hxla run` runs in tests: every example that its data makes is written to a file."""

import argparse
import pathlib
import time

import jax
import optax
from flax import nnx

import hxla
from support.streams import BATCH_SIZE, Make, Stream, dataset, generated, loss


def main():
    """Train, and print the SHA-256."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=("stream", "generator", "grain", "function"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loaders", type=int, default=0, help="processes of Grain's")
    parser.add_argument("--workers", type=int, default=0, help="of hxla's")
    parser.add_argument("--told", help="file for the examples that are made")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each step waits")
    parser.add_argument("--slow-until", help="file from whose appearance on it does not wait")
    parser.add_argument("--example-seconds", type=float, default=0.0)
    parser.add_argument("--checkpoints")
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--alone", action="store_true", help="each process reads for itself")
    args = parser.parse_args()
    make = Make(args.told, args.example_seconds)
    data = {
        "stream": lambda: Stream(make),
        "generator": lambda: generated(make),
        "grain": lambda: dataset(make, args.loaders),
        "function": lambda: make,  # sent to hxla's workers
    }[args.data]()
    seconds = []

    def pace(record, session):
        seconds.append(record.seconds)
        if not (args.slow_until and pathlib.Path(args.slow_until).exists()):
            time.sleep(args.slow)

    result = hxla.train(
        hxla.Job(
            nnx.Linear(16, 4, rngs=nnx.Rngs(0)),
            data,
            loss,
            optax.sgd(1e-2),
            batch_size=BATCH_SIZE,
            config={"data": {"share": not args.alone, "workers": args.workers}},
        ),
        microbatch_size=2,
        counts="even",
        steps=args.steps,
        callbacks=[pace],
        checkpoint_dir=args.checkpoints,
        checkpoint_every=args.checkpoint_every,
    )
    if jax.process_index() == 0:
        late = seconds[len(seconds) // 2 :]
        print(f"seconds of a step {sum(late) / len(late):.4f}", flush=True)
        print(f"sha256 {result.sha256} after {result.step} steps", flush=True)


if __name__ == "__main__":
    main()
