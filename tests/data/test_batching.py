"""Microbatches of samples: always in a bucket, balanced by cost, also over replicas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.data.batching import Batching, Limits
from rrfp_jax.data.buckets import cut_sizes
from rrfp_jax.data.config import ImageTextConfig
from rrfp_jax.data.dataset import contents_of
from rrfp_jax.data.packing import Grid, PatchFormat, Text, make_sample

LONGEST, LARGEST = 24, 8


def sample(length, images):
    """So many tokens of text after images of so many features."""
    grids = [Grid(2, 2 * num) for num in images]
    return make_sample([*grids, Text(b"x" * (length + 1), 1)], 2)


def drawn(seed, num=12):
    generator = np.random.default_rng(seed)
    return [
        sample(generator.integers(1, 12), generator.integers(1, 3, generator.integers(0, 4)).tolist())
        for _ in range(num)
    ]


def batching(survey=(), cost=None, cut=None, num_replicas=1, **changes):
    config = ImageTextConfig(path="unread", **({"batch_size": 12, "num_microbatches": 4} | changes))
    num, sharing = config.microbatch_size, {"cut": cut, "num_replicas": num_replicas}
    limits = Limits(LONGEST, num * LONGEST, LARGEST, num * 3, num * 3 * LARGEST, has_text_only=True)
    return Batching(config, PatchFormat(16, 2, is_packed=True), limits, survey, cost, **sharing)


def no_patches(number, image):
    raise AssertionError("nothing is read")


@settings(max_examples=30)
@given(
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.sampled_from(["gather", "balance", "in order"]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 12]),
)
def test_whatever_comes_is_in_a_bucket(seed, pack, order, buckets, num_microbatches):
    """Also where the survey has seen nothing but small samples."""
    survey = [[sample(1, [])] * 12, [sample(2, [1])] * 12]
    made = batching(
        survey,
        pack=pack,
        balance=order != "in order",
        gather_text=order == "gather",
        text_buckets=buckets,
        image_buckets=buckets,
        num_microbatches=num_microbatches,
    )
    largest = [sample(LONGEST - 6, [2, 2, 2])] * 12
    for samples in (drawn(seed), largest, [sample(LONGEST - 6, [])] * 6 + largest[:6]):
        batch = made.leaves(samples, no_patches, {})
        for number in range(num_microbatches):
            leaves = {name: leaf[number] for name, leaf in batch.items() if leaf[number] is not None}
            assert {name: leaf.shape for name, leaf in leaves.items()} in [
                {name: spec.shape for name, spec in bucket.items()} for bucket in made.buckets
            ]
        members = [each.members for each in made.divide(samples)]
        assert sorted(number for of_one in members for number in of_one) == list(range(12))
        assert all(members)
        assert pack or {len(of_one) for of_one in members} == {12 // num_microbatches}


@pytest.mark.parametrize("pack", [True, False])
def test_sizes_are_padded_up_to_what_meshes_divide(pack):
    """Samples share microbatches and rows as without meshes, in sizes of which each device has a part."""
    survey = [drawn(1), drawn(2)]
    cut = cut_sizes({"fsdp": 2, "expert": 2, "context": 5}, {"fsdp": 3, "context": 5})
    made, plain = (batching(survey, pack=pack, cut=each) for each in (cut, None))
    for shape in made.shapes:
        assert (shape.rows % 4, shape.length % 10) == (0, 0)
        assert (shape.image_rows % 12, shape.image_length % (5 * 4)) == (0, 0)
    for seed in range(5):
        assert made.divide(drawn(seed)) == plain.divide(drawn(seed))
        own, other = (each.leaves(drawn(seed), no_patches, {}) for each in (made, plain))
        for name in ("tokens", "segments", "weights"):
            for padded, unpadded in zip(own[name], other[name], strict=True):
                assert padded.sum() == unpadded.sum()


def test_features_stand_where_the_index_says():
    """The patches of each image come where ``image_index`` points, in the order of the sample."""
    samples = drawn(5)

    def patches(number, image):
        size = samples[number].images[image].num_patches
        return 100 * number + 10 * image + np.arange(size, dtype=np.float32)[:, None] / 100 + np.zeros(16, np.float32)

    made = batching([samples])
    batch = made.leaves(samples, patches, None)
    for number, microbatch in enumerate(made.divide(samples)):
        for member, row, offset in zip(
            microbatch.members, microbatch.places.rows, microbatch.places.offsets, strict=True
        ):
            own = samples[member]
            if not own.images:
                continue
            index = batch["image_index"][number][row, offset : offset + own.length]
            assert ((index >= 0) == (own.features >= 0)).all()
            flat = batch["patches"][number].reshape(-1, 4, 16)[index[index >= 0]].reshape(-1, 16)
            expected = np.concatenate([patches(member, image) for image in range(len(own.images))])
            assert np.array_equal(flat, expected)


def test_costs_decide_who_shares_a_microbatch():
    """Patches that cost much are spread evenly; free ones are not."""

    def spread_of_patches(patch_cost):
        made = batching([], cost=lambda tokens, patches: 1e-6 * tokens + 1e-6 + patch_cost * sum(patches))
        values = []
        for seed in range(20):
            samples = drawn(seed)
            sums = [sum(sum(samples[member].patches) for member in each.members) for each in made.divide(samples)]
            values.append(max(sums) / (sum(sums) / len(sums)))
        return np.mean(values)

    assert spread_of_patches(1.0) < 1.15
    assert spread_of_patches(0.0) > 1.3


@pytest.mark.parametrize("pack", [True, False])
def test_text_is_gathered_so_that_encoders_have_fewer_microbatches(pack):
    gathering, plain = (batching([], gather_text=gather, pack=pack) for gather in (True, False))

    def text_only(made, samples):
        return sum(not each.image_places.num_rows for each in made.divide(samples))

    half = [sample(24, [])] * 6 + [sample(2, [2, 2])] * 6
    assert text_only(gathering, half) == 2
    assert text_only(plain, half) < 2
    assert text_only(gathering, [sample(5, [])] * 12) == 4
    assert text_only(gathering, [sample(5, [1])] * 12) == 0
    assert text_only(gathering, [sample(5, [])] + [sample(5, [1])] * 11) == 0
    with pytest.raises(ValueError, match="gather_text divides samples by their costs: give balance true"):
        batching([], gather_text=True, balance=False)


def test_replicas_get_shares_of_the_same_cost():
    balanced, plain = (batching([], num_microbatches=12, num_replicas=2, balance=each) for each in (True, False))

    def excess(made):
        values = []
        for seed in range(20):
            samples = drawn(seed)
            costs = [
                sum(samples[m].length + sum(samples[m].patches) for m in each.members) for each in made.divide(samples)
            ]
            shares = np.reshape(costs, (2, -1)).sum(axis=1)
            values.append(shares.max() / shares.mean() - 1)
        return np.mean(values)

    assert excess(balanced) < 0.01
    assert excess(plain) > 0.05


@pytest.mark.parametrize(("pack", "num_replicas"), [(True, 1), (False, 2)])
def test_microbatches_of_each_replica_cost_least_at_both_ends(pack, num_replicas):
    """With padding within rows, the more the nearer to the middle; how many replicas there are changes no group."""
    made, alone = (batching(pack=pack, num_replicas=each, num_microbatches=6) for each in (num_replicas, 1))
    for seed in range(10):
        divided = made.divide(drawn(seed))
        assert sorted(each.members for each in divided) == sorted(each.members for each in alone.divide(drawn(seed)))
        lengths = [made.length * each.size[0] if pack else 2 * each.size[0] for each in divided]
        patches = [made.image_length * each.size[1] for each in divided]
        for costs in np.split(np.add(lengths, patches), num_replicas):
            top = costs.argmax()
            assert (np.diff(costs[: top + 1]) >= 0).all()
            assert (np.diff(costs[top:]) <= 0).all()


def test_contents_count_what_is_no_padding():
    samples = [sample(5, [1, 2]), sample(9, []), sample(3, []), sample(4, [2])]
    made = batching([samples], batch_size=4, num_microbatches=2, balance=False, length=24, image_length=8)
    batch = made.leaves(samples, no_patches, {})
    contents = contents_of(batch)
    assert (contents.images, contents.patches, contents.tokens) == (3, 20, sum(each.length for each in samples))
    shapes = [leaf.shape for leaf in batch["tokens"]]
    assert contents.token_padding == pytest.approx(1 - contents.tokens / sum(rows * length for rows, length in shapes))
    image_shapes = [leaf.shape for leaf in batch["patch_segments"]]
    assert contents.patch_padding == pytest.approx(1 - 20 / sum(rows * length for rows, length in image_shapes))
    assert contents.microbatches_without_images == 0
    text_only = contents_of(made.leaves([sample(5, [])] * 4, no_patches, {}))
    assert (text_only.microbatches_without_images, text_only.images, text_only.patch_padding) == (2, 0, 0)


def test_contents_of_plain_text():
    contents = contents_of({"tokens": np.zeros((4, 2, 8), np.int32), "weights": np.ones((4, 2, 8), np.float32)})
    assert (contents.tokens, contents.token_padding, contents.images) == (64, 0, 0)
    assert contents.microbatches_without_images == 4


def test_a_sample_must_not_end_in_an_image():
    with pytest.raises(ValueError, match="a sample ends in an image, which nothing is predicted from"):
        make_sample([Text(b"ab", 1), Grid(2, 2)], 2)
