"""What tests know of the insides of `hxla._src.choose`."""

from hxla._src.choose import apportionment as _counts
from hxla._src.choose import chain as _best_pipeline
from hxla._src.choose import chain as _chain_tables
from hxla._src.choose import homogeneous_replicas as _like_copies
from hxla._src.choose import memory_layout as _memory_layout
from hxla._src.choose import placement as _placed
from hxla._src.choose import placement as _shared_links
from hxla._src.choose import proposals as _propose
from hxla._src.choose import search as _search
from hxla._src.choose.apportionment import (
    SplitDevice,
    best_counts,
    best_size,
    best_sizes,
    bound_seconds,
    candidate_sizes,
    even_counts,
    finish_seconds,
)
from hxla._src.choose.chain import (
    UNBOUNDED,
    Chain,
    Group,
    ReplicaSort,
    Rings,
    Staging,
    step_seconds,
    tables,
    tail_seconds,
)
from hxla._src.choose.collective_costs import (
    ALGORITHMS,
    LinkSeconds,
    all_gather_seconds,
    favoured,
    ring_all_reduce_seconds,
    volume,
)
from hxla._src.choose.complete import complete
from hxla._src.choose.device_times import (
    Alternative,
    layer_times,
    places_of,
    product_flops,
    split_devices,
    split_time,
)
from hxla._src.choose.homogeneous_replicas import best_order
from hxla._src.choose.inner_split import better_shares
from hxla._src.choose.make_plan import workloads
from hxla._src.choose.memory import with_memory
from hxla._src.choose.memory_layout import Candidate, groups_of_nodes
from hxla._src.choose.memory_model import costs_of, step_memory, travel_of
from hxla._src.choose.memory_price import (
    GRANULES_OF_A_REPLICA,
    ChainBytes,
    ModelBytes,
    ReplicaDevice,
    StepMemory,
    Travel,
    price,
    upper_bound,
)
from hxla._src.choose.mesh_axes import Request, assign_devices, roles_of_mesh, split_over
from hxla._src.choose.microbatch_counts import pooled, with_executors
from hxla._src.choose.packing import fractional_packing
from hxla._src.choose.pipeline_request import PipelineRequest, least_maximum
from hxla._src.choose.placement import (
    NEXT,
    DevicePlacement,
    Way,
    busiest_card_seconds,
    copies_in,
    copy_seconds,
    placements,
    shared_step_seconds,
    traffic_of,
)
from hxla._src.choose.proposals import ChainWork, propose
from hxla._src.choose.recompute import (
    best_sequence,
    boundary_texts,
    keep_all,
    keep_texts,
    least_memory,
)
from hxla._src.choose.search import search
from hxla._src.choose.staging_cost import staging_cost
from hxla._src.choose.structures import pipelined, replicated
from hxla._src.choose.unlike_search import unlike_pipelines
from hxla._src.profile.profile import with_measured
