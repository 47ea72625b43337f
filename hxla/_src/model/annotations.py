"""The two primitives: `replicate` and `split`.

Entering one enters a `jax.named_scope`, so every equation traced inside carries it, through
`jax.jit`, `jax.checkpoint`, `nn.scan` and the transforms of both Flax APIs, and into the HLO's
`op_name`. Nothing else happens: a model runs the same with hxla and without.

References:
    Jia et al., "Whale: Efficient Giant Model Training over Heterogeneous GPUs", USENIX ATC 2022,
    section 3.1 (parallel primitives and TaskGraphs).
"""

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
from flax import nnx

from ..core.errors import AnnotationError
from ..core.types import TOKEN_AXIS

#: `tokens` is `split(dim="sequence")`.
Kind = Literal["replicate", "split", "tokens"]

_entries = itertools.count()  # distinguishes entries of one scope; its values carry no meaning
_SCOPE = re.compile(r"hxla\.(replicate|split|tokens)\[(\d+|all)\]\.(\d+)")


class Scope(NamedTuple):
    """One entry of an annotation, as equations carry it."""

    kind: Kind
    device_count: int | None
    entry: int

    @property
    def name(self) -> str:
        """The name of the named scope, without `@`, at which XLA ends an operation's name."""
        return f"hxla.{self.kind}[{self.device_count or 'all'}].{self.entry}"


def written(kind: Kind, device_count: int | None) -> str:
    """An annotation as a person writes it: `split(4)`."""
    count = [] if device_count is None else [str(device_count)]
    if kind == "tokens":
        return f"split({', '.join([*count, f'dim={TOKEN_AXIS!r}'])})"
    return f"{kind}({', '.join(count)})"


def scopes_of(name_stack: str) -> list[Scope]:
    """The annotations around an equation, outermost first."""
    return [
        Scope(kind, _count(count), int(entry)) for kind, count, entry in _SCOPE.findall(name_stack)
    ]


def uncounted(name_stack: str) -> str:
    """A name stack without the numbers of entries, which differ between traces."""
    return _SCOPE.sub(lambda match: f"hxla.{match[1]}[{match[2]}]", name_stack)


def _count(text: str) -> int | None:
    return None if text == "all" else int(text)


class Strategy:
    """An annotation as `replicate`, `split` and `stage` return it: context manager and decorator.

    As a context manager in `__call__` (or a Linen `@compact` method) it annotates the operations
    inside. In an NNX `__init__` or a Linen `setup` it annotates the calls of the submodules that
    are assigned to `self` inside. As a decorator it annotates every call of a module class, of one
    module, or of a function.
    """

    def __init__(self, kind: Literal["replicate", "split", "tokens"], device_count: int | None):
        name = "replicate" if kind == "replicate" else "split"
        if callable(device_count):
            raise AnnotationError(
                f"hxla.{name} got {device_count!r} where a number of devices belongs: write "
                f"@hxla.{name}() with parentheses"
            )
        if device_count is not None and (
            not isinstance(device_count, int) or isinstance(device_count, bool) or device_count < 1
        ):
            raise AnnotationError(
                f"hxla.{name}({device_count!r}): device_count is a whole number of at least 1, or "
                "None for all devices"
            )
        self.kind = kind
        self.device_count = device_count
        self._entered: list[tuple[Any, Any, dict[str, Any]]] = []

    def __repr__(self) -> str:
        return f"hxla.{written(self.kind, self.device_count)}"

    def scope(self) -> Any:
        """A `jax.named_scope` for one entry of the annotation, with a fresh number."""
        return jax.named_scope(Scope(self.kind, self.device_count, next(_entries)).name)

    def __enter__(self) -> "Strategy":
        frame = inspect.currentframe()
        module = _module_being_built(None if frame is None else frame.f_back)
        before = {} if module is None else dict(vars(module))
        scope = self.scope()
        scope.__enter__()
        self._entered.append((scope, module, before))
        return self

    def __exit__(self, *error: Any) -> None:
        scope, module, before = self._entered.pop()
        scope.__exit__(*error)
        if module is None or error[0] is not None:
            return
        for name, value in vars(module).items():
            if value is not before.get(name):
                for child in _modules_in(value):
                    self._annotate_instance(child)

    def __call__(self, target: Any) -> Any:
        """Decorate a module class, a module, or a function."""
        if isinstance(target, type):
            if not issubclass(target, nn.Module | nnx.Module):
                raise AnnotationError(
                    f"{self!r} decorates Flax modules and functions, not the class "
                    f"{target.__qualname__}"
                )
            _set_call(target, self._wrap(_call_of(target, self)))
            return target
        if isinstance(target, nn.Module | nnx.Module):
            self._annotate_instance(target)
            return target
        if not callable(target):
            raise AnnotationError(f"{self!r} cannot decorate {target!r}: it is not callable")
        return self._wrap(target)

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            with self.scope():
                return function(*args, **kwargs)

        return annotated

    def _annotate_instance(self, module: Any) -> None:
        # A subclass of the same name: Python looks __call__ up on the class, and pickles and graph
        # definitions of the user's class stay unchanged.
        cls = type(module)
        call = self._wrap(_call_of(cls, self))
        namespace: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        if isinstance(module, nn.Module):
            namespace["__annotations__"] = {}
        # Flax wraps the methods of a class body, so the call is set after the class is made.
        metaclass: Any = type(cls)
        subclass = metaclass(cls.__name__, (cls,), namespace)
        _set_call(subclass, call)
        object.__setattr__(module, "__class__", subclass)


def _call_of(cls: type, strategy: Strategy) -> Callable[..., Any]:
    # A class without __call__ would return that of its metaclass.
    bodies = [vars(c) for c in cls.__mro__ if c not in (nn.Module, nnx.Module)]
    call = next((body["__call__"] for body in bodies if "__call__" in body), None)
    if call is None:
        raise AnnotationError(
            f"{strategy!r} on {cls.__qualname__}, which has no __call__: use the scope where its "
            "methods are called"
        )
    return call


def _set_call(cls: type, call: Callable[..., Any]) -> None:
    type.__setattr__(cls, "__call__", call)


def _module_being_built(frame: FrameType | None) -> Any:
    """The `self` of the NNX `__init__` or Linen `setup` around a `with` statement, or None."""
    if frame is None or frame.f_code.co_name not in ("__init__", "setup"):
        return None
    module = frame.f_locals.get("self")
    return module if isinstance(module, nn.Module | nnx.Module) else None


def _modules_in(value: Any) -> Iterator[Any]:
    if isinstance(value, nnx.Module | nn.Module) and not isinstance(value, nnx.List | nnx.Dict):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _modules_in(item)
    elif isinstance(value, list | tuple | nnx.List):
        for item in value:
            yield from _modules_in(item)
    elif isinstance(value, nnx.Dict):
        for item in vars(value).values():
            yield from _modules_in(item)


def replicate(device_count: int | None = None) -> Strategy:
    """Annotate operations that run as replicas, each on a shard of the batch.

    Args:
        device_count: The replicas of this TaskGraph, each on one device; None means all devices.

    Returns:
        A context manager and decorator, see `Strategy`.

    Raises:
        AnnotationError: If the count is below 1, or the decorated target cannot be annotated.

    Example:
        >>> import hxla, jax
        >>> from flax import nnx
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.backbone = nnx.Linear(8, 32, rngs=rngs)
        ...         self.classifier = nnx.Linear(32, 64, rngs=rngs)
        ...     def __call__(self, images):
        ...         with hxla.replicate():
        ...             features = self.backbone(images)
        ...         with hxla.split():
        ...             return self.classifier(features)
        >>> net = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
        >>> batch = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}
        >>> graph = hxla.trace(net, lambda net, batch: net(batch["x"]).mean(), batch)
        >>> [task_graph.label for task_graph in graph.task_graphs]
        ['replicate()', 'split()']

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.1.1 (parallel primitives).
    """
    return Strategy("replicate", device_count)


def split(device_count: int | None = None, *, dim: Literal["sequence"] | None = None) -> Strategy:
    """Annotate operations whose parameters and work are sharded over devices.

    The sharded dimension of each parameter follows from the rules, or else from an integer program
    that sends the fewest bytes.

    Args:
        device_count: The devices that share this TaskGraph; None means all devices.
        dim: `"sequence"` splits the tokens of each example and no parameters, as a mesh axis
            `sequence` does. It holds for the whole loss, so one annotation is enough. None splits
            parameters.

    Returns:
        A context manager and decorator, see `Strategy`.

    Raises:
        AnnotationError: If the count is below 1, `dim` is another word, or the decorated target
            cannot be annotated.

    Example:
        >>> import hxla, jax
        >>> from flax import nnx
        >>> @hxla.split(4)
        ... class Experts(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.up = nnx.Linear(8, 64, rngs=rngs)
        ...     def __call__(self, x):
        ...         return self.up(x)
        >>> experts = nnx.eval_shape(lambda: Experts(nnx.Rngs(0)))
        >>> batch = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}
        >>> graph = hxla.trace(experts, lambda model, batch: model(batch["x"]).mean(), batch)
        >>> hxla.make_plan(graph, 4).axis_sizes
        {'tensor': 4}

    References:
        Jia et al., "Whale", USENIX ATC 2022, sections 3.1.1 (parallel primitives) and 3.2.2
        (sharding patterns).
    """
    if dim not in (None, TOKEN_AXIS):
        raise AnnotationError(
            f"hxla.split(dim={dim!r}): use {TOKEN_AXIS!r} to split tokens, or None to split "
            "parameters"
        )
    return Strategy("split" if dim is None else "tokens", device_count)


def stage() -> Strategy:
    """Annotate operations that are one stage of a pipeline: another name of `replicate(1)`.

    TaskGraphs on different devices are the stages of a pipeline, in the order of execution.

    Returns:
        A context manager and decorator, see `Strategy`.

    Example:
        >>> import hxla, jax
        >>> from flax import nnx
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.encoder = nnx.Linear(8, 32, rngs=rngs)
        ...         self.decoder = nnx.Linear(32, 8, rngs=rngs)
        ...     def __call__(self, x):
        ...         with hxla.stage():
        ...             x = self.encoder(x)
        ...         with hxla.stage():
        ...             return self.decoder(x)
        >>> net = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
        >>> batch = {"x": jax.ShapeDtypeStruct((4, 8), "float32")}
        >>> graph = hxla.trace(net, lambda net, batch: net(batch["x"]).mean(), batch)
        >>> hxla.make_plan(graph, 2).num_stages
        2

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.1, Example 1 (a pipeline of TaskGraphs).
    """
    return Strategy("replicate", 1)
