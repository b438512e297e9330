"""One pass of a corpus through the model, with one context of every batch verified: the loop behind
the sweep over heads, the sweep over writers, composition and features.

::

    stream = CorpusPass(view, source, rows)
    for batch in stream:
        view.run_layers(batch, layers, on_layer, verify=False, **stream.sample(verify))
    provenance = stream.provenance(...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base.results import Provenance, hash_tokens
from tl_geometry.corpus.token_windows import TokenWindows, begins_with_bos
from tl_geometry.models.batches import another_row
from tl_geometry.models.model_view import ModelView


@dataclass(eq=False)
class CorpusPass:
    """Iterates over batches of at most ``rows`` contexts with a progress bar. ``contexts`` is the
    number that was read and ``token_hash`` their hash, without the batch at hand;
    ``begins_with_bos`` says whether all contexts so far, with the batch at hand, began with BOS.

    One context of each batch is verified, at another ``row`` each time, because a user's hook may
    change some rows only.
    """

    view: ModelView
    source: TokenWindows
    rows: int
    progress: bool = False
    seed: int = 0
    contexts: int = 0
    row: int = 0
    token_hash: str = ""
    begins_with_bos: bool = True

    def __iter__(self) -> Iterator[Int[Tensor, "batch position"]]:
        draws = torch.Generator().manual_seed(self.seed)
        hidden, total = not self.progress, len(self.source)
        with tqdm(total=total, unit="ctx", disable=hidden, desc=self.view.name) as bar:
            for batch in self.source.tokens.split(self.rows):
                self.begins_with_bos &= begins_with_bos(batch, self.view.bos_id)
                self.row = another_row(self.row, len(batch), draws)
                yield batch
                # after the yield, so that `first` is true while the caller works on the first batch
                self.contexts += len(batch)
                self.token_hash = hash_tokens(batch, self.token_hash)
                bar.update(len(batch))

    @property
    def first(self) -> bool:
        """Whether the batch at hand is the first."""
        return self.contexts == 0

    def sample(self, verify: Callable[..., None] | None = None) -> dict[str, Any]:
        """Keyword arguments for :meth:`ModelView.run_layers` and ``run_written`` that make them
        verify the sampled context. ``verify`` is called with its view (and its writers) for further
        checks by the caller."""
        return {"sample": (self.row, verify or (lambda *_: None))}

    def provenance(self, drop: int, **about: Any) -> Provenance:
        """What was read; the window begins at ``drop``. ``about`` adds fields of the provenance or
        replaces them."""
        read: dict[str, Any] = {"corpus": self.source.corpus, "token_hash": self.token_hash}
        read |= {"has_bos": self.begins_with_bos, "window": (drop, self.source.length)}
        read |= {"contexts": self.contexts, "seed": self.seed, "flags": self.source.flags}
        return self.view.provenance(**(read | about))
