"""Programs of several replicas, compiled once for all that are alike.

Every device of a process needs its own program, but XLA makes the same one for devices of one kind.
So the first replica of each kind compiles, and the others load what it has.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._jax._portable import portable
from ._replica import Replica


def first_of_kind(replicas: Sequence[Replica]) -> list[int]:
    """For each replica the first one that is like it, perhaps itself.

    A replica of several processes is like no other: not all of them may have one to compare.
    """
    firsts: dict[Any, int] = {}
    out = []
    for i, replica in enumerate(replicas):
        kinds = tuple((d.platform, d.device_kind) for d in replica.devices)
        key = (replica.axes, kinds, i if replica.spans_processes else None)
        out.append(firsts.setdefault(key, i))
    return out


def compile_all(
    lowered: Sequence[tuple[str, Any]],
    over: Callable[..., Any] = map,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Any]:
    """Compile programs, and say which are not ready yet.

    Args:
        lowered: Their names and themselves, before compilation.
        over: Like `map`, perhaps on several threads.
        tell: Called with what is being done.
    """
    left, lock = [name for name, _ in lowered], threading.Lock()

    def say() -> None:
        done = f"{len(lowered) - len(left)} of {len(lowered)} programs are ready"
        tell(f"compiling {', '.join(dict.fromkeys(left))} ({done})")

    def compiled(task: tuple[str, Any]) -> Any:
        name, program = task
        found = program.compile()
        with lock:
            left.remove(name)
            say()
        return found

    say()
    return list(over(compiled, lowered))


def for_others(
    replicas: Sequence[Replica],
    compiled: Mapping[int, Sequence[Any]],
    lower: Callable[[int], Sequence[Any]],
    over: Callable[..., Any] = map,
) -> list[list[Any]]:
    """Programs of all replicas, those of the first of each kind given.

    Args:
        replicas: All that need programs.
        compiled: Programs of the first replicas of each kind, by number.
        lower: From the number of a replica to its programs before compilation. A program that is
            bound to its devices is compiled for each.
        over: Like `map`, perhaps on several threads.

    Returns:
        For each replica its programs, in the order of `lower`.
    """
    firsts = first_of_kind(replicas)
    shared = {i for k, i in enumerate(firsts) if k != i}
    found = {i: [portable(program) for program in compiled[i]] for i in shared}
    lowered = {
        k: lower(k) for k, i in enumerate(firsts) if k != i and any(p is None for p in found[i])
    }

    def made(task: tuple[int, int]) -> Any:
        k, n = task
        if k in compiled:
            return compiled[k][n]
        ours = found[firsts[k]][n]
        return ours.on(replicas[k].devices) if ours is not None else lowered[k][n].compile()

    nums = [len(compiled[i]) for i in firsts]
    flat = iter(over(made, [(k, n) for k, num in enumerate(nums) for n in range(num)]))
    return [[next(flat) for _ in range(num)] for num in nums]


def for_each(replicas: Sequence[Replica], lower: Callable[[int], Any]) -> list[Any]:
    """One program, compiled for every replica.

    Args:
        replicas: All that need it.
        lower: From the number of a replica to its program before compilation.
    """
    compiled = {i: [lower(i).compile()] for i in sorted(set(first_of_kind(replicas)))}
    return [own for [own] in for_others(replicas, compiled, lambda i: [lower(i)])]
