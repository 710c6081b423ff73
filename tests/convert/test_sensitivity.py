"""What an error of the attention's output costs, against Jacobians by automatic differentiation."""

import pytest
import torch

from headfold.convert.checkpoint import Checkpoint
from headfold.convert.families import describe
from headfold.convert.sensitivity import output_metric
from headfold.convert.walk import StreamedModel


def measured(tiny, path, family, monkeypatch, num_probes):
    monkeypatch.setattr("headfold.convert.sensitivity._NUM_PROBES", num_probes)
    overrides = {"qk_layernorm": False} if family == "phi" else {}
    checkpoint = Checkpoint.open(tiny.save(tiny.tiny_model(tiny.tiny_config(family, **overrides)), path))
    layers = describe(checkpoint)
    model = StreamedModel(checkpoint, layers)
    name = layers[0].o.weight.split("layers.0.")[1].removesuffix(".weight")
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        (hidden,) = model.embed([ids])
        with model.block(0) as block:
            metric = output_metric(block, lambda x: model.run(0, x), hidden, name, first_token=4, seed=3)
            reference = exact(block, model, hidden, name, 4) if family != "phi" else None
    return metric, reference


def exact(block, model, hidden, name, first_token):
    """E[J^T J] of the inputs of the MLP by the attention's output, from the parts of a llama-like block."""
    outputs = []
    hook = block.get_submodule(name).register_forward_hook(lambda _, __, output: outputs.append(output))
    model.run(0, hidden)
    hook.remove()
    norm = getattr(block, "pre_feedforward_layernorm", None) or block.post_attention_layernorm
    after = block.post_attention_layernorm if norm is not block.post_attention_layernorm else torch.nn.Identity()

    def reads(attention, stream):
        x = norm(stream + after(attention))
        return torch.cat([block.mlp.gate_proj(x), block.mlp.up_proj(x)])

    total = torch.zeros(hidden.shape[-1], hidden.shape[-1], dtype=torch.float64)
    for window in range(len(hidden)):
        for token in range(first_token, hidden.shape[1]):
            with torch.enable_grad():
                jacobian = torch.autograd.functional.jacobian(
                    lambda a, s=hidden[window, token]: reads(a, s), outputs[0][window, token]
                ).double()
            total += jacobian.T @ jacobian
    return 0.1 * torch.eye(len(total)) + 0.9 * total / total.diagonal().mean()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_metric_is_that_of_what_the_mlp_reads(tiny, tmp_path, monkeypatch, family):
    metric, reference = measured(tiny, tmp_path / "model", family, monkeypatch, 600)
    assert (metric - reference).norm() < 0.1 * reference.norm()
    assert metric.diagonal().mean() == pytest.approx(1)
    assert torch.linalg.eigvalsh(metric).min() > 0


def test_nothing_reads_the_attention_in_a_parallel_block(tiny, tmp_path, monkeypatch):
    metric, _ = measured(tiny, tmp_path / "model", "phi", monkeypatch, 2)
    assert torch.equal(metric, torch.eye(len(metric), dtype=torch.float64))
