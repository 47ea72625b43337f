"""Train a Flax model on whatever accelerators you have, bit for bit the same."""

from ._cluster import Cluster as Cluster
from ._cluster import Device as Device
from ._cluster import load_cluster as load_cluster
from ._config import Config as Config
from ._errors import CheckpointError as CheckpointError
from ._errors import ConfigError as ConfigError
from ._errors import DataError as DataError
from ._errors import HxlaError as HxlaError
from ._errors import LaunchError as LaunchError
from ._errors import LossError as LossError
from ._errors import MeshError as MeshError
from ._errors import NonFiniteError as NonFiniteError
from ._errors import PlanError as PlanError
from ._history import EvalRecord as EvalRecord
from ._history import History as History
from ._history import Rebalance as Rebalance
from ._history import StepRecord as StepRecord
from ._launch.join import init as init
from ._plan import Plan as Plan
from ._train._loop import Result as Result
from ._train._loop import TrainState as TrainState
from ._train._loop import fingerprint as fingerprint
from ._train._loop import train as train
