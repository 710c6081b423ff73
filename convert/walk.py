"""Walks through a transformers model block by block, with the weights of one block in memory at a time.

Nothing of a model's forward pass is written again here: transformers' own modules run, and what happens inside a block
is read through hooks and through transformers' attention interface. Everything runs in float32.

Shapes in one letter code: B windows, T tokens, H query heads, G KV heads, D head_dim, E hidden size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headfold.convert.errors import RefusedError
from headfold.convert.families import AttentionLayer

if TYPE_CHECKING:
    from headfold.convert.checkpoint import Checkpoint

_IMPLEMENTATION = "headfold_calibration"
_listener: ContextVar[Callable[[AttentionCall], None] | None] = ContextVar("listener", default=None)


@dataclass
class AttentionCall:
    """What an attention function was called with: q (B, H, T, D), k and v (B, G, T, D), after rotary and norms."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    """(1 or B, 1, T, T), added to the logits: 0, or the least number where a query must not look."""
    scaling: float


class Stop(Exception):
    """Raised in a hook to leave a block early: what lies behind is not needed."""


class StreamedModel:
    """A transformers model without weights, whose blocks get theirs from a checkpoint while they run.

    Where transformers does not load the stored tensors as they are (experts that it stacks, say), the whole model is
    loaded by its own means instead, in the stored dtype; `is_whole` says so.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layers: list[AttentionLayer],
        *,
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
    ):
        """Raises RefusedError if the model that transformers builds has no such attention layers."""
        import transformers
        from accelerate import init_empty_weights

        _register_attention()
        self.device = torch.device(device)
        self._checkpoint = checkpoint
        stored = checkpoint.tensors[layers[0].q.weight].dtype
        self.stored_dtype = {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored, torch.float32)
        # Hidden states may be kept as the model itself would have them; those of 16-bit floats might overflow.
        self.hidden_dtype = torch.bfloat16 if stored == "BF16" else torch.float32
        auto = transformers.AutoModelForCausalLM
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        config = _config(checkpoint, trust_remote_code).get_text_config()
        options |= {"attn_implementation": _IMPLEMENTATION}
        with init_empty_weights():  # buffers, such as rotary frequencies, are computed all the same
            model = auto.from_config(config, dtype=torch.float32, **options)
        names = _stored_names(model, checkpoint, layers)
        self.is_whole = names is None
        if names is None:
            if checkpoint.computed:  # transformers would load the model that it was re-mapped from
                raise RefusedError(
                    f"{checkpoint.path}: its tensors are not those of {type(model).__name__}, so that it cannot be "
                    "calibrated; --method mean needs no calibration"
                )
            model = auto.from_pretrained(checkpoint.path, dtype="auto", **options)
            self._whole = dict(model.state_dict())
        else:
            self._names = names
        model.eval().requires_grad_(False)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)
        module_name = _module_name(model, layers[0])
        self._decoder_name = module_name[: module_name.rindex(".layers.")]
        self._decoder = model.get_submodule(self._decoder_name)
        self.blocks: list[nn.Module] = list(self._decoder.layers)
        self._arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._final_norm: str | None = None
        for layer in layers:
            if layer.index >= len(self.blocks):
                raise RefusedError(
                    f"transformers builds {len(self.blocks)} layers of this model and leaves layer {layer.index} out, "
                    "so that it cannot be calibrated; --method mean needs no calibration"
                )

    def embed(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """What the first block gets for each batch of token ids (B, T): (B, T, E), float32.

        What the model passes to its blocks beside the hidden states is kept for `run`.
        """
        is_of_block = tuple(f"layers.{number}." for number in range(len(self.blocks)))
        names = [name for name, _ in self._decoder.named_parameters() if not name.startswith(is_of_block)]
        embeddings = [module for module in self._decoder.modules() if isinstance(module, nn.Embedding)]
        hooks = [module.register_forward_hook(lambda _, __, output: output.float()) for module in embeddings]
        first_input: list[Tensor] = []

        def stand_in(number: int) -> Callable[..., Tensor]:
            def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                if number == 0:
                    first_input[:] = [hidden]
                if len(self._arguments) == number:
                    self._arguments.append((args, kwargs))
                return hidden

            return forward

        with self._loaded(self._decoder, self._decoder_name, names, keep_dtype=embeddings):
            try:
                for number, block in enumerate(self.blocks):
                    block.forward = stand_in(number)
                for batch in batches:
                    if not self._arguments:  # of one window, so that they fit batches of every size
                        self._run_first(names, batch[:1])
                    self._decoder(input_ids=batch.to(self.device), use_cache=False)
                    yield first_input[0]
            finally:
                for block in self.blocks:
                    del block.forward
                for hook in hooks:
                    hook.remove()

    def _run_first(self, names: list[str], ids: Tensor) -> None:
        """Run the decoder on a batch, and find the norm of these parameters whose output it returns."""
        outputs: list[tuple[str, Tensor]] = []

        def record(name: str) -> Callable[[nn.Module, Any, Any], None]:
            return lambda _, __, output: outputs.append((name, output))

        modules = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
        hooks = [self._decoder.get_submodule(name).register_forward_hook(record(name)) for name in sorted(modules)]
        try:
            returned = self._decoder(input_ids=ids.to(self.device), use_cache=False)[0]
        finally:
            for hook in hooks:
                hook.remove()
        for name, output in outputs:
            weight = self._decoder.get_submodule(name).weight
            if output is returned and isinstance(weight, Tensor) and weight.dim() == 1:
                self._final_norm = name

    @contextmanager
    def final_norm(self) -> Iterator[tuple[str, nn.Module] | None]:
        """The stored name of its weight and the norm behind the last block, with its weights in float32.

        None where the decoder does not return what a norm gives, and for models that are loaded whole. After `embed`.
        """
        if self._final_norm is None or self.is_whole:
            yield None
            return
        module = self._decoder.get_submodule(self._final_norm)
        prefix = f"{self._decoder_name}.{self._final_norm}"
        with self._loaded(module, prefix, [name for name, _ in module.named_parameters()]):
            yield self._names[f"{prefix}.weight"], module

    @contextmanager
    def block(self, number: int) -> Iterator[nn.Module]:
        """One block with its weights, in float32 on the device; they go when the context ends."""
        block = self.blocks[number]
        names = [name for name, _ in block.named_parameters()]
        with self._loaded(block, f"{self._decoder_name}.layers.{number}", names):
            yield block

    def stored_name(self, number: int, name: str) -> str:
        """The stored tensor of a parameter of a block; not for models that are loaded whole."""
        return self._names[f"{self._decoder_name}.layers.{number}.{name}"]

    def run(
        self, number: int, hidden: Tensor, on_attention: Callable[[AttentionCall], None] | None = None
    ) -> Tensor | None:
        """The output of a block for hidden states (B, T, E); None if a hook or `on_attention` raised Stop."""
        args, kwargs = self._arguments[number]
        token = _listener.set(on_attention)
        try:
            output = self.blocks[number](hidden, *args, **kwargs)
        except Stop:
            return None
        finally:
            _listener.reset(token)
        return output if isinstance(output, Tensor) else output[0]

    @contextmanager
    def _loaded(
        self, module: nn.Module, prefix: str, names: list[str], keep_dtype: Iterable[nn.Module] = ()
    ) -> Iterator[None]:
        """Parameters of a module with their values for a while. Those of `keep_dtype` stay as stored."""
        kept = {id(parameter) for other in keep_dtype for parameter in other.parameters()}
        owners = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], name) for name in names]
        empty = [owner._parameters[leaf] for owner, leaf, _ in owners]
        try:
            for (owner, leaf, name), before in zip(owners, empty, strict=True):
                value = self._value(f"{prefix}.{name}")
                dtype = value.dtype if id(before) in kept else torch.float32
                owner._parameters[leaf] = nn.Parameter(value.to(self.device, dtype), requires_grad=False)
            yield
        finally:
            for (owner, leaf, _), before in zip(owners, empty, strict=True):
                owner._parameters[leaf] = before

    def _value(self, name: str) -> Tensor:
        return self._whole[name] if self.is_whole else self._checkpoint.read(self._names[name])


def _config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """The config that the checkpoint has in memory: a re-mapped one differs from the one in its directory."""
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = checkpoint.config["model_type"]
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type].from_dict(checkpoint.config)
    return AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=trust_remote_code)


def _register_attention() -> None:
    """Make `_attend` known to transformers, with masks that are always written out."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(_IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(_IMPLEMENTATION, eager_mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers itself would do, after the listener was told."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if listener := _listener.get():
        listener(AttentionCall(query, key, value, attention_mask, scaling))
    # Soft-capped logits and learned sinks are known to a model's own function alone.
    is_special = kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = own if is_special and own is not None else ALL_ATTENTION_FUNCTIONS["sdpa"]
    return function(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _module_name(model: nn.Module, layer: AttentionLayer) -> str:
    """The full name of a layer's attention in the model, which may have other prefixes than the checkpoint's names."""
    tail = layer.module[layer.module.rindex("layers.") :]
    names = [name for name, _ in model.named_modules() if f".{name}".endswith(f".{tail}")]
    if len(names) != 1:
        found = " or ".join(names) or "nothing of the kind"
        raise RefusedError(
            f"{type(model).__name__} has {found} where one {tail} is expected, so that it cannot be calibrated; "
            "--method mean needs no calibration"
        )
    return names[0]


def _stored_names(model: nn.Module, checkpoint: Checkpoint, layers: list[AttentionLayer]) -> dict[str, str] | None:
    """The stored tensor of every parameter of the decoder, or None if they do not correspond one to one."""
    if "layers." not in layers[0].q.weight:  # transformers renames all of it
        return None
    module = _module_name(model, layers[0])
    ours = module[: module.rindex("layers.")]
    theirs = layers[0].q.weight[: layers[0].q.weight.rindex("layers.")]
    names = {}
    for name, parameter in model.named_parameters():
        if name.startswith(ours):
            stored = theirs + name.removeprefix(ours)
            if stored not in checkpoint.tensors or checkpoint.tensors[stored].shape != tuple(parameter.shape):
                return None
            names[name] = stored
    return names
