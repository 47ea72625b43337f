"""The order of samples: a keyed permutation, equal on all platforms and versions."""

import numpy as np

_ROUNDS = 8
_MASK = np.uint64(0xFFFFFFFF)


def _mix(x: np.ndarray, key: int) -> np.ndarray:
    """A 32-bit finaliser of good avalanche (murmur3's constants) over `x ^ key`."""
    x = (x ^ np.uint64(key)) & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(factor)) & _MASK
    return x ^ (x >> np.uint64(16))


def permute(index: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """The example at each position of an epoch.

    A Feistel network over the next even power of two, walked until it is inside the range: a
    bijection of `range(size)` in constant memory, independent of any library's random stream.

    Args:
        index: Positions, integers in [0, size).
        size: Number of examples, up to 2**62.

    Returns:
        int64 array of the shape of `index`.

    References:
        Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 3.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    keys = _round_keys(seed, epoch)
    out = np.asarray(index).astype(np.uint64)
    todo = np.ones(out.shape, bool)
    while todo.any():
        left, right = out[todo] >> np.uint64(half), out[todo] & low
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & low)
        out[todo] = (left << np.uint64(half)) | right
        todo = out >= size
    return out.astype(np.int64)


def shuffled(index: np.ndarray, size: int, per_file: int, *, seed: int, epoch: int) -> np.ndarray:
    """`permute` that keeps the examples of a file together.

    Args:
        index: Positions, integers in [0, size).
        per_file: Examples of a file; the last file may have fewer.

    Returns:
        int64 array of the shape of `index`: files in shuffled order, with their examples shuffled
        inside each.
    """
    if per_file == 1:
        return permute(index, size, seed=seed, epoch=epoch)
    num_files, rest = divmod(size, per_file)
    # A shorter last file stays last, so that all others begin at multiples of their size.
    position, within = np.divmod(np.asarray(index, np.int64), per_file)
    whole = position < num_files
    file = position.copy()
    file[whole] = permute(position[whole], num_files, seed=seed, epoch=epoch)
    out = np.empty_like(position)
    for number in np.unique(file):
        mask = file == number
        length = per_file if number < num_files else rest
        out[mask] = number * per_file + permute(
            within[mask], length, seed=seed + int(number) + 1, epoch=epoch
        )
    return out


def _round_keys(seed: int, epoch: int) -> list[int]:
    state = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, epoch & 0xFFFFFFFF], np.uint64)
    value = np.zeros(1, np.uint64)
    for word in state:
        value = _mix(value * np.uint64(31) + word, 0x9E3779B9)
    keys = []
    for round_number in range(_ROUNDS):
        value = _mix(value + np.uint64(round_number), 0x7F4A7C15)
        keys.append(int(value[0]))
    return keys
