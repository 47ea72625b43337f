"""What tests know of the insides of `hxla._planner`."""

from hxla._planner import (
    _best_pipeline,
    _bound,
    _branch,
    _chain_tables,
    _counts,
    _like_copies,
    _packing,
    _placed,
    _propose,
    _search,
    _shared_links,
)
from hxla._planner._axes import roles_of_mesh, split_over
from hxla._planner._bound import Bound
from hxla._planner._chain import UNBOUNDED, Chain, Group, ReplicaSort, Rings, Staging
from hxla._planner._chain_tables import step_seconds, tables, tail_seconds
from hxla._planner._chain_texts import boundary_texts, keep_texts
from hxla._planner._collective_costs import ALGORITHMS, favoured, volume
from hxla._planner._complete import complete
from hxla._planner._cost import LinkSeconds, all_gather_seconds, ring_all_reduce_seconds
from hxla._planner._counts import best_counts, bound_seconds, even_counts, finish_seconds
from hxla._planner._estimate import Alternative, layer_times, product_flops
from hxla._planner._kind_orders import best_order
from hxla._planner._memory_forms import GRANULES_OF_A_COPY, MemoryForms
from hxla._planner._memory_values import ChainBytes, CopyDevice, ModelBytes, Travel
from hxla._planner._microbatch_sizes import best_size, candidate_sizes
from hxla._planner._pipeline_request import PipelineRequest
from hxla._planner._placed import Placer
from hxla._planner._propose import ChainWork, propose
from hxla._planner._recompute import best_sequence, keep_all, least_memory
from hxla._planner._search import search
from hxla._planner._shard_groups import groups_of_nodes, travel_of
from hxla._planner._shared_links import (
    NEXT,
    Way,
    busiest_card_seconds,
    copies_in,
    copy_seconds,
    placements,
    shared_step_seconds,
    traffic_of,
)
from hxla._planner._split_advice import better_shares
from hxla._planner._split_seconds import split_time
from hxla._planner._split_sizes import SplitDevice, best_sizes
from hxla._planner._split_times import places_of, split_devices
from hxla._planner._staging import staging_cost
from hxla._planner._structures import pipelined, replicated
