"""A module with what all that is said of it rests on."""

import dataclasses
from collections.abc import Mapping

from ._call_graph import CallContext, contexts
from ._dataflow import Flow
from ._hlo_text import Computation, Module
from ._origin import Origins
from ._program import ProgramArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnnotatedModule:
    """A module, where its values come from and how often its computations run.

    Attributes:
        module: Optimized.
        arguments: Its arguments in order, by the names of their instructions.
        origins: Of its instructions.
        flow: Of its values.
        contexts: Every way to reach every computation.
    """

    module: Module
    arguments: Mapping[str, ProgramArray]
    origins: Origins
    flow: Flow
    contexts: Mapping[str, list[CallContext]]

    @property
    def arrays(self) -> tuple[ProgramArray, ...]:
        """The arguments in order."""
        return tuple(self.arguments.values())

    def argument(
        self, computation: Computation, name: str, picked: int | None = None
    ) -> ProgramArray | None:
        """The argument that a value is a view, a cast or a slice of; None if none."""
        found = self.flow.argument(computation, name, picked)
        return None if found is None else self.arguments.get(found.name)

    def runs(self, computation: Computation) -> int | None:
        """Of a computation in one call of the program; None if some loop's trips are not known."""
        each = [context.runs for context in self.contexts.get(computation.name, [])]
        return None if None in each else sum(r for r in each if r is not None)


def annotate(module: Module, arguments: Mapping[str, ProgramArray]) -> AnnotatedModule:
    """Follow a module's values and calls."""
    flow = Flow(module)
    return AnnotatedModule(
        module=module,
        arguments=arguments,
        origins=Origins(module),
        flow=flow,
        contexts=contexts(module, flow),
    )
