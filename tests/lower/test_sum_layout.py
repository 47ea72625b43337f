"""The arrays of the sums are known before any program is."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hxla import SumsForm
from support.inside.lower import Contribution, SumLayout, Tensors
from support.inside.plan import Shares

SHAPES = (600, 1000), (7,), (7,), (300, 1000), (5,)
NAMES = "embed", "a", "b", "head", "mean"


def layout(**changes):
    """Four parameters and one other variable; the two of seven elements are one pack."""
    *params, mean = [jax.ShapeDtypeStruct(shape, np.float32) for shape in SHAPES]
    whole = SumLayout(
        tensors=Tensors(tuple(params), (mean,), NAMES, ("mean",)),
        specs=[P()] * len(SHAPES),
        contribution=Contribution.of(SumsForm(bucket_mib=3), num_terms=4),
        num_replicas=2,
        row_shape=(4, 2),
        packs=[[0], [1, 2], [3], [4]],
    )
    return dataclasses.replace(whole, **changes)


def test_packs_are_rows_and_buckets_take_consecutive_packs_up_to_their_size():
    whole = layout()
    assert whole.pack_shapes == [(600, 1000), (2, 7), (300, 1000), (5,)]
    assert whole.bucket_packs == [[0, 1], [2, 3]]
    assert whole.bucket_tensors == [[0, 1, 2], [3, 4]]
    assert whole.total_tensors == [[0], [1, 2], [3], [4]]
    assert whole.total_sizes(1, 0) == [300_005]


def test_devices_of_a_replica_have_shards_of_the_sums():
    cut = layout(specs=[P("model"), P(), P(), P(None, "model"), P()], axes={"model": 4})
    assert cut.pack_sizes == [150_000, 14, 75_000, 5]
    assert cut.total_specs == [P("model"), P(), P(None, "model"), P()]
    assert cut.bucket_packs == [[0, 1, 2, 3]]


def test_small_arrays_travel_with_the_first_bucket_only():
    scaled = layout(is_scaled=True)
    assert scaled.scale_shapes == [(5,), (5,), (1,)]
    assert scaled.small_shapes == [(2, 3), (4, 2)]
    assert [list(map(len, scaled.small_specs(k))) for k in range(2)] == [[3, 2], [0, 0]]


def test_a_sparse_tensor_has_its_own_bucket():
    sparse = layout(rows={3: 10})
    assert sparse.bucket_packs == [[0, 1], [2], [3]]
    assert [sparse.most_rows(k) for k in range(3)] == [None, 10, None]


def test_shares_cut_parameters_and_leave_other_variables_whole():
    shared = layout(shares=Shares((1, 2), (None,) * 4))
    assert [chunks.tensors for chunks in shared.chunks] == [(0, 1, 2), (3,)]
    assert shared.others(1) == [4]
    assert shared.total_sizes(1, 0) == [100_000, 5]
    assert shared.total_sizes(1, 1) == [200_000, 5]
    # A third replica begins the next group, with the shares of the first.
    assert shared.total_sizes(1, 2) == shared.total_sizes(1, 0)
    both = [shared.num_chunk_elements(replica) for replica in range(2)]
    assert both == [200_000 + 8 + 8 + 100_000, 400_000 + 16 + 16 + 200_000]


@pytest.mark.parametrize("owners", [(None,) * 4, (None, 1, 1, None)])
def test_groups_of_equal_shapes_and_owners_share_a_program(owners):
    groups = layout(
        packs=[[i] for i in range(5)],
        shares=Shares((1, 1), owners),
        groups=[[1], [2], [0], [3], [4]],
    )
    assert list(groups.at_once) == [0]
    assert groups.first_alike == [0, 1, 1, 3, 4, 5]


def test_groups_of_unlike_owners_have_two_programs():
    groups = layout(
        packs=[[i] for i in range(5)],
        shares=Shares((1, 1), (None, 0, 1, None)),
        groups=[[1], [2], [0], [3], [4]],
    )
    assert groups.first_alike == [0, 1, 2, 3, 4, 5]
