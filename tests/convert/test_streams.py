"""A block whose attention is known is run without it, whatever that returns; unless something else would come out."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from headfold.convert.streams import Streams

LAYER = SimpleNamespace(index=0, o=SimpleNamespace(weight="model.layers.0.attn.o_proj.weight"))
RETURNED = {
    "tensor": lambda output: output,
    "tuple of one": lambda output: (output,),
    "tuple of two": lambda output: (output, None),
    "list": lambda output: [output, None],
}


class Attention(nn.Module):
    def __init__(self, returned, behind):
        super().__init__()
        self.v_proj, self.o_proj = nn.Linear(6, 8), nn.Linear(8, 6)
        self.num_calls, self.returned, self.behind = 0, returned, behind

    def heads(self, hidden):
        return self.v_proj(hidden).cumsum(1)

    def forward(self, hidden):
        self.num_calls += 1
        return self.returned(self.behind(self.o_proj(self.heads(hidden))))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attn, self.mlp = attention, nn.Linear(6, 6)
        self.is_alone = attention.returned is RETURNED["tensor"]

    def forward(self, hidden):
        hidden = hidden + (self.attn(hidden) if self.is_alone else self.attn(hidden)[0])
        return hidden + self.mlp(hidden).tanh()


@torch.no_grad()
def run_both(returned, behind, num_windows=5):
    """What each batch gives by run_known and by the whole block, and how often run_known called the attention."""
    torch.manual_seed(0)
    block = Block(Attention(returned, behind))
    model = SimpleNamespace(blocks=[block], run=lambda number, hidden: block(hidden), device=torch.device("cpu"))
    streams = Streams(model, torch.zeros(num_windows, 20, dtype=torch.int64))
    streams.batches = [slice(0, 2), slice(2, 4), slice(4, num_windows)]
    hidden = torch.randn(num_windows, 20, 6)
    features = block.attn.heads(hidden)
    run = streams.run_known(LAYER, hidden, features)
    before = block.attn.num_calls
    known = [run(batch) for batch in streams.batches]
    num_calls = block.attn.num_calls - before
    return known, [block(hidden[batch]) for batch in streams.batches], num_calls


@pytest.mark.parametrize("returned", RETURNED)
def test_the_attention_is_left_out(returned):
    known, whole, num_calls = run_both(RETURNED[returned], lambda output: output)
    assert num_calls == 0
    for one, other in zip(known, whole, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_block_that_does_more_behind_the_projection_is_run_whole():
    known, whole, num_calls = run_both(RETURNED["tensor"], lambda output: 3 * output)
    assert num_calls == 3
    for one, other in zip(known, whole, strict=True):
        assert torch.equal(one, other)
