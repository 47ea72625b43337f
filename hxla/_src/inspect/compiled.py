"""A compiled step in this process."""

import contextlib
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..jax import xla_protos as _proto
from ..jax.xla_protos import BufferAssignment, Piece
from .analyze import Hints, analyze
from .arguments import ArrayLayout, Signature, Spec
from .hlo_text import read_module
from .program import Program
from .replica_groups import Mesh


def read_compiled(compiled: Any, hints: Hints) -> Program:
    """Inspect a `jax.stages.Compiled`."""
    module = read_module(compiled.as_text() or "")
    entry = module.computations.get(module.entry)
    num_parameters = len(entry.parameters) if entry else 0
    arguments = _kept(compiled)
    problems = []
    if len(arguments) != num_parameters:
        arguments = []
        problems.append(
            f"the program has {num_parameters} arguments of those it is called with: which ones, "
            "and so how they are sharded, is not known"
        )
    return analyze(
        module,
        hints,
        source="live",
        signature=_signature(arguments),
        assignment=_memory(compiled),
        memory_missing="the compiler gives no memory_analysis()",
        problems=problems,
    )


def _kept(compiled: Any) -> list[tuple[Any, Any]]:
    """Arguments that the program reads, and their shardings."""
    infos = jax.tree.leaves(compiled.args_info)
    structure: Any = jax.tree.structure(compiled.args_info)
    # An unread argument has the sharding None; but the arguments may contain None, too.
    shardings = structure.flatten_up_to(compiled.input_shardings)
    both = zip(infos, shardings, strict=True)
    return [(info, sharding) for info, sharding in both if sharding is not None]


def _signature(arguments: list[tuple[Any, Any]]) -> Signature:
    mesh: Mesh = ()
    layouts: dict[int, ArrayLayout] = {}
    for number, (info, sharding) in enumerate(arguments):
        spec: Spec | None = None
        if isinstance(sharding, NamedSharding):
            mesh = mesh or tuple(dict(sharding.mesh.shape).items())
            spec = _spec(sharding, len(info.shape))
        elif sharding.is_fully_replicated:
            spec = ((),) * len(info.shape)
        layouts[number] = tuple(info.shape), spec
    donated = frozenset(n for n, (info, _) in enumerate(arguments) if info.donated)
    return Signature(mesh=mesh, layouts=layouts, donated=donated)


def _spec(sharding: NamedSharding, rank: int) -> Spec:
    dims: list[tuple[str, ...]] = []
    for entry in (*sharding.spec, *[None] * rank)[:rank]:
        dims.append(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry))
    return tuple(dims)


def _memory(compiled: Any) -> BufferAssignment | None:
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    source = "memory_analysis()"
    temporaries: tuple[Piece, ...] = ()
    if data := getattr(stats, "serialized_buffer_assignment_proto", b""):
        with contextlib.suppress(ValueError, AttributeError):
            # The protocol buffer numbers its values; their names are in the module.
            (module,) = compiled.runtime_executable().hlo_modules()
            names = module.as_serialized_hlo_module_proto()
            temporaries = _proto.buffer_assignment(data, names).temporaries
            source = "the compiler's buffer assignment"
    return BufferAssignment(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        source=source,
        temporaries=temporaries,
    )
