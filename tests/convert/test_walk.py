"""A model that runs block by block, from its checkpoint, gives what stock transformers gives."""

from __future__ import annotations

import pytest
import torch

from headfold.convert.checkpoint import Checkpoint
from headfold.convert.families import describe
from headfold.convert.families.declared import FAMILIES
from headfold.convert.walk import AttentionCall, Stop, StreamedModel

WITHOUT_FINAL_NORM = {"olmo"}  # its norms have no weights


def tokens() -> torch.Tensor:
    return torch.randint(3, 61, (3, 11), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_streams_to_the_hidden_states_of_stock_transformers(tiny, family, tmp_path):
    path = tiny.save(tiny.tiny_model(tiny.tiny_config(family)), tmp_path / "model")
    checkpoint = Checkpoint.open(path)
    layers = describe(checkpoint)
    calls: dict[int, AttentionCall] = {}
    with torch.no_grad():
        streamed = StreamedModel(checkpoint, layers)
        hidden = torch.cat(list(streamed.embed(tokens().split(2))))
        for number in range(len(streamed.blocks)):
            with streamed.block(number) as block:
                hidden = streamed.run(number, hidden, lambda call, number=number: calls.update({number: call}))
            assert all(parameter.is_meta or streamed.is_whole for parameter in block.parameters())
        stock = tiny.load(path)
        expected = stock(tokens(), output_hidden_states=True, use_cache=False)
        decoder = stock.get_decoder()
        norm = next(getattr(decoder, n) for n in ("norm", "final_layernorm", "embedding_norm") if hasattr(decoder, n))
        assert torch.allclose(norm(hidden), expected.hidden_states[-1], atol=1e-4)
        with streamed.final_norm() as found:
            assert (found is None) == (streamed.is_whole or family in WITHOUT_FINAL_NORM)
            if found is not None:
                name, ours = found
                assert checkpoint.tensors[name].shape == norm.weight.shape
                assert torch.equal(ours(hidden), norm(hidden))
                assert not ours.weight.is_meta
    assert sorted(calls) == [layer.index for layer in layers]
    for layer in layers:
        call = calls[layer.index]
        assert call.query.shape == (3, layer.num_attention_heads, 11, layer.head_dim)
        assert call.key.shape == call.value.shape == (3, layer.num_key_value_heads, 11, layer.head_dim)


def test_a_block_can_be_left_early(llama):
    checkpoint = Checkpoint.open(llama)

    def leave(call: AttentionCall) -> None:
        raise Stop

    with torch.no_grad():
        streamed = StreamedModel(checkpoint, describe(checkpoint))
        (hidden,) = streamed.embed([tokens()])
        with streamed.block(0):
            assert streamed.run(0, hidden, leave) is None
            assert streamed.run(0, hidden) is not None
