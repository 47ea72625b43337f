"""Numbers for people to read, in ASCII, which any terminal and log file can show."""

import math
from collections.abc import Iterator, Sequence


def si(value: float) -> str:
    """A number to two or three digits with its thousands as a letter: 412, 5.1k, 24k, 3.2M."""
    if not math.isfinite(value):
        return str(value)
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.5 and above would round to 1000 of the smaller unit.
        if abs(value) >= 0.9995 * factor:
            scaled = value / factor
            return f"{scaled:.1f}{letter}" if abs(scaled) < 99.95 else f"{scaled:.0f}{letter}"
    return f"{value:.0f}" if abs(value) >= 99.5 or value == round(value) else f"{value:.3g}"


def number(value: float) -> str:
    """A loss or metric to four digits: 2.413, 0.04120, 3.1e-07."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:#.4g}".rstrip(".")
    return f"{value:.3e}"


def clock(seconds: float) -> str:
    """A duration as 0:07, 1:23 or 2:03:04; `?` if it is unknown."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def span(seconds: float) -> str:
    """A short time with its unit: 84 ms, 1.23 s, 0.45 ms."""
    if not math.isfinite(seconds):
        return "?"
    if seconds and seconds < 0.9995:
        milliseconds = seconds * 1e3
        return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 else f"{milliseconds:.2g} ms"
    return f"{seconds:.3g} s"


def num_bytes(value: float) -> str:
    """A size in binary units: 536 B, 1.2 KiB, 7.5 GiB."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value:.0f} B"


def percent(fraction: float) -> str:
    """A fraction as whole per cents: 7 %."""
    return f"{fraction * 100:.0f} %" if math.isfinite(fraction) else "? %"


def gain(fraction: float | None) -> str:
    """A gain with its sign: +25 %; `not yet measured` for None."""
    return "not yet measured" if fraction is None else f"{fraction * 100:+.0f} %"


def shares(counts: Sequence[int]) -> str:
    """Microbatch counts: 9/3; for more than eight devices only the range."""
    if len(counts) <= 8:
        return "/".join(map(str, counts))
    return f"{min(counts)} to {max(counts)} on {len(counts)} devices"


def plural(num: int, noun: str) -> str:
    """1 step, 2 steps, 2 microbatches."""
    ending = "" if num == 1 else "es" if noun.endswith("ch") else "s"
    return f"{num} {noun}{ending}"


def round_numbers(low: float, high: float, most: int, *, least: float = 0.0) -> Iterator[float]:
    """Round numbers between two values, about as many as asked, for the ticks of an axis."""
    rough = max((high - low) / most, least, 1e-300)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = max(
        least, min((m * unit for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / rough)))
    )
    for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        yield i * step
