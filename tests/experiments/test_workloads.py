"""Workloads: the published figures of their distributions, durations by operations, and the pairs that do not exist."""

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from experiments.sample_lengths import (
    PATCHES_PER_TOKEN,
    SFT_SETS,
    Sample,
    interleaved_samples,
    sft_samples,
)
from experiments.simulate import main
from experiments.workload_options import on_graph
from experiments.workloads import ROW_TOKENS, WORKLOADS, Work, Workload, cut_layers, mean_work
from rrfp_jax.commands.studies import GraphOptions
from rrfp_jax.models.presets import MODEL_PAIRS, MODELS, model_pair
from rrfp_jax.schedules import bits
from tests.commands.running import run_command, sentence

PAIR = model_pair("qwen3-4b+vit-big")
SINGLE = Workload(name="sft-single", pair=PAIR, num_steps=4, num_microbatches=8)


def drawn(source, count=20_000):
    return list(islice(source(np.random.default_rng(0)), count))


def cv(values):
    return np.std(values) / np.mean(values)


def test_instruction_data_has_the_published_lengths():
    samples = drawn(sft_samples)
    tokens = np.array([sample.tokens for sample in samples])
    tiles = np.array([len(sample.images) for sample in samples])
    assert tokens.mean() == pytest.approx(1135, rel=0.02)
    assert tokens.std() == pytest.approx(364, rel=0.05)
    np.testing.assert_allclose(np.percentile(tokens, [5, 50, 95, 99]), [310, 1323, 1575, 1895], rtol=0.03)
    assert tokens.max() <= 2538
    np.testing.assert_allclose([(tiles == k).mean() for k in (1, 3, 4, 5)], [0.09, 0.34, 0.01, 0.56], atol=0.015)
    assert np.corrcoef(tiles, tokens)[0, 1] == pytest.approx(0.95, abs=0.01)
    assert sum(one.num_samples for one in SFT_SETS.values()) == 70_706


def test_documents_have_the_published_images_and_text():
    samples = drawn(interleaved_samples)
    images = np.array([len(sample.images) for sample in samples])
    text = np.array([sample.text_tokens for sample in samples])
    assert images.mean() == pytest.approx(2.5, rel=0.03)
    assert images.max() <= 30
    assert (images == 0).mean() == pytest.approx(0.06, abs=0.006)
    assert (np.median(text), text.mean()) == pytest.approx((677, 815), rel=0.03)
    features = np.array([patches // 4 for sample in samples for patches in sample.images])
    # of 256 x 256 pixels or less, of 1,024 x 1,024 or more: between the shares of both sides and of the larger one
    assert 0.35 <= (features <= 84).mean() <= 0.49
    assert 0.023 <= (features >= 1337).mean() <= 0.063


def test_the_same_seed_draws_the_same_samples_balanced_or_not():
    plain = replace(SINGLE, is_balanced=False)
    for one, other in zip(SINGLE.steps(), plain.steps(), strict=True):
        assert sorted(sample for m in one for sample in m) == sorted(sample for m in other for sample in m)
    assert SINGLE.steps() == replace(SINGLE).steps() != replace(SINGLE, seed=1).steps()


def test_balancing_makes_the_dearest_microbatch_cheaper():
    spread = on_graph(SINGLE, GraphOptions(), num_stages=4)[0].spread
    plain = on_graph(replace(SINGLE, is_balanced=False), GraphOptions(), num_stages=4)[0].spread
    assert spread.dearest_over_mean - 1 < (plain.dearest_over_mean - 1) / 2
    assert spread.decoder_cv < plain.decoder_cv / 2


def test_packed_samples_have_room_and_fill_their_rows():
    for is_balanced in (True, False):
        workload = Workload(name="sft-packed", pair=PAIR, num_steps=6, num_microbatches=8, is_balanced=is_balanced)
        tokens = [sum(sample.tokens for sample in m) for step in workload.steps() for m in step]
        assert max(tokens) <= ROW_TOKENS
        assert np.mean(tokens) > 0.9 * ROW_TOKENS
        spread = on_graph(workload, GraphOptions(), num_stages=4)[0].spread
        assert spread.encoder_cv < 0.15
        assert spread.decoder_cv < 0.15


def test_a_task_takes_as_long_as_its_operations():
    steps, (one, model) = SINGLE.steps(), on_graph(SINGLE, GraphOptions(encoders=(2,)), num_stages=4)
    durations_ms, cut = one.durations.durations_ms, one.cut
    assert durations_ms.shape == (4, 4, 8, 3)
    assert durations_ms[:, 2:, :, 0].mean() == pytest.approx(10)
    work = Work.of(*steps[1][5])
    expected = PAIR.encoder.layer(work.patches, work.patch_pairs) * cut.encoder[1]
    decoder = PAIR.decoder.layer(work.tokens, work.token_pairs) * cut.decoder[1] + PAIR.decoder.head(work.tokens)
    scale = durations_ms[1, 3, 5, 0] / decoder.forward
    np.testing.assert_allclose(durations_ms[1, 1, 5], np.array(expected.tasks()) * scale)
    np.testing.assert_allclose(durations_ms[1, 3, 5], np.array(decoder.tasks()) * scale)
    assert (sum(cut.encoder), sum(cut.decoder)) == (48, 36)
    assert model.encoders == (range(2),)


def test_a_document_is_as_much_work_as_its_images_and_its_text():
    work = Work.of(Sample((1024, 256), 100), Sample((), 50))
    assert work == (1280, 1024**2 + 256**2, 320, 470, 420**2 + 50**2)


def test_what_never_changes_takes_no_weight_gradient():
    frozen = on_graph(SINGLE, GraphOptions(encoders=(1,), frozen_encoder=True), num_stages=4)[0]
    assert (frozen.durations.durations_ms[:, 0, :, 1:] == 0).all()
    assert (frozen.durations.durations_ms[:, 0, :, 0] > 0).all()
    decoder = on_graph(SINGLE, GraphOptions(encoders=(1,), frozen_chunks=(2,)), num_stages=4)[0]
    assert (decoder.durations.durations_ms[:, 2, :, 2] == 0).all()
    assert (decoder.durations.durations_ms[:, 2, :, 1] > 0).all()


def test_text_has_no_tasks_in_the_encoder():
    workload = Workload(name="interleaved", pair=PAIR, num_steps=8, num_microbatches=16, samples=1)
    one, model = on_graph(workload, GraphOptions(encoders=(2,)), num_stages=6)
    steps = workload.steps()
    for step, pairs in enumerate(one.durations.absent):
        without = [m for m, samples in enumerate(steps[step]) if not samples[0].images]
        assert [(chunk, m) for chunk, mask in pairs for m in bits(mask)] == [(c, m) for c in (0, 1) for m in without]
        model.graph.skipping(pairs)
        assert (one.durations.durations_ms[step, :2][:, without] == 0).all()
    assert any(one.durations.absent)
    assert one.spread.without_images == pytest.approx(0.06, abs=0.04)


def test_models_are_cut_so_that_no_chunk_costs_much_more_than_others():
    for pair in map(model_pair, MODEL_PAIRS):
        workload = replace(SINGLE, pair=pair)
        one, model = on_graph(workload, GraphOptions(), num_stages=8)
        by_chunk = one.durations.durations_ms.sum(axis=-1).mean(axis=(0, 2))
        assert by_chunk.max() < 1.25 * by_chunk.mean()
        assert sum(one.cut.encoder) == pair.encoder.num_layers
        assert len(model.placement.stage_of_chunk) == 8


@pytest.mark.parametrize("name", MODEL_PAIRS)
def test_operations_follow_the_parameters_of_the_preset(name):
    """Two for each parameter and token, but for embeddings, norms and biases."""
    pair, preset = model_pair(name), MODELS[name]
    table = preset.decoder.vocab_size * preset.decoder.hidden
    others = preset.decoder.num_params() - (1 if preset.decoder.tie_embeddings else 2) * table
    assert pair.decoder.whole(1, 0).with_parameters == pytest.approx(2 * (others + table), rel=1e-3)
    assert pair.encoder.whole(1, 0).with_parameters == pytest.approx(2 * preset.vision.num_params(), rel=2e-3)
    projector = preset.projector.num_params(preset.vision.hidden, preset.decoder.hidden)
    assert pair.projector.whole(1).with_parameters == pytest.approx(2 * projector, rel=5e-3)
    assert preset.projector.patches_per_feature == PATCHES_PER_TOKEN


def test_too_few_layers_are_refused():
    with pytest.raises(ValueError, match="the encoder has 48 layers, which do not make 49 chunks"):
        cut_layers(SINGLE, mean_work(SINGLE.steps()), 49, 1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_simulate_runs_a_workload_and_says_how_microbatches_differ(name, capsys):
    words = ["--num-stages", "4", "--num-microbatches", "8", "--workload", name, "--steps", "3", "--window", "4"]
    assert main([*words, "--compare", "1f1b:strict,zb-h1,bf", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["compare"]) == {"1f1b:strict", "zb-h1", "bf"}
    assert result["compare"]["1f1b:strict"]["makespan_ms_mean"] > result["compare"]["zb-h1"]["makespan_ms_mean"]
    assert result["workload"]["name"] == name
    assert 0 < result["workload"]["decoder_cv"] < 1


@pytest.mark.parametrize(("flags", "layers"), [((), [24, 24]), (("--frozen-encoder",), [48])])
def test_emulate_runs_a_workload_on_replicas(flags, layers):
    sizes = ("--num-stages", 3, "--num-microbatches", 8, "--data", 2, "--steps", 3)
    workload = ("--workload", "interleaved", "--samples", 1, "--mean-forward-ms", 0.5)
    result = run_command("emulate", *sizes, *workload, "--schedule", "1f1b", "--consume", "strict", "--json", *flags)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert len(figures["order"]) == 6
    assert figures["workload"]["encoder_layers"] == layers
    encoder_tasks = [task for row in (figures["order"][0], figures["order"][3]) for task in row]
    assert {task.strip("0123456789") for task in encoder_tasks} == ({"F"} if flags else {"F", "B"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "sft"), "there is no workload 'sft': the workloads are sft-single, sft-packed, interleaved"),
        (("--workload", "sft-single", "--model-pair", "qwen3-4b"), "did you mean 'qwen3-4b+vit-big'"),
        (("--workload", "sft-packed", "--samples", "2"), "leave samples out, or take sft-single"),
        (("--workload", "sft-single", "--samples", "0"), "samples is 0"),
        (("--workload", "sft-single", "--durations-ms", "1,1,1"), "leave --durations and --durations-ms out"),
        (
            ("--workload", "sft-single", "--encoders", "1,1"),
            "workloads have one encoder, of images, and the graph has 2",
        ),
        (("--workload", "sft-single", "--stage-of-chunk", "0,0,1,2,3"), "give --encoders too"),
        (("--workload", "sft-single", "--schedule", "zb-v"), "'zb-v' makes a chain of chunks and its own placement"),
        (("--workload", "sft-single", "--chunks-per-stage", "2"), "chunks-per-stage makes a looped chain"),
        (("--samples", "2"), "--samples is about a workload: give --workload, for example sft-single"),
        (("--workload", "sft-single", "--mean-forward-ms", "0"), "give a positive number of milliseconds"),
        (("--workload", "sft-single", "--balance", "yes"), "balance is 'yes': write on or off"),
    ],
)
@pytest.mark.one_in(4)
def test_what_means_nothing_is_refused_in_one_sentence(arguments, message):
    for command in ("simulate", "emulate"):
        words = ("--num-stages", 4, "--num-microbatches", 8, *arguments)
        assert message in sentence(run_command(command, *words))


@pytest.mark.parametrize(
    ("name", "num_stages", "num_microbatches", "num_steps", "most"),
    [
        ("interleaved", 4, 16, 6, 0.9),
        pytest.param("interleaved", 8, 24, 4, 0.88, marks=pytest.mark.slow),
        pytest.param("sft-single", 8, 24, 3, 0.98, marks=pytest.mark.slow),
    ],
)
def test_microbatches_in_the_best_order_take_less_time(capsys, name, num_stages, num_microbatches, num_steps, most):
    def figures(*options):
        sizes = [
            "--num-stages",
            str(num_stages),
            "--num-microbatches",
            str(num_microbatches),
            "--steps",
            str(num_steps),
        ]
        assert main([*sizes, "--workload", name, "--workload-seed", "21", "--window", "8", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    balanced, ordered = figures(), figures("--balance", "order")
    assert ordered["workload"]["is_ordered"]
    assert not balanced["workload"]["is_ordered"]
    assert ordered["makespan_ms_mean"] <= most * balanced["makespan_ms_mean"]
    assert max(ordered["peak_in_flight"]) <= 8
