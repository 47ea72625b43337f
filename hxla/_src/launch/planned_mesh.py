"""The mesh of a plan, for `hxla run --plan` without a mesh."""

import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence

from ..cluster.cluster import Device
from ..cluster.mesh_file import dump_cluster, load_cluster
from ..core.errors import LaunchError, MeshError
from ..core.files import names
from ..plan.plan import Plan


@contextlib.contextmanager
def planned_mesh(plan: Plan, file: str) -> Iterator[str | None]:
    """The name or the path of a plan's mesh; None if the plan has none.

    An unchanged mesh file is used itself, as messages name it. Otherwise the contents in the plan
    are written to a temporary file.

    Raises:
        LaunchError: If the contents in the plan are no mesh file.
    """
    if not plan.mesh:
        yield plan.mesh_file or plan.cluster or None
        return
    with tempfile.TemporaryDirectory(prefix="hxla-mesh-") as folder:
        path = pathlib.Path(folder) / "mesh.toml"
        path.write_text(plan.mesh)
        try:
            planned = _contents(str(path))
        except MeshError as error:
            words = str(error).replace("mesh file ", "").replace(str(path), "key 'mesh'")
            raise LaunchError(f"plan {file}: {words}") from None
        source = plan.mesh_file or plan.cluster
        is_known = os.path.exists(plan.mesh_file) or source in names("meshes")
        try:
            is_same = _contents(source) == planned
        except MeshError:  # the file is gone, or damaged
            is_same = False
        if is_known and not is_same:
            print(
                f"hxla: mesh {source} has changed since {file} was made, and the mesh in the plan "
                f"is used; hxla plan --mesh {source} plans for the new one",
                file=sys.stderr,
            )
        yield source if is_same else str(path)


def _contents(mesh: str) -> str:
    """A mesh file without its comments, with figures as plans have them."""
    return dump_cluster(load_cluster(mesh))


def check_mesh(plan: Plan, file: str, mesh: str, devices: Sequence[Device]) -> None:
    """Refuse a mesh that is not the one of a plan, before a process is started.

    Raises:
        LaunchError: With the first device that differs.
    """
    for device in plan.devices:
        kind = devices[device.rank].label if device.rank < len(devices) else "missing"
        if kind != device.kind:
            raise LaunchError(
                f"plan {file} is for another mesh: device {device.rank} is {device.kind} in the "
                f"plan and {kind} in {mesh}; leave out --mesh, or plan with hxla plan --mesh {mesh}"
            )
