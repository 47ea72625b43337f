"""The result of `hxla.inspect`: programs, their tables, pages and JSON."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable

import pydantic

from ..core.errors import InspectError
from ..plan.plan import Plan
from ..report.page import write
from .diff import diff
from .inspection_page import diff_page, inspection_page
from .pictures import lanes_of_file
from .profiler_trace import last_step
from .program import Collective, Program
from .tables import terminal_tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """Compiled programs as values, and the files of a dump that could not be read.

    Attributes:
        programs: The programs, the one with most bytes of memory first.
        problems: The files that could not be read, and why.
    """

    programs: tuple[Program, ...]
    problems: tuple[str, ...] = ()

    def program(self, name: str) -> Program:
        """Find the program of a name or role.

        Args:
            name: The name of the HLO module, or the role that hxla gives it.

        Returns:
            The program.

        Raises:
            InspectError: If there is no such program; it names the others.
        """
        matches = [p for p in self.programs if name in (p.name, p.role)]
        if not matches:
            raise InspectError(f"no program {name!r}, only: {_names(self.programs)}")
        return matches[0]

    @property
    def main(self) -> Program:
        """The program that uses most memory.

        Raises:
            InspectError: If nothing could be read.
        """
        if not self.programs:
            reasons = "; ".join(self.problems) or "there was none"
            raise InspectError(f"no program could be read: {reasons}")
        return self.programs[0]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of all programs."""
        return tuple(c for p in self.programs for c in p.collectives)

    def to_json(self) -> str:
        """Write the inspection as JSON."""
        return _adapter().dump_json(self, indent=1).decode()

    @classmethod
    def from_json(cls, text: str) -> "Inspection":
        """Read what `to_json` wrote.

        Args:
            text: The JSON.

        Returns:
            The inspection.

        Raises:
            InspectError: If the text is no inspection.
        """
        try:
            return _adapter().validate_json(text)
        except pydantic.ValidationError as error:
            raise InspectError(f"this is no inspection: {error}") from error

    def text(
        self,
        *,
        limit: int = 20,
        plan: str | os.PathLike[str] | None = None,
        profile: str | os.PathLike[str] | None = None,
    ) -> str:
        """Draw tables for a terminal.

        Args:
            limit: The most rows of a table.
            plan: The file of the plan that ran: its uneven shards are shown.
            profile: The folder of `jax.profiler.trace`: waiting in its last step is shown.

        Returns:
            Some lines of text.

        Raises:
            InspectError: If there is no profile of these programs.
            PlanError: If the file is no plan.
        """
        split = Plan.read(plan) if plan is not None else None
        step = last_step(pathlib.Path(profile), self.programs) if profile is not None else None
        return terminal_tables(self.programs, self.problems, limit=limit, plan=split, step=step)

    def write_html(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "",
        profile: str | os.PathLike[str] | None = None,
        predicted: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write the inspection as one self-contained HTML page.

        Args:
            path: The file; its folder is made if it is not there.
            title: The heading of the page.
            profile: The folder of `jax.profiler.trace`: its last step is drawn.
            predicted: A file of `hxla plan --write`, a plan or the trace of a replica: it is drawn
                beside the measured step.

        Raises:
            InspectError: If there is no profile of these programs, or the path cannot be written.
            PlanError: If `predicted` is neither a plan nor a trace of one.
        """
        step = last_step(pathlib.Path(profile), self.programs) if profile is not None else None
        lanes = lanes_of_file(pathlib.Path(predicted)) if predicted is not None else None
        page = inspection_page(
            self.programs,
            self.problems,
            title=title or "What XLA did",
            measured=step,
            predicted=lanes,
        )
        write(path, page, InspectError)

    def write_diff_html(
        self, other: "Inspection", path: str | os.PathLike[str], *, title: str = ""
    ) -> None:
        """Write what changed from this inspection to `other` as one HTML page.

        Args:
            other: The later inspection.
            path: The file; its folder is made if it is not there.
            title: The heading of the page.

        Raises:
            InspectError: If the path cannot be written.
        """
        page = diff_page(self.programs, other.programs, title=title or "What changed")
        write(path, page, InspectError)

    def diff(self, other: "Inspection") -> tuple[str, ...]:
        """Describe how another inspection's programs differ, one change per sentence.

        Args:
            other: The later inspection.

        Returns:
            Sentences; none if nothing changed.
        """
        return diff(self.programs, other.programs)


def _names(programs: Iterable[Program]) -> str:
    return ", ".join(sorted({p.title for p in programs})) or "none"


@functools.cache  # made on first use: it takes a tenth of a second
def _adapter() -> pydantic.TypeAdapter[Inspection]:
    return pydantic.TypeAdapter(Inspection)
