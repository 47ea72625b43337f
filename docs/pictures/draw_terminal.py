"""Draw what a terminal showed: `terminal.svg`, for the README.

hxla run --mesh cpu-1.0-0.33 train.py 2>&1 | python docs/pictures/draw_terminal.py
"""

import io
import pathlib
import re
import sys

from rich.console import Console

COMMAND = "hxla run --mesh cpu-1.0-0.33 train.py"

console = Console(record=True, width=150, file=io.StringIO(), color_system="truecolor")
console.print(f"[bold]$ {COMMAND}[/]", highlight=False)
for line in sys.stdin:
    console.print(line.rstrip(), highlight=False, markup=False, no_wrap=True, overflow="ellipsis")
svg = console.export_svg(title=COMMAND)
svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S)  # nothing is fetched
(pathlib.Path(__file__).parent / "terminal.svg").write_text(svg)
