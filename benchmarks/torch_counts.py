"""How many examples each process of PyTorch takes, and a step of them: what its workers share."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch_gpt import RANK, SIZE, cross_entropy


def everyones(number):
    """A number of every process."""
    found = [None] * SIZE
    dist.all_gather_object(found, number)
    return found


def suited(seconds, batch_size):
    """Examples of each process with which all end together, by the seconds of an example."""
    counts = [1] * SIZE
    for _ in range(batch_size - SIZE):
        counts[min(range(SIZE), key=lambda r: (counts[r] + 1) * seconds[r])] += 1
    return tuple(counts)


def backward(model, text, weight):
    """Adds gradients of a microbatch; returns its loss."""
    loss = cross_entropy(model(text[:, :-1]), text[:, 1:]) * weight
    loss.backward()
    return loss.item()


def measured(model, text):
    """Seconds of an example on each process, while all of them work and nothing is exchanged."""
    times = []
    dist.barrier()
    for _ in range(6):
        began = time.perf_counter()
        backward(model, text, 1.0)
        times.append((time.perf_counter() - began) / len(text))
    model.zero_grad()
    return everyones(statistics.mean(times[1:]))


def own_examples(counts, num_steps):
    """Numbers of the examples that this process takes after so many steps."""
    start = num_steps * sum(counts) + sum(counts[:RANK])
    return torch.arange(start, start + counts[RANK])


def step(model, optimizer, texts, batch_size, microbatch):
    """One step; returns this process's share of the loss of the global batch.

    Args:
        model: Its gradients end as the mean of all processes.
        optimizer: Of its parameters.
        texts: Of this process's microbatches.
        batch_size: Of all processes.
        microbatch: A context for one, from whether it is the last.
    """
    loss = 0.0
    for n, text in enumerate(texts):
        # The mean over processes divides by their number.
        weight = len(text) / batch_size * SIZE
        with microbatch(n == len(texts) - 1):
            loss += backward(model, text, weight) / SIZE
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def tried(step):
    """Seconds of a step, the slowest process's, by two after a first one."""
    times = []
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return max(everyones(statistics.mean(times[1:])))
