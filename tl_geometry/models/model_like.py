"""What may the argument ``model`` of a public function be? :data:`ModelLike`, which they all
name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tl_geometry.models.model_view import ModelView

if TYPE_CHECKING:
    from typing import Protocol

    class HookedModel(Protocol):
        """What HookedTransformer and TransformerBridge have in common."""

        cfg: Any

        def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any: ...
        def run_with_cache(self, *args: Any, **kwargs: Any) -> Any: ...

    ModelLike = HookedModel | ModelView
else:  # unknown at run time: view() looks at what it gets, and refuses by name
    ModelLike = Any
"""A TransformerLens model of any class, or a :class:`ModelView` of one."""
