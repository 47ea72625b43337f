"""The user's optimizer as updates run it: with extra arguments and plain arrays.

An optax transformation may ask for more than gradients. An update can pass the value of the loss
and the gradient, but not the loss function, for it has sums and no examples.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from ..core.errors import ConfigError, HxlaError
from ..core.types import PyTree
from ..jax.digest import program_digest
from ..jax.jaxpr import ClosedJaxpr, backward_slice, inlined, variables
from .functional import leaf_names
from .plain_arrays import as_plain, from_plain

_PASSED = "an update gets the gradient, the state, the parameters, and by name `value` and `grad`"


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation whose state stores random keys as their bits.

    Attributes:
        user: The user's transformation, or an `optax.MultiSteps`.
    """

    user: Any
    _traced: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def _transformation(self) -> optax.GradientTransformationExtraArgs:
        transformation = self.user
        if isinstance(transformation, optax.MultiSteps):
            transformation = transformation.gradient_transformation()
        return optax.with_extra_args_support(transformation)

    def init(self, params: PyTree) -> PyTree:
        """The initial state."""
        return as_plain(self._transformation.init(params))

    def reads(self, params: PyTree) -> frozenset[int]:
        """Parameters whose values, not only shapes, enter the initial state."""
        jaxpr = inlined(jax.make_jaxpr(self.init)(params)).jaxpr
        equations = backward_slice(jaxpr.eqns, jaxpr.outvars)
        sides = (*(eqn.invars for eqn in equations), jaxpr.outvars)
        read = variables(v for side in sides for v in side)
        return frozenset(i for i, v in enumerate(jaxpr.invars) if v in read)

    def update(
        self, grads: PyTree, state: PyTree, params: PyTree, *, value: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """The changes of the parameters, and the next state.

        Args:
            grads: The gradient of the global batch.
            state: A result of `init` or `update`.
            value: float32 scalar, the loss.

        Raises:
            ConfigError: If the optimizer evaluates the loss itself.
        """
        transformation = self._transformation
        like = jax.eval_shape(transformation.init, params)
        extra = {"value": value, "grad": grads, "value_fn": _no_value_fn}
        takes = inspect.signature(transformation.update).parameters.values()
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in takes):
            names = {parameter.name for parameter in takes}
            extra = {name: x for name, x in extra.items() if name in names}
        updates, state = transformation.update(grads, from_plain(state, like), params, **extra)
        return updates, as_plain(state)

    def traced(self, params: PyTree) -> tuple[ClosedJaxpr, Any]:
        """An update of gradients, state, parameters and loss, traced once, and its results' shapes.

        Args:
            params: Arrays or shapes.
        """

        def trace(shapes: PyTree) -> tuple[ClosedJaxpr, Any]:
            def update(grads: PyTree, state: PyTree, params: PyTree, value: jax.Array) -> Any:
                return self.update(grads, state, params, value=value)

            given = shapes, self.state_shapes(shapes), shapes, jax.ShapeDtypeStruct((), "float32")
            return jax.make_jaxpr(update, return_shape=True)(*given)

        return self._once("update", trace, params)  # type: ignore[no-any-return]

    def state_shapes(self, params: PyTree) -> PyTree:
        """Shapes of the state, traced once.

        Args:
            params: Arrays or shapes.
        """
        return self._once("state", lambda shapes: jax.eval_shape(self.init, shapes), params)

    def _once(self, name: str, trace: Callable[[PyTree], Any], params: PyTree) -> Any:
        """What is traced of the shapes of parameters, the first time or now."""
        leaves, tree = jax.tree.flatten(jax.eval_shape(lambda tree: tree, params))
        key = name, tree, tuple((x.shape, x.dtype) for x in leaves)
        if key not in self._traced:
            self._traced[key] = trace(jax.tree.unflatten(tree, leaves))
        return self._traced[key]

    def digests(self, params: PyTree) -> dict[str, str]:
        """Digests of the initial state and of an update, with numbers such as a learning rate."""
        shapes = jax.eval_shape(lambda tree: tree, params)
        return {
            "start": program_digest(jax.make_jaxpr(self.init)(shapes)),
            "update": program_digest(self.traced(params)[0]),
        }

    def restored(self, state: PyTree, params: PyTree) -> PyTree:
        """The state with random keys, as optax makes it."""
        return from_plain(state, jax.eval_shape(self._transformation.init, params))

    def check(self, params: PyTree) -> None:
        """Trace an update.

        Args:
            params: The parameters or their shapes.

        Raises:
            ConfigError: If the optimizer needs an argument that updates lack, or its state changes
                shape.
        """
        state = self.state_shapes(params)
        try:
            _, (_, after) = self.traced(params)
        except HxlaError:
            raise
        except Exception as error:  # whatever the user's transformation raises
            raise ConfigError(
                f"the optimizer cannot update these parameters: {type(error).__name__}: {error}\n"
                f"{_PASSED}; a transformation that needs more (value_fn, obj_fn, grad_fn, a "
                "Hessian) has to be replaced by one that does not"
            ) from error
        _check_state(state, after)


def _check_state(before: PyTree, after: PyTree) -> None:
    structures = [str(jax.tree.structure(state)) for state in (before, after)]
    if structures[0] != structures[1]:
        raise ConfigError(
            "an update changes the structure of the optimizer's state: before\n"
            f"  {structures[0]}\nafter\n  {structures[1]}"
        )
    pairs = zip(leaf_names(before), jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    changed = [
        f"  {name}: {a.dtype}{list(a.shape)} before, {b.dtype}{list(b.shape)} after"
        for name, a, b in pairs
        if (a.shape, a.dtype) != (b.shape, b.dtype)
    ]
    if changed:
        raise ConfigError(
            "an update changes shapes or dtypes of the optimizer's state:\n"
            + "\n".join(changed)
            + "\ninitialise the state with the dtypes that updates give it"
        )


def _no_value_fn(*_: Any, **__: Any) -> Any:
    raise ConfigError(
        "the optimizer calls `value_fn`: a line search evaluates the loss of the whole global "
        f"batch several times in one update, and an update has no examples ({_PASSED}). Use "
        "optax.lbfgs(learning_rate, linesearch=None), or an optimizer without a line search"
    )
