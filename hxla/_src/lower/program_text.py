"""The text of a compiled program, and what the names of its arguments stand for."""

import dataclasses
from collections.abc import Mapping, Set


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramText:
    """One optimized program of a microbatch.

    Attributes:
        text: Empty where a backend gives none.
        params: For each argument that is a parameter its place. The slot of a pipeline has one of
            each stage.
        saved: For each argument that is a result of the program before, that result's place.
        scopes: In a pipeline, for each scope of its operations the parameters that these read.
    """

    text: str
    params: Mapping[str, tuple[int, ...]]
    saved: Mapping[str, int] = dataclasses.field(default_factory=dict)
    scopes: Mapping[str, Set[int]] = dataclasses.field(default_factory=dict)
