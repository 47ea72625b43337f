"""The fields of a plan that decide bits."""

from typing import Any


def deciding(plan: Any) -> dict[str, Any]:
    """What `Plan.numerics` is the fingerprint of.

    Args:
        plan: A plan.
    """
    found: dict[str, Any] = {
        "made_with": plan.made_with.model_dump(),
        "batch_size": plan.batch_size,
        "microbatch_size": plan.microbatch_size,
        "precision": plan.precision.model_dump(),
        "excess_precision": plan.sums.kind != "exact",
        "sums": plan.sums.model_dump(include={"kind", "limbs"}),
        "parameters": [[p.name, p.shape, p.dtype] for p in plan.parameters],
    }
    arithmetic = {device.rank: device.arithmetic for device in plan.devices}
    kinds = set(arithmetic.values())
    found["kinds"] = sorted(kinds)
    if len(kinds) > 1:  # which microbatch is computed where
        found["kinds"] = [
            [[arithmetic[rank] for rank in r.devices], r.num_microbatches] for r in plan.replicas
        ]
    if plan.axes:
        found["axes"] = [axis.model_dump(exclude={"shares"}) for axis in plan.axes]
        found["specs"] = [layout.spec for layout in plan.parameters]
    if plan.is_uneven:
        found["shares"] = [axis.shares for axis in plan.axes]
        found["sizes"] = [layout.sizes for layout in plan.parameters]
    if plan.pipeline is not None:
        segments = plan.pipeline.segments
        found["cut"] = [plan.pipeline.points, plan.pipeline.num_chunks, plan.pipeline.cut_by]
        each = [[s.first, s.keep] for s in segments]
        found["keep"] = each if len({s.keep for s in segments}) > 1 else segments[0].keep
        found["has_weight"] = plan.pipeline.has_weight
    if plan.chain is not None:  # whatever is recomputed, the programs are the same
        found["chain"] = plan.chain.points
    if plan.microbatches_per_call > 1:
        found["microbatches_per_call"] = plan.microbatches_per_call
    # Each that devices of a copy put together is compiled apart from what else the copy owns.
    is_whole = plan.placement.whole and not plan.axes
    decides = is_whole or len(kinds) > 1
    if plan.placement.zero and (decides or plan.axes or plan.sums.kind == "float"):
        # Sums over a whole tensor depend on the program around them.
        own = plan.granules if decides else ()
        tier = plan.placement.tier_of_whole if is_whole else ()
        found["zero"] = [plan.placement.whole, own, *tier]
        if plan.placement.shard_groups > 1 and (decides or plan.sums.kind == "float"):
            found["shard_groups"] = plan.placement.shard_groups
    if plan.sums.kind == "float":
        found["sums"] = [plan.sums.model_dump(), plan.counts, plan.placement.waves]
    return found
