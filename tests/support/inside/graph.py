"""What tests know of the insides of `hxla._src.graph`."""

from hxla._src.graph.casts import PrecisionCalls
from hxla._src.graph.factors import fits
from hxla._src.graph.graph import bytes_of, equation_flops, leaves
from hxla._src.graph.interpreter import AS_THEY_ARE
from hxla._src.graph.parts import graph_at, graph_of, parts_of
from hxla._src.graph.precision import BACKWARD, FORWARD, class_of, float8_product, quantized
from hxla._src.graph.segments import (
    chain_ops,
    crossing_bytes,
    cut_points,
    in_task_order,
    layer_points,
    low_params,
    run_segment,
    segments,
    segments_at,
    task_points,
)
from hxla._src.graph.trace import loss_digest, trace_functional, trace_sums
