"""Models whose arrays NumPy makes: no program of random numbers is compiled for them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def filled_tree(shapes, seed=0):
    """Random numbers for arrays of these shapes; scales and variances positive."""
    rng = np.random.default_rng(seed)

    def array(path, x):
        numbers = rng.normal(size=x.shape).astype(x.dtype) * 0.3
        names = {str(getattr(key, "key", "")) for key in path}
        return jnp.asarray(1 + numbers**2 if names & {"scale", "var"} else numbers)

    return jax.tree_util.tree_map_with_path(array, shapes)


def filled(make, seed=0):
    """What `make` returns, with random numbers for its arrays."""
    graphdef, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, filled_tree(state, seed))
