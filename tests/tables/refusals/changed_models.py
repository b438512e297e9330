"""Models in states that public reports describe: made for one row, and changed after a look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.lib.models import bridge_of, hf_model, tokenizer

Change = Callable[[], None]
OWN_CODE = {
    "config.json": b'{"model_type": "mine", "auto_map": {"AutoConfig": "a.B", '
    b'"AutoModelForCausalLM": "a.C"}}',
    "a.py": b"raise SystemExit(7)",
    "model.safetensors": b"",
}
PICKLED = {
    "config.json": b'{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}',
    "pytorch_model.bin": b"\x80\x04.",
}
"""Folders that hold a model which is not to be trusted, as files and their content."""


def made(architecture: str, **changes: Any) -> Any:
    """A tiny model that belongs to its row, made without touching the generator of the user."""
    with torch.random.fork_rng():
        return bridge_of(hf_model(architecture, **changes))


def with_text(**changes: Any) -> Any:
    """A tiny GPT-2 with a tokenizer of words."""
    with torch.random.fork_rng():
        return bridge_of(hf_model("gpt2", **changes), tokenizer=tokenizer())


def with_bos() -> Any:
    """The same with a tokenizer that puts BOS before every text by itself, as Llama's does."""
    from tokenizers import processors

    words = tokenizer()
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    with torch.random.fork_rng():
        return bridge_of(hf_model("gpt2"), tokenizer=words)


def altered(how: str) -> tuple[Any, Change]:
    """A model, and what changes its output by something that is no parameter, or does not."""
    architectures = {
        "scale of embeddings": "gemma2",
        "parallel blocks": "neox",
        "routing": "gpt-oss",
    }
    model = made(architectures.get(how, "llama"))
    inner = model.original_model
    modules = dict(inner.named_modules())

    def change() -> None:
        if how == "longer prompts":
            model.run_with_cache(torch.arange(3, 43)[None])
        for name, module in modules.items():
            if how == "rotary frequencies" and hasattr(module, "inv_freq"):
                module.inv_freq.mul_(1.5)
            if how == "activation" and isinstance(getattr(module, "act_fn", None), nn.Module):
                module.act_fn = nn.Tanh().eval()
            if how == "scale of embeddings" and hasattr(module, "embed_scale"):
                module.embed_scale = 2 * module.embed_scale
            if how == "parallel blocks" and hasattr(module, "use_parallel_residual"):
                module.use_parallel_residual = False
            if how == "routing" and name.endswith("router"):
                module.top_k = 1

    return model, change


class Adapter(nn.Module):
    """A linear map with a low-rank part beside it that is not merged, as peft makes them: its
    ``weight`` is that of the map alone."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        generator = torch.Generator().manual_seed(1)
        self.A = nn.Parameter(torch.randn(2, base.in_features, generator=generator))
        self.B = nn.Parameter(torch.randn(base.out_features, 2, generator=generator))

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def delta(self) -> torch.Tensor:
        return self.B @ self.A

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.delta().mT


def adapted(merged: bool) -> Any:
    """A tiny Llama with adapters on the values of its heads, merged into the weights or not."""
    with torch.random.fork_rng():
        hf = hf_model("llama")
    for block in hf.model.layers:
        adapter = Adapter(block.self_attn.v_proj)
        if merged:
            with torch.no_grad():
                block.self_attn.v_proj.weight.add_(adapter.delta())
        else:
            block.self_attn.v_proj = adapter
    return bridge_of(hf)
