"""Programs of small losses, lowered without a model or a session."""

import dataclasses

import jax
import optax

from hxla import Cluster, Device, SumsForm
from support.inside.choose import PipelineRequest, complete, pipelined, replicated
from support.inside.graph import trace_sums
from support.inside.lower import Training, lower
from support.inside.model import Functional, Optimizer


def cpus(num):
    return Cluster(name="", devices=(Device(kind="cpu"),) * num)


def functional(params, aux):
    return Functional(params=params, aux=aux, logical=(), train=None, evaluate=None, finish=None)


def with_arrays(model):
    """A functional model with the arrays that it would begin with."""
    make = model.initialise
    params, aux = model.arrays if make is None else make(*model.init_arguments)
    return dataclasses.replace(model, params=params, aux=aux, given=None, initialise=None)


def programs(
    run,
    params,
    batch,
    *,
    aux=(),
    num_microbatches=2,
    num_devices=1,
    stages=None,
    reduction="exact",
    optimizer=None,
    **training,
):
    """What `lower` makes of `run(params, aux, key, batch) -> (loss, sums, aux)`.

    `stages` are the fields of a `PipelineRequest`, for one pipeline over all devices.
    """
    graph = trace_sums(run, params, aux, batch)
    structure = replicated(range(num_devices))
    if stages is not None:
        structure = pipelined(range(stages["num"]), PipelineRequest(**stages))
    size = jax.tree.leaves(batch)[0].shape[0]
    cluster = cpus(sum(map(len, structure.replicas)))
    plan = complete(
        graph,
        structure,
        cluster=cluster,
        batch_size=num_microbatches * size,
        microbatch_size=size,
        sums=SumsForm(kind=reduction),
    )
    asked = Training(
        model=functional(params, aux),
        optimizer=Optimizer(optimizer or optax.sgd(1.0)),
        seed=0,
        **training,
    )
    return lower(asked, graph, plan, tuple(jax.devices()[: len(cluster.devices)]))
