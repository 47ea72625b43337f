"""Two trees have one fingerprint only if they agree to the last bit."""

import hashlib

import jax.numpy as jnp
import numpy as np
import pytest

import hxla

ONE = np.arange(6, dtype=np.float32)

OTHERS = {
    "a shape": ONE.reshape(2, 3),
    "a shape the other way": ONE.reshape(3, 2),
    "a dtype": ONE.view(np.int32),
    "a bit": np.nextafter(ONE, np.float32(9)),
    "a sign of zero": np.where(ONE == 0, np.float32(-0.0), ONE),
    "an order": ONE[::-1],
    "two leaves": [ONE[:3], ONE[3:]],
    "another leaf": [ONE, np.zeros(0, np.float32)],
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_in_anything_has_another_fingerprint(name):
    every = {hxla.fingerprint(ONE), *(hxla.fingerprint(other) for other in OTHERS.values())}
    assert len(every) == 1 + len(OTHERS)
    assert hxla.fingerprint(OTHERS[name]) != hxla.fingerprint(ONE)


def test_it_is_that_of_shapes_dtypes_and_bytes_wherever_arrays_lie():
    wanted = hashlib.sha256(b"float32(6,)" + ONE.tobytes()).hexdigest()
    assert hxla.fingerprint(ONE) == wanted
    assert hxla.fingerprint({"a": jnp.asarray(ONE)}) == wanted
    assert hxla.fingerprint(np.repeat(ONE, 2)[::2]) == wanted  # no contiguous array
