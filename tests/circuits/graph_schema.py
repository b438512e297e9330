"""The graph JSON that the pages of Neuronpedia and circuit-tracer read, as a JSON schema, and what
no schema can say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jsonschema import Draft202012Validator

TEXT, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer", "minimum": 0}
NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]+$"}


def record(fields: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """An object that has all these fields; ``optional`` ones may be absent, others may be there."""
    return {"type": "object", "properties": fields | optional, "required": list(fields)}


def rows(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": of, **more}


def pair(*of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "prefixItems": list(of), "minItems": len(of), "maxItems": len(of)}


def of_type(node_type: str, text: str) -> dict[str, Any]:
    """What a node of a type says."""
    return {
        "if": {"properties": {"feature_type": {"const": node_type}}},
        "then": {"properties": {"clerp": {"pattern": text}}},
    }


METADATA = record(
    {
        "slug": NAME,
        "scan": NAME,
        "transcoder_list": {"const": []},
        "prompt_tokens": rows(TEXT, minItems=1),
        "prompt": TEXT,
        "node_threshold": {"type": "number", "minimum": 0, "maximum": 1},
        "schema_version": {"const": 1},
        "info": record(
            {
                "creator_name": TEXT,
                "source_urls": rows(TEXT),
                "generator": record({"name": TEXT}),
            }
        ),
        "generation_settings": {"type": "object"},
        "pruning_settings": record({"node_threshold": NUMBER, "edge_threshold": NUMBER}),
    }
)
PAGE_STATE = record(
    {
        "pinnedIds": rows(TEXT),
        "supernodes": rows(rows(TEXT)),
        "linkType": {"const": "both"},
        "clickedId": {"const": ""},
        "sg_pos": {"const": ""},
    }
)
NODE_ID = {"type": "string", "pattern": r"^(E|\d+)_[^_]+_\d+$"}
"""Layer, what, position: pages split a name at its underscores."""
NODE = record(
    {
        "node_id": NODE_ID,
        "feature": {"type": ["integer", "null"]},
        "layer": {"type": "string", "pattern": r"^(E|\d+)$"},
        "ctx_idx": INTEGER,
        "feature_type": {
            "enum": [
                *("embedding", "leaf", "logit"),
                *("cross layer transcoder", "mlp reconstruction error"),
            ]
        },
        "token_prob": {"type": "number", "minimum": 0, "maximum": 1},
        "is_target_logit": {"type": "boolean"},
        "run_idx": INTEGER,
        "reverse_ctx_idx": INTEGER,
        "jsNodeId": TEXT,
        "clerp": TEXT,
        "influence": {"type": "number", "minimum": 0, "maximum": 1 + 1e-9},
        "activation": NUMBER,
    },
    qk_tracing_results=record(
        {
            "pair_wise_contributors": rows(pair(TEXT, TEXT, NUMBER)),
            "top_q_marginal_contributors": rows(pair(TEXT, NUMBER)),
            "top_k_marginal_contributors": rows(pair(TEXT, NUMBER)),
        }
    ),
) | {
    "allOf": [
        # the page of a logit reads its probability out of the text, or throws
        of_type("logit", r"\(p=\d\.\d{3}\)"),
        # pages write the token over the text of an embedding: positions and constants are none
        of_type("embedding", "^(embed|cvec) "),
    ]
}
LINK = record({"source": NODE_ID, "target": NODE_ID, "weight": NUMBER, "signed": {"const": True}})
GRAPH = record(
    {"metadata": METADATA, "qParams": PAGE_STATE, "nodes": rows(NODE), "links": rows(LINK)}
)
Draft202012Validator.check_schema(GRAPH)
VALIDATOR = Draft202012Validator(GRAPH)


def faults(file: dict[str, Any]) -> list[str]:
    """Where a file is not of the schema, as paths."""
    return [error.json_path for error in VALIDATOR.iter_errors(file)]


def cumulative(nodes: Iterable[dict[str, Any]]) -> bool:
    """Whether ``influence`` is what the nodes down to each one carry together, the largest first:
    pages keep those up to a threshold."""
    ordered = sorted(nodes, key=lambda node: -abs(node["activation"]))
    total, carried = sum(abs(node["activation"]) for node in ordered), 0.0
    for node in ordered:
        carried += abs(node["activation"])
        if abs(node["influence"] - carried / total) > 1e-6:
            return False
    return True


def has_a_top(file: dict[str, Any]) -> bool:
    """Whether the largest layer is above 0, which pages take for none."""
    return max(int(node["layer"]) for node in file["nodes"] if node["layer"] != "E") > 0
