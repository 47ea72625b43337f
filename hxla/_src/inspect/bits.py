"""Compares two records of bits: which equations differ although their operands do not.

References:
    Li et al., "EasyScale", SC 2023, section 3.3 (a profiler that finds the operators that differ).
"""

import dataclasses
import difflib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import pydantic

from ..core.errors import InspectError
from ..core.files import listed, local_path, named, parse_json, read_bytes
from ..plan.check import faults_of
from ..plan.layout import PlanValue
from ..plan.parts import Versions

_MOST_BYTES, _MOST_VALUES = 1 << 27, 8_000_000


class RecordedEquation(PlanValue):
    """An equation of a traced microbatch, forward or backward.

    Attributes:
        primitive: The name of jax's primitive.
        scope: The name scopes and Linen modules around it; empty where there are none.
        after: The parameter that the forward pass read last before the equation; for a gradient,
            before the equation that it differentiates.
        source: The file and line of the user's code, or an empty string.
        results: The dtypes and shapes of its results, `float32[8,64]`.
        is_backward: Whether it belongs to the backward pass.
    """

    primitive: str
    scope: str = ""
    after: str = ""
    source: str = ""
    results: tuple[str, ...] = ()
    is_backward: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same equation in two programs."""
        return self.primitive, self.scope, self.results, self.is_backward

    def __str__(self) -> str:
        way = "backward" if self.is_backward else "forward"
        scope = f" in {self.scope}" if self.scope else ""
        after = f" after {self.after}" if self.after else ""
        line = f", {self.source}" if self.source else ""
        return f"{way}: {self.primitive} -> {', '.join(self.results)}{scope}{after}{line}"


class RecordedRead(NamedTuple):
    """An operand of a recorded run.

    Attributes:
        producer: The number of the run that made it; below 0 an input, -1 the first; None: a
            constant of the program.
        digest: SHA-256 of its bits.
    """

    producer: int | None
    digest: str


class RecordedRun(NamedTuple):
    """One run of an equation; inside a scan, one per iteration.

    Attributes:
        equation: The index of the equation.
        reads: The operands.
        results: SHA-256 of the bits of each result.
    """

    equation: int
    reads: tuple[RecordedRead, ...]
    results: tuple[str, ...]


class BitsRecord(PlanValue):
    """The bits that one side computed in a microbatch, as `hxla.record_bits` returns them.

    Attributes:
        format: The version of the file's format.
        device: The kind of the device, as jax names it, after its platform.
        made_with: The versions, and the instruction set if a CPU computed.
        microbatch_size: The examples of the microbatch.
        inputs: The name and SHA-256 of each parameter, other variable, key and batch array.
        equations: The equations in order.
        runs: The runs of equations in order.
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
        versions = self.made_with
        cpu = f" ({versions.processor})" if versions.processor else ""
        libraries = f"jax {versions.jax}, jaxlib {versions.jaxlib}, hxla {versions.hxla}"
        return ", ".join((f"{self.device}{cpu}", libraries, *versions.settings))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the record, for a comparison with one of another machine or version.

        Args:
            path: A JSON file; its folder is made.

        Raises:
            InspectError: If the record is too large to be read again.
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
        """Read a record.

        Args:
            path: A file that `write` wrote.

        Raises:
            InspectError: If the file is no record of bits, with every fault.
        """
        refuse = named("record of bits", path, InspectError)
        data = read_bytes(path, _MOST_BYTES, refuse)
        _, repeated = parse_json(data, refuse, most_bytes=_MOST_BYTES, most_values=_MOST_VALUES)
        try:
            record = cls.model_validate_json(data)
        except pydantic.ValidationError as error:
            raise refuse("cannot be read:" + listed([*repeated, *faults_of(error)])) from None
        if repeated:
            raise refuse("cannot be read:" + listed(repeated))
        return record


_What = Literal["result", "replaced", "constant"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitsDifference:
    """An equation at which bits part.

    Attributes:
        what: `result`: the same operands, another result. `replaced`: the two sides have different
            equations, whose results differ. `constant`: a constant of the program differs.
        number: The index of the equation on side A.
        equation: The equation of side A; if only B has an equation here, the one that A has in its
            place.
        other: The equation of side B; the same one, unless it was replaced.
        iteration: The run of the equation in which the difference came first, 0 outside scans.
    """

    what: Literal["result", "replaced", "constant"]
    number: int
    equation: RecordedEquation
    other: RecordedEquation
    iteration: int = 0

    def __str__(self) -> str:
        in_run = f", run {self.iteration}" if self.iteration else ""
        if self.what != "replaced":
            a_constant = "a constant of " * (self.what == "constant")
            line = f"{a_constant}equation {self.number}{in_run}, {self.equation}"
            if self.other.source != self.equation.source:
                line += f" (B: {self.other.source or 'no line'})"
            return line
        return (
            f"equation {self.number}{in_run}, A: {self.equation}\n    in its place B: {self.other}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitsComparison:
    """The equations at which two sides part, as `hxla.inspect_bits` returns them.

    Attributes:
        a: Side A.
        b: Side B.
        inputs: The names of inputs that differ, or that one side lacks; what depends on them is
            not judged.
        differences: The equations at which bits part, in the order in which they ran.
        num_runs: The runs of equations on side A.
        num_judged: The runs whose operands have the same bits on both sides.
        compiled: The tensors that differ where the microbatch is compiled as one program.
    """

    a: BitsRecord
    b: BitsRecord
    inputs: tuple[str, ...]
    differences: tuple[BitsDifference, ...]
    num_runs: int
    num_judged: int
    compiled: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.inputs or self.differences or self.compiled)

    @property
    def first(self) -> BitsDifference | None:
        """The first equation at which bits part."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        return self.text()

    def text(self, limit: int = 20) -> str:
        """Describe the comparison in words.

        Args:
            limit: The most equations and names that are listed.
        """
        return "\n".join(self._lines(limit))

    def _lines(self, limit: int) -> Iterator[str]:
        yield f"A: {self.a}"
        yield f"B: {self.b}"
        if self.a.microbatch_size != self.b.microbatch_size:
            sizes = f"{self.a.microbatch_size} and {self.b.microbatch_size}"
            yield f"their microbatches differ: {sizes} examples"
        if self.inputs:
            yield f"{len(self.inputs)} inputs differ: {_listed(self.inputs, limit)}"
        judged = f"{self.num_judged:,} of {self.num_runs:,} runs of equations had the same operands"
        if self.differences:
            yield f"first: {self.first}"
            yield f"{judged}; at {len(self.differences)} equations bits part:"
            for difference in self.differences[:limit]:
                yield f"  {difference}"
            if len(self.differences) > limit:
                yield f"  and {len(self.differences) - limit} more"
            names = Counter(d.equation.primitive for d in self.differences)
            yield "by primitive: " + ", ".join(f"{n} {name}" for name, n in names.most_common())
        else:
            yield f"{judged}, and all of those had the same results"
        num = len(self.a.compiled)
        if self.compiled:
            yield (
                f"compiled as one program: {len(self.compiled)} of {num} tensors differ: "
                f"{_listed(self.compiled, limit)}"
            )
            if not self.differences and not self.inputs:
                yield "no equation differs by itself: what differs is how they are fused"
        elif num:
            yield f"compiled as one program: all {num} tensors have the same bits"

    def to_json(self) -> str:
        """The comparison as JSON, without the two records."""
        fields = {
            "equal": self.is_equal,
            "inputs": self.inputs,
            "differences": [
                {
                    "what": d.what,
                    "number": d.number,
                    "iteration": d.iteration,
                    "a": d.equation.model_dump(),
                    "b": d.other.model_dump(),
                }
                for d in self.differences
            ],
            "num_runs": self.num_runs,
            "num_judged": self.num_judged,
            "compiled": self.compiled,
        }
        return json.dumps(fields, indent=1)


def compare_bits(a: BitsRecord, b: BitsRecord) -> BitsComparison:
    """Find the equations at which bits part.

    An equation is judged where its operands have the same bits on both sides. One that reads
    results that differ already is not judged, unless side B ran on the operands of side A.
    """
    sides = _Sides.of(a, b)
    differences: list[tuple[int, BitsDifference]] = []
    num_judged = 0
    for i, j in sides.pairs.items():
        if _same_reads(a.runs[i], b.runs[j]):
            num_judged += 1
            if a.runs[i].results != b.runs[j].results:
                differences.append((i, sides.difference("result", i, j)))
        else:
            differences += sides.causes(i, j)
    first: dict[tuple[int, RecordedEquation], BitsDifference] = {}
    for _, difference in sorted(differences, key=lambda item: item[0]):
        first.setdefault((difference.number, difference.other), difference)
    return BitsComparison(
        a=a,
        b=b,
        inputs=_differing(a.inputs, b.inputs),
        differences=tuple(first.values()),
        num_runs=len(a.runs),
        num_judged=num_judged,
        compiled=_differing(a.compiled, b.compiled),
    )


@dataclasses.dataclass(frozen=True)
class _Sides:
    """Two records with the runs of the same equations paired.

    Attributes:
        pairs: From runs of side A to runs of side B.
        iterations: For each run of side A, its count among the runs of its equation.
    """

    a: BitsRecord
    b: BitsRecord
    pairs: dict[int, int]
    iterations: tuple[int, ...]

    @classmethod
    def of(cls, a: BitsRecord, b: BitsRecord) -> "_Sides":
        keys_a, keys_b = [e.key for e in a.equations], [e.key for e in b.equations]
        same = dict(enumerate(range(len(keys_a))))
        if keys_a != keys_b:
            matcher = difflib.SequenceMatcher(None, keys_a, keys_b, autojunk=False)
            same = {m.a + k: m.b + k for m in matcher.get_matching_blocks() for k in range(m.size)}
        numbered = list(_numbered(a.runs))
        runs_b = {numbered_run: j for j, numbered_run in enumerate(_numbered(b.runs))}
        pairs = {
            i: runs_b[same[equation], k]
            for i, (equation, k) in enumerate(numbered)
            if equation in same and (same[equation], k) in runs_b
        }
        return cls(a, b, pairs, tuple(k for _, k in numbered))

    def difference(self, what: _What, i: int, j: int) -> BitsDifference:
        """The difference between a run of side A and one of side B."""
        number = self.a.runs[i].equation
        return BitsDifference(
            what=what,
            number=number,
            equation=self.a.equations[number],
            other=self.b.equations[self.b.runs[j].equation],
            iteration=self.iterations[i],
        )

    def causes(self, i: int, j: int) -> Iterator[tuple[int, BitsDifference]]:
        """The differences that make operands of a run differ, unless they are known already."""
        reads_a, reads_b = self.a.runs[i].reads, self.b.runs[j].reads
        if len(reads_a) != len(reads_b):
            yield i, self.difference("replaced", i, j)
            return
        for read_a, read_b in zip(reads_a, reads_b, strict=True):
            if read_a.digest == read_b.digest:
                continue
            p, q = read_a.producer, read_b.producer
            if p is None and q is None:
                yield i, self.difference("constant", i, j)
            elif not self._is_known(read_a, read_b):
                # Inputs and constants have no producer: their reader is reported.
                p = i if p is None or p < 0 else p
                q = j if q is None or q < 0 else q
                # A producer that both sides have was compared itself: bits part at its reader.
                yield (i if p in self.pairs else p), self.difference("replaced", p, q)

    def _is_known(self, read_a: RecordedRead, read_b: RecordedRead) -> bool:
        """Whether both operands are the same value, so that an earlier difference is the cause."""
        p, q = read_a.producer, read_b.producer
        if p is None or q is None:
            return False
        return p == q if p < 0 or q < 0 else self.pairs.get(p) == q


def _numbered(runs: Sequence[RecordedRun]) -> Iterator[tuple[int, int]]:
    """The equation of each run, and its count among the runs of that equation."""
    count: Counter[int] = Counter()
    for run in runs:
        yield run.equation, count[run.equation]
        count[run.equation] += 1


def _same_reads(a: RecordedRun, b: RecordedRun) -> bool:
    return [x.digest for x in a.reads] == [x.digest for x in b.reads]


def _differing(a: Sequence[tuple[str, str]], b: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    of_a, of_b = dict(a), dict(b)
    return tuple(n for n in dict.fromkeys([*of_a, *of_b]) if of_a.get(n) != of_b.get(n))


def _listed(names: Sequence[str], limit: int) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
