"""Describes what changed between two lists of programs."""

from collections import Counter
from collections.abc import Iterator, Sequence

from ..core.format import num_bytes as size
from ..core.format import plural, si
from .program import Collective, Program

_LEAST_SHARE = 0.005  # of memory and work: smaller changes are not reported

# What a collective is, whatever the compiler called it this time.
_Key = tuple[str, tuple[str, ...], int, str, str, str, int | None]


def diff(before: Sequence[Program], after: Sequence[Program]) -> tuple[str, ...]:
    """Sentences, program by program; nothing if nothing changed."""
    out: list[str] = []
    both, gone, new = pairs(before, after)
    out += [f"program {p.title} is gone" for p in gone if _matters(p)]
    out += [f"program {p.title} is new" for p in new if _matters(p)]
    for a, b in both:
        changes = list(_program(a, b))
        out += [f"{b.title}: {line}" for line in changes] if len(both) > 1 else changes
    return tuple(out)


def _matters(program: Program) -> bool:
    return bool(program.collectives or program.role or any(w.flops for w in program.work))


def pairs(
    before: Sequence[Program], after: Sequence[Program]
) -> tuple[list[tuple[Program, Program]], list[Program], list[Program]]:
    """Programs paired by name, in order; a single program on each side is paired regardless."""
    if len(before) == len(after) == 1:
        return [(before[0], after[0])], [], []
    rest = list(after)
    both, gone = [], []
    for program in before:
        match = next((p for p in rest if p.name == program.name), None)
        if match is None:
            gone.append(program)
        else:
            rest.remove(match)
            both.append((program, match))
    return both, gone, rest


def _program(before: Program, after: Program) -> Iterator[str]:
    if before.mesh != after.mesh or before.num_devices != after.num_devices:
        was, now = (p.mesh_text or f"{p.num_devices} devices" for p in (before, after))
        yield f"the mesh was {was} and is {now}"
    yield from _collectives(before.collectives, after.collectives)
    yield from _memory(before, after)
    yield from _work(before, after)
    old, new = ({w.text for w in p.warnings} for p in (before, after))
    yield from (f"no longer: {text}" for text in sorted(old - new))
    yield from (f"new warning: {text}" for text in sorted(new - old))


def _key(c: Collective) -> _Key:
    return (
        c.kind,
        tuple(sorted(c.arrays)),
        c.num_bytes,
        c.over,
        c.origin.where if not c.origin.missing else "",
        c.origin.phase,
        c.runs,
    )


def _collectives(before: Sequence[Collective], after: Sequence[Collective]) -> Iterator[str]:
    old, new = Counter(map(_key, before)), Counter(map(_key, after))
    lost, gained = old - new, new - old
    # A collective that only runs another number of times has moved in or out of a loop.
    for key in list(lost):
        moved = next((k for k in gained if k[:-1] == key[:-1] and gained[k] and k != key), None)
        if moved is not None:
            num = min(lost[key], gained[moved])
            lost[key] -= num
            gained[moved] -= num
            yield (
                f"{plural(num, key[0])} of {size(key[2])} over {key[3]}{_in(key)} "
                f"{'runs' if num == 1 else 'run'} {moved[-1] or '?'} times instead of "
                f"{key[-1] or '?'}"
            )
    for changed, verb in ((+lost, "disappeared"), (+gained, "appeared")):
        for key, num in sorted(changed.items(), key=lambda item: -item[0][2] * item[1]):
            times = f", {key[-1]} times a step each" if key[-1] not in (1, None) else ""
            yield f"{plural(num, key[0])} of {size(key[2])} over {key[3]}{_in(key)}{times} {verb}"


def _in(key: _Key) -> str:
    phase = f" ({key[5]})" if key[5] else ""
    return f" in {key[4]}{phase}" if key[4] else phase


def _memory(before: Program, after: Program) -> Iterator[str]:
    if before.memory is None or after.memory is None:
        return
    a, b = before.memory.by_owner, after.memory.by_owner
    change = after.memory.total_bytes - before.memory.total_bytes
    parts = {o: b.get(o, 0) - a.get(o, 0) for o in {**a, **b}}
    least = _LEAST_SHARE * max(before.memory.total_bytes, 1)
    changed = sorted((o for o in parts if abs(parts[o]) > least), key=lambda o: -abs(parts[o]))
    if not changed and abs(change) <= least:
        return
    words = ", ".join(f"{_signed(parts[o])} in {_plural(o)}" for o in changed)
    yield f"peak memory {_signed(change)}: {words}" if words else f"peak memory {_signed(change)}"


def _plural(owner: str) -> str:
    words = {"activation": "activations", "parameter": "parameters", "gradient": "gradients"}
    words |= {"temporary": "temporaries", "output": "outputs"}
    return words.get(owner, owner)


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{size(abs(value))}"


def _work(before: Program, after: Program) -> Iterator[str]:
    for name, write in (("flops", si), ("collective_bytes", size)):
        old, new = getattr(before.total, name), getattr(after.total, name)
        if abs(new - old) > _LEAST_SHARE * max(old, new):
            what = "FLOPs of a device" if name == "flops" else "bytes a device sends"
            change = f" ({new / old - 1:+.0%})" if old else ""
            yield f"{what}: {write(old)} before, {write(new)} now{change}"
