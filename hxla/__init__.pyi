# The public names, in the order of the data's way, and where each of them is.

__version__: str

from ._src.model.annotations import replicate as replicate, split as split, stage as stage
from ._src.model.annotations import Strategy as Strategy
from ._src.model.loss import metric as metric, Metric as Metric
from ._src.model.over_batch import over_batch as over_batch
from ._src.model.loss_call import Loss as Loss
from ._src.core.types import PyTree as PyTree
from ._src.core.config import Config as Config, AutoConfig as AutoConfig
from ._src.core.config import ClusterConfig as ClusterConfig, PipelineConfig as PipelineConfig
from ._src.core.config import CommunicationConfig as CommunicationConfig
from ._src.core.config import (
    OptimizerConfig as OptimizerConfig,
    MemoryConfig as MemoryConfig,
    OffloadConfig as OffloadConfig,
    PrecisionConfig as PrecisionConfig,
    PrecisionExceptionConfig as PrecisionExceptionConfig,
    Dtype as Dtype,
    NumericsConfig as NumericsConfig,
    IslandsConfig as IslandsConfig,
    BalanceConfig as BalanceConfig,
)
from ._src.core.config import WatchdogConfig as WatchdogConfig, CheckpointConfig as CheckpointConfig
from ._src.core.config import DataConfig as DataConfig, IoConfig as IoConfig
from ._src.weights.weights import Weights as Weights
from ._src.weights.name_map import load_names as load_names
from ._src.weights.name_map import NameMap as NameMap, TensorName as TensorName
from ._src.weights.weights import load_weights as load_weights, save_weights as save_weights
from ._src.session.train import train as train
from ._src.session.callbacks import Callback as Callback
from ._src.session.callbacks import keep_best as keep_best, stop_early as stop_early
from ._src.session.callbacks import log_to as log_to
from ._src.session.job import Job as Job
from ._src.choose.microbatch_counts import Counts as Counts
from ._src.graph.trace import trace as trace
from ._src.graph.graph import Graph as Graph
from ._src.graph.graph import TaskGraph as TaskGraph
from ._src.graph.graph import Op as Op, Value as Value
from ._src.model.loss import MetricColumns as MetricColumns
from ._src.graph.factors import PATTERNS as PATTERNS, Patterns as Patterns
from ._src.graph.factors import Pattern as Pattern, Factor as Factor
from ._src.cluster.mesh_file import load_cluster as load_cluster
from ._src.cluster.cluster import Cluster as Cluster, Node as Node, Device as Device
from ._src.cluster.cluster import Rate as Rate, Speed as Speed, Link as Link
from ._src.cluster.cluster import NetworkCard as NetworkCard
from ._src.plan.rules import load_rules as load_rules
from ._src.plan.rules import RuleSet as RuleSet, Rule as Rule, Resolved as Resolved
from ._src.profile.profile import load_profile as load_profile
from ._src.profile.profile import Profile as Profile, Setting as Setting
from ._src.profile.products import MatrixProduct as MatrixProduct
from ._src.profile.profile import LayerSize as LayerSize, LayerTime as LayerTime
from ._src.profile.profile import MeasuredLink as MeasuredLink, SplitTime as SplitTime
from ._src.choose.make_plan import make_plan as make_plan
from ._src.plan.plan import Plan as Plan
from ._src.plan.parts import Versions as Versions, PlannedDevice as PlannedDevice
from ._src.plan.parts import Axis as Axis, Role as Role, ReplicaWork as ReplicaWork
from ._src.plan.parts import PlannedPipeline as PlannedPipeline
from ._src.plan.parts import PlannedReplica as PlannedReplica
from ._src.plan.parts import PlannedStage as PlannedStage
from ._src.plan.parts import PlannedSegment as PlannedSegment
from ._src.plan.parts import PlannedChain as PlannedChain
from ._src.plan.parts import ChainSegment as ChainSegment
from ._src.plan.layout import Layout as Layout
from ._src.plan.parts import SumsForm as SumsForm, SparseRows as SparseRows
from ._src.plan.precision import Precision as Precision
from ._src.plan.precision import PrecisionException as PrecisionException, LossScale as LossScale
from ._src.plan.parts import Islands as Islands
from ._src.plan.parts import Placement as Placement
from ._src.plan.parts import Prediction as Prediction, DevicePrediction as DevicePrediction
from ._src.plan.parts import HeldBytes as HeldBytes
from ._src.plan.parts import RunnerUp as RunnerUp
from ._src.lower.determinism import determinism as determinism
from ._src.lower.determinism import Determinism as Determinism
from ._src.schedule.schedules import make_schedule as make_schedule
from ._src.schedule.schedules import schedule_from_table as schedule_from_table
from ._src.schedule.schedules import Schedule as Schedule, Action as Action
from ._src.launch.join import join as join
from ._src.session.session import Session as Session
from ._src.lower.initial_state import State as State
from ._src.model.loss_scale import ScaleState as ScaleState
from ._src.session.values import Result as Result
from ._src.jax.digest import fingerprint as fingerprint
from ._src.report.history import History as History, StepRecord as StepRecord
from ._src.report.history import (
    EvalRecord as EvalRecord,
    Rebalance as Rebalance,
    SplitWork as SplitWork,
)
from ._src.report.history import MetricValue as MetricValue
from ._src.inspect.inspect import inspect as inspect
from ._src.inspect.inspect import Inspection as Inspection
from ._src.inspect.program import Program as Program, ProgramArray as ProgramArray
from ._src.inspect.program import Collective as Collective, Loop as Loop, Origin as Origin
from ._src.inspect.program import Memory as Memory, Buffer as Buffer
from ._src.inspect.program import TaskGraphWork as TaskGraphWork, Fusion as Fusion
from ._src.inspect.program import Transfer as Transfer, Warned as Warned
from ._src.session.bits import record_bits as record_bits, inspect_bits as inspect_bits
from ._src.inspect.bits import BitsRecord as BitsRecord
from ._src.inspect.bits import RecordedEquation as RecordedEquation
from ._src.inspect.bits import RecordedRun as RecordedRun, RecordedRead as RecordedRead
from ._src.inspect.bits import BitsComparison as BitsComparison
from ._src.inspect.bits import BitsDifference as BitsDifference
from ._src.core.errors import HxlaError as HxlaError, AnnotationError as AnnotationError
from ._src.core.errors import CheckpointError as CheckpointError, ConfigError as ConfigError
from ._src.core.errors import DataError as DataError, InspectError as InspectError
from ._src.core.errors import LaunchError as LaunchError, LossError as LossError
from ._src.core.errors import MeshError as MeshError, NonFiniteError as NonFiniteError
from ._src.core.errors import PlanError as PlanError, ScheduleError as ScheduleError
from ._src.core.errors import WeightsError as WeightsError
from ._src.session.ending import Preempted as Preempted
