"""Two records of bits side by side: which equations differ though what they read does not.

References:
    Li et al., "EasyScale", SC 2023, section 3.3 (a profiler that finds the operators that differ).
"""

import dataclasses
import difflib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from ._bits_record import BitsRecord, RecordedEquation, RecordedRead, RecordedRun

_What = Literal["result", "replaced", "constant"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitsDifference:
    """An equation at which bits part.

    Attributes:
        what: `result`: the same operands, another result. `replaced`: the equations of one side are
            not those of the other, and what they hand on differs. `constant`: a constant of the
            program differs.
        number: The place of the equation on side A.
        equation: The equation of side A; of one that B has beside it, what A hands on in its place.
        other: That of side B; the same one, unless it was replaced.
        iteration: The run of it in which the difference came first, 0 outside scans.
    """

    what: Literal["result", "replaced", "constant"]
    number: int
    equation: RecordedEquation
    other: RecordedEquation
    iteration: int = 0

    def __str__(self) -> str:
        in_run = f", run {self.iteration} of it" if self.iteration else ""
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
    """Where two sides part, as `hxla.inspect_bits` returns it.

    Attributes:
        a: Side A.
        b: Side B.
        inputs: The names of inputs that differ, or that one side lacks: neither is what then
            follows from them judged.
        differences: The equations at which bits part, in the order in which they ran.
        num_runs: The runs of equations on side A.
        num_judged: Those whose operands have the same bits on both sides.
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
        """Tell it in words.

        Args:
            limit: The most equations and names that are listed.
        """
        return "\n".join(self._lines(limit))

    def _lines(self, limit: int) -> Iterator[str]:
        yield f"A: {self.a}"
        yield f"B: {self.b}"
        if self.a.microbatch_size != self.b.microbatch_size:
            sizes = f"{self.a.microbatch_size} and {self.b.microbatch_size}"
            yield f"they are of unlike microbatches, {sizes} examples"
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
        """The comparison for machines: all but the two records."""
        own = {
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
        return json.dumps(own, indent=1)


def compare_bits(a: BitsRecord, b: BitsRecord) -> BitsComparison:
    """Find the equations at which bits part.

    An equation is judged where its operands have the same bits on both sides. What reads results
    that differ already is not, unless side B was given the operands of side A.

    Args:
        a: One side.
        b: The other.
    """
    sides = _Sides.of(a, b)
    found: list[tuple[int, BitsDifference]] = []
    num_judged = 0
    for i, j in sides.pairs.items():
        if _same_reads(a.runs[i], b.runs[j]):
            num_judged += 1
            if a.runs[i].results != b.runs[j].results:
                found.append((i, sides.difference("result", i, j)))
        else:
            found += sides.causes(i, j)
    first: dict[tuple[int, RecordedEquation], BitsDifference] = {}
    for _, difference in sorted(found, key=lambda own: own[0]):
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
    """Two records, and which runs of theirs are of the same equations.

    Attributes:
        a: Side A.
        b: Side B.
        pairs: From runs of side A to those of side B.
        iterations: For each run of side A, which one of its equation it is.
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
        runs_b = {own: j for j, own in enumerate(_numbered(b.runs))}
        pairs = {
            i: runs_b[same[equation], k]
            for i, (equation, k) in enumerate(numbered)
            if equation in same and (same[equation], k) in runs_b
        }
        return cls(a, b, pairs, tuple(k for _, k in numbered))

    def difference(self, what: _What, i: int, j: int) -> BitsDifference:
        """That of a run of side A and one of side B."""
        number = self.a.runs[i].equation
        return BitsDifference(
            what=what,
            number=number,
            equation=self.a.equations[number],
            other=self.b.equations[self.b.runs[j].equation],
            iteration=self.iterations[i],
        )

    def causes(self, i: int, j: int) -> Iterator[tuple[int, BitsDifference]]:
        """Why the operands of a run differ, where no earlier difference is the reason."""
        reads_a, reads_b = self.a.runs[i].reads, self.b.runs[j].reads
        if len(reads_a) != len(reads_b):
            yield i, self.difference("replaced", i, j)
            return
        for own, other in zip(reads_a, reads_b, strict=True):
            if own.digest == other.digest:
                continue
            p, q = own.producer, other.producer
            if p is None and q is None:
                yield i, self.difference("constant", i, j)
            elif not self._is_known(own, other):
                # Of what no equation made its reader is told.
                p = i if p is None or p < 0 else p
                q = j if q is None or q < 0 else q
                # What both sides have was right where it stands: bits part at its reader.
                yield (i if p in self.pairs else p), self.difference("replaced", p, q)

    def _is_known(self, own: RecordedRead, other: RecordedRead) -> bool:
        """Whether what differs is the same value of both sides: the cause lies before."""
        p, q = own.producer, other.producer
        if p is None or q is None:
            return False
        return p == q if p < 0 or q < 0 else self.pairs.get(p) == q


def _numbered(runs: Sequence[RecordedRun]) -> Iterator[tuple[int, int]]:
    """The equation of each run, and which run of it this is."""
    count: Counter[int] = Counter()
    for run in runs:
        yield run.equation, count[run.equation]
        count[run.equation] += 1


def _same_reads(a: RecordedRun, b: RecordedRun) -> bool:
    return [x.digest for x in a.reads] == [x.digest for x in b.reads]


def _differing(a: Sequence[tuple[str, str]], b: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    own, other = dict(a), dict(b)
    return tuple(n for n in dict.fromkeys([*own, *other]) if own.get(n) != other.get(n))


def _listed(names: Sequence[str], limit: int) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
