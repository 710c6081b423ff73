"""What the refit of the logits is given: the original model's logits, and what the converted one has to match them."""

from functools import partial

import torch

from headfold.convert.checkpoint import Checkpoint
from headfold.convert.families import describe
from headfold.convert.logits import rotate
from headfold.convert.sampling import LogitSampler
from headfold.convert.streams import Streams
from headfold.convert.walk import StreamedModel
from headfold.convert.weights import AttentionWeights

FIRST = 3


@torch.no_grad()
def test_logits_are_those_of_the_original_stream_and_inputs_those_of_the_converted_one(llama, monkeypatch):
    """Also where not all windows are sampled, and those that are lie in several batches."""
    monkeypatch.setattr("headfold.convert.sampling._MAX_WINDOWS", 4)
    monkeypatch.setattr("headfold.convert.sampling._NUM_QUERIES", 20)
    monkeypatch.setattr("headfold.convert.streams._BATCH_TOKENS", 72)
    generator = torch.Generator().manual_seed(0)
    checkpoint = Checkpoint.open(llama)
    layers = describe(checkpoint)
    layer, weights = layers[0], AttentionWeights.read(checkpoint, layers[0])
    model = StreamedModel(checkpoint, layers)
    streams = Streams(model, torch.randint(3, 61, (7, 24), generator=generator))
    assert len(streams.batches) == 3
    sampler = LogitSampler(layer, weights, streams.windows, FIRST, seed=0)
    norm = checkpoint.read("model.layers.0.input_layernorm.weight")

    def read(hidden: torch.Tensor) -> torch.Tensor:
        return norm * hidden * (hidden.square().mean(-1, keepdim=True) + checkpoint.config["rms_norm_eps"]).rsqrt()

    with streams.embedded(2) as (original, converted), model.block(0):
        converted += 0.3 * torch.randn(converted.shape, generator=generator)
        streams.watch(layer, converted, sampler.add_inputs)
        for batch in streams.batches:
            model.run(0, streams.load(original, batch), partial(sampler.add_logits, batch=batch))
        sampled = [0, 1, 3, 5]  # 4 of 7, evenly
        read_by_original, read_by_converted = read(original[sampled]), read(converted[sampled])

    groups = [[head] for head in range(layer.num_key_value_heads)]
    sample = sampler.sample(groups)
    assert torch.allclose(sample.inputs, read_by_converted, atol=1e-5)
    assert sample.positions.shape == (4, 5) and sample.positions.min() >= FIRST
    assert all(len(set(row)) == 5 for row in sample.positions.tolist())
    assert sample.scaling == layer.head_dim**-0.5
    keys = rotate(read_by_original[:, None] @ weights.k.mT, sample.rotation, layer.rotary)
    queries = rotate(read_by_original[:, None] @ weights.q.mT, sample.rotation, layer.rotary)
    products = queries @ keys.repeat_interleave(layer.group_size, 1).mT
    for window, at in enumerate(sample.positions):
        seen = torch.arange(24) <= at[:, None]
        expected = products[window][:, at].masked_fill(~seen, -torch.inf)
        assert torch.allclose(sample.products[window], expected, atol=1e-4)
