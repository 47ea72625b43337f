"""What one side computed, bit by bit: a digest of every result of every equation."""

import os
from typing import Any, NamedTuple

import pydantic

from .._core._errors import InspectError
from .._core._faults import listed
from .._core._files import local_path, named, parse_json, read_bytes
from .._plan._layout import PlanValue
from .._plan._plan_file import faults_of
from .._plan._plan_parts import Versions

_MOST_BYTES, _MOST_VALUES = 1 << 27, 8_000_000


class RecordedEquation(PlanValue):
    """An equation of a traced microbatch, forward or backward.

    Attributes:
        primitive: The name of jax's primitive.
        scope: The name scopes and Linen modules around it; empty where there are none.
        after: The parameter that the forward pass read last before it, or before the equation of
            which it is the gradient.
        source: The file and line of the user's code, or an empty string.
        results: The dtypes and shapes of its results, `float32[8,64]`.
        is_backward: Whether it is of the backward pass.
    """

    primitive: str
    scope: str = ""
    after: str = ""
    source: str = ""
    results: tuple[str, ...] = ()
    is_backward: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What equations of two programs have in common if they are the same one."""
        return self.primitive, self.scope, self.results, self.is_backward

    def __str__(self) -> str:
        way = "backward" if self.is_backward else "forward"
        scope = f" in {self.scope}" if self.scope else ""
        after = f" after {self.after}" if self.after else ""
        line = f", {self.source}" if self.source else ""
        return f"{way}: {self.primitive} -> {', '.join(self.results)}{scope}{after}{line}"


class RecordedRead(NamedTuple):
    """An operand.

    Attributes:
        producer: The number of the run that made it; below 0 an input, -1 the first; None: it is a
            constant of the program.
        digest: SHA-256 of its bits.
    """

    producer: int | None
    digest: str


class RecordedRun(NamedTuple):
    """One run of an equation; inside a scan it has one in each iteration.

    Attributes:
        equation: The place of the equation.
        reads: The operands.
        results: SHA-256 of the bits of each result.
    """

    equation: int
    reads: tuple[RecordedRead, ...]
    results: tuple[str, ...]


class BitsRecord(PlanValue):
    """What one side computed in a microbatch, as `hxla.record_bits` returns it.

    Attributes:
        format: The version of the file's format.
        device: The kind of the device, as jax names it, after its platform.
        made_with: The versions, and the instructions of a CPU that computed.
        microbatch_size: The examples of the microbatch.
        inputs: The name and SHA-256 of each parameter, other variable, key and batch array.
        equations: The equations in order.
        runs: What ran, in order.
        compiled: The loss, the new variables and the gradients of the microbatch compiled as one
            program: name and SHA-256.
    """

    format: int = 1
    device: str
    made_with: Versions
    microbatch_size: pydantic.PositiveInt
    inputs: tuple[tuple[str, str], ...]
    equations: tuple[RecordedEquation, ...]
    runs: tuple[RecordedRun, ...]
    compiled: tuple[tuple[str, str], ...] = ()

    @pydantic.model_validator(mode="after")
    def _is_consistent(self) -> "BitsRecord":
        if self.format != 1:
            raise ValueError(f"format {self.format} is of another version of hxla: record it anew")
        for i, run in enumerate(self.runs):
            if not 0 <= run.equation < len(self.equations):
                raise ValueError(f"runs.{i}: there is no equation {run.equation}")
            for producer, _ in run.reads:
                if producer is not None and not -len(self.inputs) <= producer < i:
                    raise ValueError(f"runs.{i}: nothing before it is number {producer}")
        return self

    def __str__(self) -> str:
        own = self.made_with
        processor = f" ({own.processor})" if own.processor else ""
        versions = f"jax {own.jax}, jaxlib {own.jaxlib}, hxla {own.hxla}"
        return ", ".join((f"{self.device}{processor}", versions, *own.settings))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the record, for a comparison with one of another machine or version.

        Args:
            path: A JSON file; its folder is made.

        Raises:
            InspectError: If it is larger than what is read.
        """
        text = self.model_dump_json(exclude_defaults=True)
        if len(text) > _MOST_BYTES:
            raise InspectError(
                f"{path}: a record of {len(self.runs):,} runs of equations would be "
                f"{len(text) >> 20} MiB, and {_MOST_BYTES >> 20} MiB is the most that is read: "
                "record a model with shorter scans"
            )
        file = local_path(path, "path", InspectError)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "BitsRecord":
        """The record of a file.

        Args:
            path: A file of `write`.

        Raises:
            InspectError: If it is none, with every fault.
        """
        refuse = named("record of bits", path, InspectError)
        data = read_bytes(path, _MOST_BYTES, refuse)
        _, repeated = parse_json(data, refuse, most_bytes=_MOST_BYTES, most_values=_MOST_VALUES)
        try:
            found = cls.model_validate_json(data)
        except pydantic.ValidationError as error:
            raise refuse("cannot be read:" + listed([*repeated, *faults_of(error)])) from None
        if repeated:
            raise refuse("cannot be read:" + listed(repeated))
        return found
