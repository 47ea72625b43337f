"""A compiled step in this process."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from .._jax import _hlo_proto as _proto
from .._jax._buffer_assignment import BufferAssignment
from ._analyze import Compilation, Hints, analyze
from ._arguments import ArrayLayout, Spec
from ._hlo_text import read_module
from ._peak_memory import Figures
from ._program import Program
from ._replica_groups import Mesh


def read_compiled(compiled: Any, hints: Hints) -> Program:
    """Inspect a `jax.stages.Compiled`."""
    module = read_module(compiled.as_text() or "")
    entry = module.computations.get(module.entry)
    num_parameters = len(entry.parameters) if entry else 0
    mesh, known, donated, problems = _arguments(compiled, num_parameters)
    figures, assignment, missing = _memory(compiled)
    compilation = Compilation(
        source="live",
        mesh=mesh,
        known=known,
        donated=donated,
        assignment=assignment,
        figures=figures,
        memory_missing=missing,
        memory_source="the compiler's buffer assignment" if assignment else "memory_analysis()",
        problems=problems,
    )
    return analyze(module, compilation, hints)


def _arguments(
    compiled: Any, num_parameters: int
) -> tuple[Mesh, dict[int, ArrayLayout], frozenset[int], tuple[str, ...]]:
    """Mesh, whole shapes and specs, donated arguments, and what could not be told."""
    infos = jax.tree.leaves(compiled.args_info)
    is_leaf = lambda x: x is None or isinstance(x, jax.sharding.Sharding)  # noqa: E731
    shardings = jax.tree.leaves(compiled.input_shardings, is_leaf=is_leaf)
    kept = [
        (info, sharding)
        for info, sharding in zip(infos, shardings, strict=False)
        if sharding is not None
    ]
    if len(infos) != len(shardings) or len(kept) != num_parameters:
        problem = (
            f"the program has {num_parameters} arguments of the {len(infos)} it is called with: "
            "which ones, and so how they lie on the mesh, is not known"
        )
        return (), {}, frozenset(), (problem,)
    mesh: Mesh = ()
    known: dict[int, ArrayLayout] = {}
    for i, (info, sharding) in enumerate(kept):
        spec: Spec | None = None
        if isinstance(sharding, NamedSharding):
            mesh = mesh or tuple(dict(sharding.mesh.shape).items())
            spec = _spec(sharding, len(info.shape))
        elif sharding.is_fully_replicated:
            spec = ((),) * len(info.shape)
        known[i] = tuple(info.shape), spec
    return mesh, known, frozenset(i for i, (info, _) in enumerate(kept) if info.donated), ()


def _spec(sharding: NamedSharding, rank: int) -> Spec:
    dims: list[tuple[str, ...]] = []
    for entry in (*sharding.spec, *[None] * rank)[:rank]:
        dims.append(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry))
    return tuple(dims)


def _memory(compiled: Any) -> tuple[Figures | None, BufferAssignment | None, str]:
    stats = compiled.memory_analysis()
    if stats is None:
        return None, None, "the compiler gives no memory_analysis()"
    figures = Figures(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )
    data = getattr(stats, "serialized_buffer_assignment_proto", b"")
    try:
        if not data:
            return figures, None, ""
        # The figures' values have numbers; their names are in the module itself.
        (module,) = compiled.runtime_executable().hlo_modules()
        return figures, _proto.buffer_assignment(data, module.as_serialized_hlo_module_proto()), ""
    except (ValueError, AttributeError):
        return figures, None, ""
