"""Names and constants that every part of hxla shares. Imports nothing of hxla."""

from typing import Any, TypeAlias

#: Nested dictionaries, lists and registered classes with arrays as leaves, as `jax.tree` takes.
PyTree: TypeAlias = Any

#: Mesh axis over which microbatches are spread.
DATA_AXIS = "data"

#: Mesh axis over groups of replicas, each with the whole state; `data` is inside a group.
SHARD_GROUP_AXIS = "shard_group"

#: Mesh axis over the devices that shard a replica.
TENSOR_AXIS = "tensor"

#: The mesh axis of experts.
EXPERT_AXIS = "expert"

#: Mesh axis over the devices that share the tokens of a replica's examples.
TOKEN_AXIS = "sequence"

#: Mesh axis over the stages of a pipeline.
STAGE_AXIS = "stage"

#: Mesh axis over all devices of a replica with unlike stages.
DEVICE_AXIS = "device"

#: Mesh axes that are not inside a stage.
OUTER_AXES = (STAGE_AXIS, DEVICE_AXIS)

#: Exit codes of a training process, documented in docs/how-to/launching.md.
EXIT_PREEMPTED = 75  # SIGTERM arrived, a checkpoint was written: run again to resume
EXIT_WATCHDOG = 76  # a process died or hung: the watchdog ended the job
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells have it: 128 and the number of SIGINT
