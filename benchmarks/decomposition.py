"""Streamed decomposition against the bare forward pass of transformers, and peak memory against the
number of contexts. Nothing else should run on the machine:
``OMP_NUM_THREADS=1 python -m benchmarks --only decomposition`` (``--size gpu`` on a GPU)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import AutoModel, GPT2Config, GPT2LMHeadModel

import tl_geometry as tlg
from benchmarks.harness import Row, child, grown, interleave, paired
from tl_geometry.models import from_hf

SIZES = {"smoke": (2, 64, 32, 8), "cpu": (12, 768, 256, 32), "gpu": (12, 768, 512, 512)}
"""Layers, d_model, length, contexts."""
ROUNDS = {"smoke": 1, "cpu": 5, "gpu": 9}
EAGER, SDPA = "transformers, eager", "transformers, SDPA"
"""What every pass is compared with. TransformerLens hooks the patterns of the first."""


def gpt2_weights(layers: int, width: int, length: int, heads: int | None = None) -> GPT2LMHeadModel:
    """A GPT-2 of this size with random weights, as transformers has it."""
    heads = heads or max(1, width // 64)
    settings: dict[str, Any] = (
        {} if width >= 768 else {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
    )
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=length, **settings)
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval()


def gpt2(layers: int, width: int, length: int, heads: int | None = None) -> Any:
    """The same as a bridge."""
    weights = gpt2_weights(layers, width, length, heads)
    return from_hf(weights, None, name="random-gpt2")


def plain_models(model: Any, device: str) -> dict[str, Any]:
    """The weights of a causal model without its head, with both kinds of attention."""
    made: dict[str, Any] = {}
    for name, kind in ((EAGER, "eager"), (SDPA, "sdpa")):
        own = AutoModel.from_config(model.config, attn_implementation=kind)
        own.load_state_dict(model.base_model.state_dict())
        made[name] = own.eval().to(device)
    return made


def run(size: str) -> list[Row]:
    """Ratio of the streamed decomposition, with less and more that is kept, to the pass of the same
    weights by transformers (eager attention, without the output head) over the same tokens; and
    peak memory."""
    layers, width, length, contexts = SIZES[size]
    weights: Any = gpt2_weights(layers, width, length)
    device = "cuda" if size == "gpu" else "cpu"
    plain = plain_models(weights, device)[EAGER]
    view = tlg.view(from_hf(weights.to(device), None, name="random-gpt2"))
    tokens = torch.randint(
        0, view.d_vocab, (contexts, length), generator=torch.Generator().manual_seed(0)
    )
    batch = max(1, (4096 if size != "gpu" else 65536) // length)

    def states() -> torch.Tensor:
        found: dict[int, torch.Tensor] = {}
        view.run(
            tokens[:batch],
            {
                view.state_hooks[s]: lambda h, s=s: found.__setitem__(s, h.clone())
                for s in range(layers + 1)
            },
        )
        return torch.stack([found[s] for s in range(layers + 1)])

    exact, ours = (
        tlg.decompose_activations(states()[:, :, 1:]).transform(states()[:, :, 1:]),
        tlg.decompose(view, tokens[:batch], batch_size=batch, progress=False),
    )
    assert (exact.pos.cpu() - ours.pos).abs().max() < 1e-4, "the routes disagree"
    with torch.inference_mode():
        hidden = plain(tokens[:batch].to(device), output_hidden_states=True).hidden_states
    assert (hidden[layers - 1] - states()[layers - 1]).abs().max() < 1e-3, "the models disagree"
    rows, name = [], f"decompose {layers}x{width}x{length}, {contexts} contexts"
    routes: dict[str, dict[str, Any]] = {
        "decompose, sums alone": {"second_moments": False, "keep_ctx": False},
        "decompose, sums and context means": {"second_moments": False},
        "decompose, second moments": {"second_moments": True},
    }
    for label, options in routes.items():
        rows += paired(
            name,
            label,
            view,
            tokens.split(batch),
            partial(tlg.decompose, view, batch_size=batch, progress=False, **options),
            rounds=ROUNDS[size],
            plain=lambda part: plain(part.to(device), use_cache=False),
        )
    return rows + obvious(view, tokens[: 2 * batch], batch, size) + memory(size)


def by_hand(view: Any, tokens: torch.Tensor, batch: int) -> torch.Tensor:
    """The positional basis from TransformerLens alone: caches of all batches, their states stacked,
    and means."""
    names, caches = set(view.state_hooks), []
    for part in tokens.split(batch):
        with torch.inference_mode():
            cache = view._model.run_with_cache(
                part.to(view.device), names_filter=lambda name: name in names, return_type=None
            )[1]
        caches.append(torch.stack([cache[name] for name in view.state_hooks]))
    h = torch.cat(caches, dim=1)[:, :, 1:].double()
    return (h.mean(1) - h.mean((1, 2)).unsqueeze(1)).cpu()


def streamed(view: Any, tokens: torch.Tensor, batch: int) -> torch.Tensor:
    """The same basis by this package."""
    return tlg.decompose(
        view, tokens, batch_size=batch, second_moments=False, keep=0, progress=False
    ).pos


def kept(view: Any, tokens: torch.Tensor, batch: int) -> torch.Tensor:
    """The same with everything that is kept by default: 32 whole contexts, context means, second
    moments."""
    return tlg.decompose(view, tokens, batch_size=batch, progress=False).pos


OBVIOUS = {
    "run_with_cache, stack, mean": by_hand,
    "decompose, sums alone": streamed,
    "decompose, all that is kept": kept,
}
OBVIOUS_CHILD = """
import sys, torch
import tl_geometry as tlg
from benchmarks.decomposition import OBVIOUS, gpt2
from benchmarks.harness import grown
layers, width, length, batch = (int(v) for v in sys.argv[1:5])
torch.set_num_threads(1)
view = tlg.view(gpt2(layers, width, length))
generator = torch.Generator().manual_seed(0)
tokens = torch.randint(0, view.d_vocab, (2 * batch, length), generator=generator)
with grown() as used:
    OBVIOUS[sys.argv[5]](view, tokens, batch)
print(used.mib)
"""


def obvious(view: Any, tokens: torch.Tensor, batch: int, size: str) -> list[Row]:
    """The same basis in the obvious way: time, and peak memory of processes of their own."""
    assert (by_hand(view, tokens, batch) - streamed(view, tokens, batch)).abs().max() < 1e-4, (
        "the routes disagree"
    )
    notes = {}
    for name, route in OBVIOUS.items():
        if size != "cpu":
            with grown() as used:
                route(view, tokens, batch)
            notes[name] = f"peak {used.mib:.0f} MiB above the start"
        else:
            notes[name] = (
                f"peak {float(child(OBVIOUS_CHILD, *SIZES[size][:3], batch, name)):.0f} MiB "
                "above the start"
            )
    routes = {
        name: lambda route=route: route(view, tokens, batch) for name, route in OBVIOUS.items()
    }
    return interleave(f"states of {len(tokens)} contexts", routes, rounds=2, notes=notes)


CHILD = """
import sys, torch
from benchmarks.decomposition import gpt2
from benchmarks.harness import peak
import tl_geometry as tlg
layers, width, length, contexts = (int(v) for v in sys.argv[1:])
torch.set_num_threads(1)
model = gpt2(layers, width, length)
seeds = map(torch.Generator().manual_seed, range(contexts // 8))
tokens = (torch.randint(0, 500, (8, length), generator=g) for g in seeds)
tlg.decompose(model, tokens, keep_ctx=False, progress=False)
print(peak())
"""


def memory(size: str) -> list[Row]:
    """Peak memory of whole processes over 256 and 4,096 contexts: the ratio should be one. In
    the small size there is one, over 32."""
    layers, width, length, counts = (
        (2, 64, 32, (32,)) if size == "smoke" else (4, 256, 64, (256, 4096))
    )
    peak = [int(child(CHILD, layers, width, length, n)) for n in counts]
    name = f"peak memory {layers}x{width}x{length}"
    return [
        Row(name, f"{n} contexts", float("nan"), p / peak[0], f"{p / 1024:.0f} MiB")
        for n, p in zip(counts, peak, strict=True)
    ]
