"""What a part of benchmarks/gpu.py found, written after every row: a crash loses what comes later.

Needs no package, so that a part may fail in its imports and still say so.
"""

import argparse
import json
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent.parent


def arguments() -> argparse.Namespace:
    """Those that every part takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--torch", default=sys.executable)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--gib", type=float, help="of memory that JAX may take; none: not known")
    return parser.parse_args()


class Report:
    """The result of a part.

    Args:
        path: File for it.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._rows: list[dict[str, str]] = []
        self._details: dict[str, Any] = {}
        self._failures: list[str] = []

    def row(self, what: str, hxla: Any, beside: Any = "", ratio: Any = "") -> None:
        """Of the table."""
        cells = {"hxla": hxla, "beside": beside, "ratio": ratio}
        self._rows.append({"what": what} | {name: str(cell) for name, cell in cells.items()})
        self._write()

    def bits(self, what: str, own: str, other: str, *, is_law: bool = True) -> None:
        """A row of two SHA-256.

        Args:
            what: In words.
            own: Of a run.
            other: Of the one beside it.
            is_law: Whether they must be the same: a failure if they are not.
        """
        self.row(what, own[:16], other[:16], "same" if own == other else "OTHER")
        if is_law and own != other:
            self.failure(f"{what}: {own[:16]}, not {other[:16]}")

    def detail(self, name: str, value: Any) -> None:
        """Beside the table."""
        self._details[name] = value
        self._write()

    def failure(self, text: str) -> None:
        """What did not work, its first line in few words."""
        self._failures.append(text)
        self._write()

    def attempt(self, name: str, run: Callable[[], Any]) -> Any:
        """What `run` returns; None if it fails, which is reported."""
        try:
            return run()
        except Exception as error:
            traceback.print_exc()
            last = traceback.format_exc().strip().splitlines()[-15:]
            self.failure("\n".join([f"{name}: {type(error).__name__}: {error}"[:300], *last]))
            return None

    def _write(self) -> None:
        found = {"rows": self._rows, "details": self._details, "failures": self._failures}
        self._path.write_text(json.dumps(found, indent=1))
