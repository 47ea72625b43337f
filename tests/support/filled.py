"""Models whose arrays NumPy makes: no program of random numbers is compiled for them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def filled(make, seed=0):
    """What `make` returns, with random numbers for its arrays; scales and variances positive."""
    rng = np.random.default_rng(seed)

    def array(path, x):
        numbers = rng.normal(size=x.shape).astype(x.dtype) * 0.3
        names = {str(getattr(key, "key", "")) for key in path}
        return jnp.asarray(1 + numbers**2 if names & {"scale", "var"} else numbers)

    graphdef, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(array, state))
