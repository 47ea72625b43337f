"""Jobs, devices and EasyScale's own enumeration, for the tests of schedulers."""

import itertools
import math
import random

from support.inside.scheduler import ActiveJob, Capability, ElasticJob, configuration

KINDS = ("V100", "P100", "T4")


def capabilities(speeds, interference=(1.0,)):
    return tuple(
        Capability(kind=kind, microbatches_per_second=speed, interference=interference)
        for kind, speed in zip(KINDS, speeds, strict=False)
    )


def job(name="a", *, arrival=0.0, steps=100, microbatches=8, speeds=(4.0, 2.0, 1.0), **more):
    more.setdefault("gang", (microbatches,) + (0,) * (len(speeds) - 1))
    return ElasticJob(
        name=name,
        arrival_seconds=arrival,
        num_steps=steps,
        num_microbatches=microbatches,
        capabilities=capabilities(speeds),
        **more,
    )


def active(one, nums=None, remaining=None, pause=0.0):
    return ActiveJob(
        job=one,
        remaining_steps=one.num_steps if remaining is None else remaining,
        nums=nums or (0,) * len(one.capabilities),
        pause_seconds=pause,
    )


def random_jobs(seed, num=8, num_kinds=3):
    rng = random.Random(seed)
    jobs = []
    for i in range(num):
        microbatches = rng.choice([1, 2, 4, 8, 16])
        speeds = sorted((rng.uniform(0.5, 5) for _ in range(num_kinds)), reverse=True)
        alone = rng.randrange(num_kinds)
        jobs.append(
            job(
                f"job {i}",
                arrival=rng.uniform(0, 300),
                steps=rng.randint(1, 200),
                microbatches=microbatches,
                speeds=speeds,
                min_devices=rng.randint(1, min(2, microbatches)),
                mixed=rng.random() < 0.5,
                alone=alone,
                gang=tuple(microbatches * (k == alone) for k in range(num_kinds)),
            )
        )
    return jobs


def enumerated(num_microbatches, known, nums):
    """The best perf that EasyScale's enumeration finds: its artifact's, written anew.

    The speeds are put in relation to the slowest. For each whole multiple of them up to maxP each
    kind's threads are that multiple rounded down or up, and any of the kinds may be left out; of a
    single kind all whole numbers are tried.
    """
    slowest = min(c.microbatches_per_second for c in known)
    relative = [c.microbatches_per_second / slowest for c in known]
    tried = set()
    for multiple in range(1, num_microbatches + 1):
        rounded = [{math.floor(multiple * c), math.ceil(multiple * c), 0} for c in relative]
        tried |= set(itertools.product(*rounded))
        tried |= {
            tuple(multiple * (k == kind) for k in range(len(known))) for kind in range(len(known))
        }
    executors = (1,) * len(known)
    fit = (t for t in tried if sum(n * a for n, a in zip(nums, t, strict=True)) >= num_microbatches)
    return max(
        (configuration(num_microbatches, known, nums, executors, t).perf for t in fit), default=0.0
    )
