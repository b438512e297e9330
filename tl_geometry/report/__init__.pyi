from .build import build as build

__all__: list[str]
