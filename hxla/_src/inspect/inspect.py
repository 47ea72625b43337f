"""`hxla.inspect`: what XLA really did."""

import gc
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from ..cluster.cluster import Cluster
from ..cluster.mesh_file import load_cluster
from ..core.errors import InspectError
from ..plan.rules import RuleSet, as_rules
from .analyze import Hints, analyze
from .compiled import read_compiled
from .hlo_text import read_module
from .inspection import Inspection
from .xla_dump import read_dump


def inspect(
    step: Any,
    *args: Any,
    mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
    cluster: Cluster | str | None = None,
    rules: RuleSet | str | None = None,
    owners: Mapping[str, str] | None = None,
) -> Inspection:
    """Describe what a compiled program does: its collectives, memory, work and warnings.

    Args:
        step: A compiled step (`jax.stages.Compiled`), a lowered one, a jitted function with the
            arguments it is called with, the text of an optimized HLO module, or the path of a dump:
            a folder that XLA or `hxla run --dump` wrote, or one file of it.
        args: The arguments of a jitted function: arrays or `jax.ShapeDtypeStruct`s.
        mesh: The axis names and sizes in order, where the program does not name them.
        cluster: The described devices in the order of the mesh, or a mesh file's name: collectives
            then have predicted times.
        rules: A rule set or its name: there is a warning for each parameter that breaks it.
        owners: The owner of an argument's memory, by prefix of its path, where its name does not
            show it: `{"w": "parameter", "state.slow": "optimizer state"}`.

    Returns:
        The inspection; `print(hxla.inspect(step).text())` shows it.

    Raises:
        InspectError: If `step` is none of these, or a path leads to no HLO.
        MeshError: If a mesh file cannot be read.
        AnnotationError: If rules do not fit the parameters.

    Example:
        >>> import hxla, jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        >>> w = jax.ShapeDtypeStruct((128, 64), jnp.float32)
        >>> inspection = hxla.inspect(jax.jit(jnp.matmul), x, w)
        >>> inspection.main.total.flops == 2 * 8 * 128 * 64
        True
        >>> inspection.main.select("all-gather")
        ()
    """
    hints = Hints(
        mesh=_axes(mesh),
        cluster=load_cluster(cluster) if isinstance(cluster, str) else cluster,
        rules=as_rules(rules),
        owners=owners or {},
    )
    # The collector would walk millions of live small objects again and again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _inspect(step, args, hints)
    finally:
        if collecting:
            gc.enable()


def _inspect(step: Any, args: tuple[Any, ...], hints: Hints) -> Inspection:
    if isinstance(step, Inspection):
        return step
    if isinstance(step, str) and step.lstrip().startswith("HloModule"):
        missing = "HLO text alone does not tell"
        program = analyze(read_module(step), hints, source="text", memory_missing=missing)
        return Inspection(programs=(program,))
    if isinstance(step, str | os.PathLike):
        return read_dump(pathlib.Path(step), hints)
    if callable(step) and hasattr(step, "lower"):
        step = step.lower(*args)
    if isinstance(step, jax.stages.Lowered):
        step = step.compile()
    if isinstance(step, jax.stages.Compiled):
        return Inspection(programs=(read_compiled(step, hints),))
    raise InspectError(
        f"{step!r} is nothing to inspect: give a compiled, lowered or jitted step, HLO text, or "
        "the path of a dump; jax.jit a plain function first"
    )


def _axes(mesh: jax.sharding.Mesh | Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    if mesh is None:
        return ()
    shape = mesh.shape if isinstance(mesh, jax.sharding.Mesh) else mesh
    return tuple((str(name), int(size)) for name, size in shape.items())
