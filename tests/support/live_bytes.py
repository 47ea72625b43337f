"""The bytes of arrays that are alive."""

import jax


def live_bytes(device):
    """Of all arrays on a device and in its host's memory; several may share a buffer."""
    found, seen = {"device": 0, "pinned_host": 0}, set()
    for x in jax.live_arrays():
        for shard in x.addressable_shards:
            place = shard.data.unsafe_buffer_pointer()
            if shard.device.id == device and place not in seen:
                seen.add(place)
                found[x.sharding.memory_kind] += shard.data.nbytes
    return found
