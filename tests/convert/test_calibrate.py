"""The pieces of a calibration walk: how blocks are wired, what is kept at each count, devices and long inputs."""

import pytest
import torch

from headfold.convert.calibrate import energy_kept, fold_layers
from headfold.convert.checkpoint import Checkpoint
from headfold.convert.dataflow import trace_block
from headfold.convert.errors import RefusedError
from headfold.convert.families import describe
from headfold.convert.streams import Streams
from headfold.convert.walk import StreamedModel


def windows(num_windows: int = 10, length: int = 40) -> torch.Tensor:
    return torch.randint(3, 61, (num_windows, length), generator=torch.Generator().manual_seed(5))


# family: (its config, scale of the attention, last layer of the MLP and its scale)
BLOCKS = {
    "llama": ({}, 1.0, ("mlp.down_proj", 1.0)),
    "granite": ({"residual_multiplier": 0.22}, 0.22, ("mlp.down_proj", 0.22)),
    "phi": ({"qk_layernorm": False}, 1.0, ("mlp.fc2", 1.0)),
    "cohere": ({"use_qk_norm": False}, 1.0, ("mlp.down_proj", 1.0)),
    "mixtral": ({}, 1.0, None),
    "gemma2": ({"query_pre_attn_scalar": 12}, None, None),
}


@pytest.mark.parametrize("family", BLOCKS)
def test_the_paths_of_sequential_parallel_scaled_and_normed_blocks(tiny, tmp_path, family):
    overrides, scale, down = BLOCKS[family]
    path = tiny.save(tiny.tiny_model(tiny.tiny_config(family, **overrides)), tmp_path / "model")
    checkpoint = Checkpoint.open(path)
    layers = describe(checkpoint)
    name = layers[0].o.weight.split("layers.0.")[1].removesuffix(".weight")
    with torch.no_grad():
        model = StreamedModel(checkpoint, layers)
        (hidden,) = model.embed([windows(1)])
        with model.block(0) as block:
            paths = trace_block(block, lambda x: model.run(0, x), hidden, name)
    assert (paths.output and paths.output.scale) == (scale and pytest.approx(scale, rel=1e-4))
    assert (paths.down and (paths.down.name, paths.down.scale)) == (
        down and (down[0], pytest.approx(down[1], rel=1e-4))
    )


def test_what_each_count_keeps_before_anything_is_written(llama):
    checkpoint = Checkpoint.open(llama)
    layers = describe(checkpoint)
    before = sorted(llama.iterdir())
    kept = energy_kept(checkpoint, layers, windows(), counts=[6, 3, 2, 1])
    assert {count: len(shares) for count, shares in kept.items()} == {6: 2, 3: 2, 2: 2, 1: 2}
    for layer in range(2):
        for kind in range(2):
            shares = [kept[count][layer][kind] for count in (6, 3, 2, 1)]
            assert shares[0] == pytest.approx(1, abs=1e-9)
            assert shares == sorted(shares, reverse=True) and 0 < shares[-1] < shares[-2] < 1
    # The first layer of a conversion reads the same stream, so it reports the same.
    layer, _, record = next(iter(fold_layers(checkpoint, layers, windows(), num_key_value_heads=2)))
    assert layer.index == 0
    assert record["key_energy_kept"] == pytest.approx(kept[2][0][0], rel=1e-6)
    assert record["value_energy_kept"] == pytest.approx(kept[2][0][1], rel=1e-6)
    assert sorted(llama.iterdir()) == before


def test_refits_bring_the_converted_stream_nearer_to_the_original(llama):
    checkpoint = Checkpoint.open(llama)
    down = "model.layers.{}.mlp.down_proj.weight"
    for layer, tensors, record in fold_layers(checkpoint, describe(checkpoint), windows(), num_key_value_heads=2):
        assert record["logit_error_refitted"] < record["logit_error_shared"]
        assert record["output_error_repaired"] < record["output_error_shared"]
        assert record["mlp_error_repaired"] < record["mlp_error_before"]
        assert not torch.equal(tensors[down.format(layer.index)], checkpoint.read(down.format(layer.index)))


def test_similar_groups_keep_at_least_what_neighbours_keep_in_pairs(llama):
    checkpoint = Checkpoint.open(llama)
    layers = describe(checkpoint)
    shares = {
        grouping: energy_kept(checkpoint, layers, windows(), counts=[3], grouping=grouping)[3]
        for grouping in ("adjacent", "similar")
    }
    for adjacent, similar in zip(shares["adjacent"], shares["similar"], strict=True):
        assert sum(similar) >= sum(adjacent) - 1e-9


def test_streams_on_disk_give_what_streams_in_memory_give(llama, monkeypatch):
    checkpoint = Checkpoint.open(llama)
    layers = describe(checkpoint)

    def folded():
        return [tensors for _, tensors, _ in fold_layers(checkpoint, layers, windows(), num_key_value_heads=2)]

    in_memory = folded()
    monkeypatch.setattr("headfold.convert.streams._MAX_MEMORY_BYTES", 0)
    for one, two in zip(in_memory, folded(), strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_several_batches_give_what_one_gives(llama, monkeypatch):
    checkpoint = Checkpoint.open(llama)
    layers = describe(checkpoint)
    whole = list(fold_layers(checkpoint, layers, windows(), num_key_value_heads=2))
    monkeypatch.setattr("headfold.convert.streams._BATCH_TOKENS", 120)
    assert len(Streams(StreamedModel(checkpoint, layers), windows()).batches) == 4
    parts = list(fold_layers(checkpoint, layers, windows(), num_key_value_heads=2))
    for (_, _, one), (_, _, two) in zip(whole, parts, strict=True):
        assert one == pytest.approx(two, rel=1e-3)


def test_windows_that_are_all_sink_positions_are_refused(llama):
    checkpoint = Checkpoint.open(llama)
    with pytest.raises(RefusedError, match="16 tokens are too short"):
        fold_layers(checkpoint, describe(checkpoint), windows(length=16), num_key_value_heads=2)
