"""The exception tree.

HxlaError
├── ConfigError       a configuration key or value, or an argument of hxla.Job or hxla.train
├── AnnotationError   replicate, split, or a sharding rule
├── MeshError         a mesh file, a cluster, or the devices that are here
├── DataError         the user's data
├── LossError         the user's loss, or its result
├── PlanError         no plan fits, or a plan is for another job
├── NonFiniteError    a gradient was not finite and `nonfinite="stop"`
├── CheckpointError   a checkpoint folder, or a checkpoint of another run
├── WeightsError      a file of weights, or names in it that do not match the model
├── ScheduleError     jobs and devices of a scheduler, or a trace of them
├── LaunchError       starting, joining or throttling processes, or processes that disagree
└── InspectError      the program or dump to inspect

`hxla.Preempted` is no error but a `SystemExit`: SIGTERM came, and the script should end.
"""


class HxlaError(Exception):
    """Base of every error that hxla raises on purpose."""


class ConfigError(HxlaError):
    """A configuration key or value, or an argument of `hxla.Job` or `hxla.train`, is wrong."""


class AnnotationError(HxlaError):
    """A use of `replicate` or `split`, or a sharding rule, cannot be applied."""


class MeshError(HxlaError):
    """A mesh file, a cluster, or the devices that are here cannot be used."""


class DataError(HxlaError):
    """The user's data cannot be used as asked."""


class LossError(HxlaError):
    """The user's loss returned something that has no mean over the global batch."""


class PlanError(HxlaError):
    """No plan fits the devices, or a plan is for another job or cannot be run."""


class NothingFitsError(PlanError):
    """No plan fits the devices' memory; finer ones may."""


class NonFiniteError(HxlaError):
    """A gradient was not finite and the user asked to stop."""


class CheckpointError(HxlaError):
    """A checkpoint folder cannot be used, or holds a checkpoint of another run or model."""


class WeightsError(HxlaError):
    """A file of weights is damaged, cannot be written, or does not match the model."""


class ScheduleError(HxlaError):
    """Jobs or devices of a scheduler, or a trace of them, cannot be used."""


class LaunchError(HxlaError):
    """Processes could not be started, joined or throttled, or do not agree."""


class InspectError(HxlaError):
    """The argument of `inspect` is no compiled program and no dump."""
