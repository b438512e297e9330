from .written import build as build

__all__: list[str]
