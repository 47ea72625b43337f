"""What a Ray cluster says of its nodes."""

from collections.abc import Mapping
from typing import Any

from .._cluster._cluster import Device

#: Label of a node: what of a core each of its CPU devices may use.
CORE_SHARE = "core-share"
_MODEL = "accelerator_type:"  # of a resource that Ray gives nodes with GPUs it knows


def name_of(node: str) -> str:
    """What a run calls a node, of its ID."""
    return f"node {node[:8]}"


def devices_of(node: Mapping[str, Any]) -> dict[str, float]:
    """What an actor or a placement group asks for that is to have all devices of a node.

    Args:
        node: Of `ray.nodes()`.
    """
    return {kind: num for kind in ("CPU", "GPU") if (num := node["Resources"].get(kind))}


def label_of(node: Mapping[str, Any]) -> tuple[str, int]:
    """The kind of a node's devices, as `Device.label` has it, and how many it has.

    Args:
        node: Of `ray.nodes()`.
    """
    resources = node["Resources"]
    if resources.get("GPU"):
        models = [key.partition(":")[2] for key in resources if key.startswith(_MODEL)]
        return (models or ["GPU"])[0], int(resources["GPU"])
    share = node.get("Labels", {}).get(CORE_SHARE)
    device = Device(kind="cpu", core_share=float(share) if share else None)
    return device.label, int(resources.get("CPU", 0))


def draining() -> dict[str, int]:
    """Nodes that Ray drains, and until when in milliseconds since 1970; 0: it did not say.

    No public call tells; this is the one that Ray's own trainer asks.
    """
    from ray._private.state import state

    return dict(state.get_draining_nodes())
