"""What tests know of the insides of `hxla._graph`."""

from hxla._graph._composed import Composer
from hxla._graph._factors import fits
from hxla._graph._float8 import BACKWARD, FORWARD, float8_product, quantized
from hxla._graph._flops import equation_flops
from hxla._graph._interpreter import AS_THEY_ARE
from hxla._graph._low_params import low_params
from hxla._graph._operations import bytes_of, leaves
from hxla._graph._parts import graph_at, graph_of, parts_of
from hxla._graph._precision_calls import PrecisionCalls
from hxla._graph._precision_classes import class_of
from hxla._graph._repeats import layer_points
from hxla._graph._segments import (
    chain_ops,
    crossing_bytes,
    cut_points,
    in_task_order,
    run_segment,
    segments,
    segments_at,
    task_points,
)
from hxla._graph._trace import loss_digest, trace_functional, trace_sums
