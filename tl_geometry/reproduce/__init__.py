"""Published settings and tables as data, and our numbers beside them: :func:`song_zhong` for Song & Zhong 2023, Tables 1 to 5."""

from __future__ import annotations

from tl_geometry.reproduce.protocol import Settings, causal_attention, settings_for
from tl_geometry.reproduce.tables import Reproduction, published_tables, song_zhong
from tl_geometry.reproduce.topics import topic_bases, topic_windows

__all__ = [
    "Reproduction",
    "Settings",
    "causal_attention",
    "published_tables",
    "settings_for",
    "song_zhong",
    "topic_bases",
    "topic_windows",
]
