"""A causal language model from a checkpoint directory: its weights by their names, and its forward cut before the head.

Weights are read by the tensor, layer by layer, so that a sharded model never exists whole in any process; the same
names lead back at export.

Shapes in one letter code: B rows, T tokens, N tokens of all rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headfold.convert.checkpoint import Checkpoint
from headfold.convert.errors import CheckpointError, RefusedError, first_line


class CausalModel(nn.Module):
    """A causal language model in two halves, so that a loss can be taken without all logits ever being in memory.

    forward gives hidden states (B, T, E) in transformers' own way, `logits` turns any of them into logits. Both halves
    run the model's own code: what a family does to its logits (scaling, soft caps) is kept without being known here.
    """

    def __init__(self, model: PreTrainedModel, *, flatten_rows: bool = False) -> None:
        """`flatten_rows` lays the rows of a batch end to end, the form in which flash attention isolates documents."""
        super().__init__()
        self.model = model
        self.flatten_rows = flatten_rows
        self._given = _GivenHiddenStates()
        # The model without its body: a shallow copy that shares the head. In a list, so that it is not a submodule.
        head = copy.copy(model)
        head._modules = {**model._modules, model.base_model_prefix: self._given}
        self._head = [head]

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states (B, T, E) of input_ids (B, T). position_ids (B, T) that restart isolate documents."""
        shape = input_ids.shape
        if self.flatten_rows and position_ids is not None:
            input_ids, position_ids = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
        # Only without a cache and an attention mask does transformers look for restarts in position_ids.
        output = self.model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        self._given.output_type = type(output)
        return output.last_hidden_state.view(*shape, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (N, V) of hidden states (N, E) that forward gave."""
        return self._head[0](inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]


class _GivenHiddenStates(nn.Module):
    """Stands in for a model's body: its result is what it is given."""

    output_type: type

    def forward(self, *, inputs_embeds: torch.Tensor, **_: Any) -> Any:
        return self.output_type(last_hidden_state=inputs_embeds)


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str | None = None,
    trainable: bool,
    after_layer: Callable[[nn.Module], None] = lambda layer: None,
) -> PreTrainedModel:
    """The checkpoint's model with its weights as `dtype` on `device`; `after_layer` is called when a layer is complete.

    Raises RefusedError when transformers cannot build it, CheckpointError when its weights and the stored tensors do
    not match one to one in name and shape.
    """
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        raise RefusedError(f"{checkpoint.path}: transformers cannot build this model: {first_line(error)}") from error
    model.tie_weights()
    names = _names_of_parameters(model)
    _compare_names(model, checkpoint, names)

    def read(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.is_meta:
                _read_parameter(model, checkpoint, names[parameter], dtype, device, trainable)

    for layer in decoder_layers(model):
        read(list(layer.parameters()))
        after_layer(layer)
    read(list(model.parameters()))
    for name in _persistent_buffers(model):
        if name in checkpoint.tensors:
            model.get_buffer(name).copy_(checkpoint.read(name))
    return model.to(device)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's layers, by the names of the classes that transformers never splits over devices."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def _names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter with all its names: a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _persistent_buffers(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_buffers()} & model.state_dict().keys()


def _compare_names(model: PreTrainedModel, checkpoint: Checkpoint, names: dict[nn.Parameter, list[str]]) -> None:
    known = {name for group in names.values() for name in group} | _persistent_buffers(model)
    missing = [group[0] for group in names.values() if not any(name in checkpoint.tensors for name in group)]
    # Old checkpoints hold the rotary frequencies of every layer, which are computed today.
    strange = [name for name in checkpoint.tensors if name not in known and not name.endswith("rotary_emb.inv_freq")]
    if missing or strange:
        found = f"{missing[0]} is missing" if missing else f"{strange[0]} has no place in it"
        raise CheckpointError(
            f"{checkpoint.path}: its tensors are not those of transformers' {type(model).__name__}: {found} "
            f"({len(missing)} missing, {len(strange)} without a place)"
        )
    for parameter, group in names.items():
        for name in group:
            entry = checkpoint.tensors.get(name)
            if entry is not None and tuple(entry.shape) != tuple(parameter.shape):
                raise CheckpointError(
                    f"{checkpoint.path}: {name} is stored as {list(entry.shape)}, but its config.json makes it "
                    f"{list(parameter.shape)}"
                )


def _read_parameter(
    model: nn.Module,
    checkpoint: Checkpoint,
    names: list[str],
    dtype: torch.dtype,
    device: torch.device,
    trainable: bool,
) -> None:
    """Put the stored values of one parameter in the place of all its names."""
    stored = [name for name in names if name in checkpoint.tensors]
    values = checkpoint.read(stored[0])
    shared = nn.Parameter(values.to(device, dtype), requires_grad=trainable)
    for name in names:
        parameter = shared
        if name in stored[1:]:
            # Stored twice although config.json ties the two: like transformers, untie them where they differ.
            own = checkpoint.read(name)
            if not torch.equal(own, values):
                parameter = nn.Parameter(own.to(device, dtype), requires_grad=trainable)
        module, _, attribute = name.rpartition(".")
        model.get_submodule(module).register_parameter(attribute, parameter)
