"""Train a Flax model on whatever accelerators you have, bit for bit the same."""

from ._catalog import find as find, names as names
from ._cluster import Cluster as Cluster, Device as Device, load_cluster as load_cluster
from ._config import Config as Config
from ._errors import (
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DataError as DataError,
    HxlaError as HxlaError,
    LaunchError as LaunchError,
    LossError as LossError,
    MeshError as MeshError,
    NonFiniteError as NonFiniteError,
    PlanError as PlanError,
)
from ._history import (
    EvalRecord as EvalRecord,
    History as History,
    Rebalance as Rebalance,
    StepRecord as StepRecord,
)
from ._launch.join import init as init
from ._plan import Plan as Plan
from ._train._loop import (
    Result as Result,
    TrainState as TrainState,
    fingerprint as fingerprint,
    train as train,
)
