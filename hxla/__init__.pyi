# The public names, in the order of the data's way, and where each of them is.

from ._model._annotations import replicate as replicate, split as split, stage as stage
from ._model._annotations import Strategy as Strategy
from ._model._loss import metric as metric, Metric as Metric
from ._model._over_batch import over_batch as over_batch
from ._model._called_loss import Loss as Loss
from ._core._types import PyTree as PyTree
from ._core._config import Config as Config, AutoConfig as AutoConfig
from ._core._config import ClusterConfig as ClusterConfig, PipelineConfig as PipelineConfig
from ._core._config import CommunicationConfig as CommunicationConfig
from ._core._config import (
    OptimizerConfig as OptimizerConfig,
    MemoryConfig as MemoryConfig,
    OffloadConfig as OffloadConfig,
    PrecisionConfig as PrecisionConfig,
    PrecisionExceptionConfig as PrecisionExceptionConfig,
    Dtype as Dtype,
    BalanceConfig as BalanceConfig,
)
from ._core._config import WatchdogConfig as WatchdogConfig, CheckpointConfig as CheckpointConfig
from ._core._config import DataConfig as DataConfig, IoConfig as IoConfig
from ._weights._weights import Weights as Weights
from ._weights._name_map import load_names as load_names
from ._weights._name_map import NameMap as NameMap, TensorName as TensorName
from ._weights._save_weights import load_weights as load_weights, save_weights as save_weights
from ._run._train import train as train, Callback as Callback
from ._run._job import Job as Job
from ._run._counts_of_plan import Counts as Counts
from ._graph._trace import trace as trace
from ._graph._graph import Graph as Graph
from ._graph._task_graphs import TaskGraph as TaskGraph
from ._graph._operations import Op as Op, Value as Value
from ._model._loss import MetricColumns as MetricColumns
from ._graph._factors import PATTERNS as PATTERNS, Patterns as Patterns
from ._graph._factors import Pattern as Pattern, Factor as Factor
from ._cluster._mesh_file import load_cluster as load_cluster
from ._cluster._cluster import Cluster as Cluster, Node as Node, Device as Device
from ._cluster._cluster import Rate as Rate, Speed as Speed, Link as Link
from ._cluster._cluster import NetworkCard as NetworkCard
from ._plan._rules import load_rules as load_rules
from ._plan._rules import RuleSet as RuleSet, Rule as Rule, Resolved as Resolved
from ._profile._profile_file import load_profile as load_profile
from ._profile._profile import Profile as Profile, Setting as Setting
from ._profile._products import MatrixProduct as MatrixProduct
from ._profile._profile import LayerSize as LayerSize, LayerTime as LayerTime
from ._profile._profile import SplitTime as SplitTime
from ._planner._graph_plan import make_plan as make_plan
from ._plan._plan import Plan as Plan
from ._plan._plan_parts import Versions as Versions, PlannedDevice as PlannedDevice
from ._plan._plan_parts import Axis as Axis, Role as Role, ReplicaWork as ReplicaWork
from ._plan._plan_parts import PlannedPipeline as PlannedPipeline
from ._plan._plan_parts import PlannedSegment as PlannedSegment
from ._plan._plan_parts import PlannedChain as PlannedChain
from ._plan._plan_parts import ChainSegment as ChainSegment
from ._plan._layout import Layout as Layout
from ._plan._plan_parts import SumsForm as SumsForm, SparseRows as SparseRows
from ._plan._precision import Precision as Precision
from ._plan._precision import PrecisionException as PrecisionException, LossScale as LossScale
from ._plan._plan_parts import Placement as Placement
from ._plan._plan_parts import Prediction as Prediction, DevicePrediction as DevicePrediction
from ._plan._plan_parts import HeldBytes as HeldBytes
from ._plan._plan_parts import RunnerUp as RunnerUp
from ._lower._determinism import determinism as determinism
from ._lower._determinism import Determinism as Determinism
from ._schedule._schedules import make_schedule as make_schedule
from ._schedule._schedules import schedule_from_table as schedule_from_table
from ._schedule._schedules import Schedule as Schedule, Action as Action
from ._launch._join import join as join
from ._run._session import Session as Session
from ._lower._state import State as State
from ._model._loss_scale import ScaleState as ScaleState
from ._run._session_values import Result as Result
from ._core._fingerprint import fingerprint as fingerprint
from ._report._history import History as History, StepRecord as StepRecord
from ._report._history import (
    EvalRecord as EvalRecord,
    Rebalance as Rebalance,
    SplitWork as SplitWork,
)
from ._report._history import MetricValue as MetricValue
from ._inspect._inspect import inspect as inspect
from ._inspect._inspection import Inspection as Inspection
from ._inspect._program import Program as Program, ProgramArray as ProgramArray
from ._inspect._program import Collective as Collective, Loop as Loop, Origin as Origin
from ._inspect._program import Memory as Memory, Buffer as Buffer
from ._inspect._program import TaskGraphWork as TaskGraphWork, Fusion as Fusion
from ._inspect._program import Transfer as Transfer, Warned as Warned
from ._run._bits import record_bits as record_bits, inspect_bits as inspect_bits
from ._inspect._bits_record import BitsRecord as BitsRecord
from ._inspect._bits_record import RecordedEquation as RecordedEquation
from ._inspect._bits_record import RecordedRun as RecordedRun, RecordedRead as RecordedRead
from ._inspect._bits_compare import BitsComparison as BitsComparison
from ._inspect._bits_compare import BitsDifference as BitsDifference
from ._core._errors import HxlaError as HxlaError, AnnotationError as AnnotationError
from ._core._errors import CheckpointError as CheckpointError, ConfigError as ConfigError
from ._core._errors import DataError as DataError, InspectError as InspectError
from ._core._errors import LaunchError as LaunchError, LossError as LossError
from ._core._errors import MeshError as MeshError, NonFiniteError as NonFiniteError
from ._core._errors import PlanError as PlanError, ScheduleError as ScheduleError
from ._core._errors import WeightsError as WeightsError
from ._run._signals import Preempted as Preempted
