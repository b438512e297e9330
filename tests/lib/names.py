"""What became of every public name of version 1: its names in version 2, or why it is gone.

Names of version 2 stand as rows of the subject table give them (``Subject.covers``): with the
package where the name alone would not say what it is. Several are divided by spaces.
"""

from __future__ import annotations

SAME = (
    *("BudgetError", "GeometryError", "ReconstructionError", "UnsupportedModelError"),
    *("Result", "circuits", "corpus", "decomposition", "flow", "interventions", "measures"),
    *("models", "papers", "render", "report", "scores", "sphere", "weights", "zoo"),
    *("check_model", "view", "load", "reinitialized", "windows", "TokenWindows", "decompose"),
    *("decompose_activations", "PositionContext", "split_scores", "ScoreSplit"),
    *("split_values", "sweep_heads", "SweepTable", "head_type_scores", "offset_profile"),
    *("trace_logit", "LogitGraph", "edge_scores", "faithfulness", "composition"),
    *("feature_shares", "dictionary", "weight_geometry", "token_readout", "bias_readout"),
    *("embedding_distance_table", "noun_probe", "positional_report", "contextual_report"),
    *("compare_bases", "screenot", "smoothness", "token_paths", "norm_geometry"),
    *("path_geometry", "trajectories", "fit_aligned_bases", "flow_map", "flow_report"),
    *("compare_ensembles", "truncation_kl", "fit_noise_law", "LangevinModel", "separability"),
    *("Table", "corpus.splice", "corpus.gibberish", "corpus.pseudo_sentences"),
    *("corpus.repeated_random_tokens", "interventions.surrogate", "papers.theorem1"),
    *("papers.sarfati", "papers.song_zhong", "papers.molina", "zoo.embedded", "zoo.smollm2"),
    *("zoo.minilm", "zoo.default_windows", "render.spirals", "render.gram"),
    *("render.variance_shares", "render.fourier", "render.measure_curves"),
    *("render.noise_figure", "render.baseline_figure", "render.skip_figure"),
    *("render.truncation_figure", "render.bundle_3d", "render.head_shares", "render.heads"),
    *("render.head_planes", "render.split", "render.graph_page", "render.token_attribution"),
    *("render.effect_bars", "render.sphere_paths", "render.weight_blocks"),
    *("render.composition_figure", "render.faithfulness_curve"),
)
"""Names that stayed, with their package where the name alone would not say what it is."""

BECAME: dict[str, str] = {
    "Result": "Provenance",
    "load": "from_hf by_name",
    "view": "rotary_planes HeadWeights LayerView ModelView NormWeights OutputHead RotaryPlanes",
    "decompose_activations": "states_from_cache decompose_tensor",
    "Table": "ModelReport BandTable Reproduction",
    "prompts": "aligned_prompts",
    "PositionContext": "Anova Parts",
    "split_values": "ValueSplit",
    "ScoreSplit": "ShareTable HeadPlanes",
    "head_type_scores": "HeadTypes",
    "offset_profile": "OffsetProfile",
    "ScoreSplit SweepTable": "PlaneTable",
    "LogitGraph": "TokenTable explain_logit LogitExplanation",
    "mean_graph": "average_graphs AverageGraph MeanTable",
    "edge_scores": "EdgeScores NodeScores EdgeLayout",
    "faithfulness": "Faithfulness",
    "composition": "Composition",
    "sweep_heads": "WriterSweep",
    "feature_shares": "FeatureShares",
    "dictionary": "Dictionary",
    "interventions.term": "LiveEdit remove_term keep_term mean_term",
    "interventions.planes": "remove_planes keep_planes swap_planes",
    "interventions.edge": "remove_edge swap_edge",
    "interventions.heads": "remove_heads",
    "effects": (
        "surrogate_effect HeadPaths HeadKnockouts BesideControls necessity_sufficiency "
        "NecessitySufficiency Effects edge_necessity EdgeNecessity "
    ),
    "interventions.path effects": "head_paths",
    "interventions.heads interventions.each effects": "head_knockouts",
    "weight_geometry": "WeightGeometry",
    "token_readout": "TokenReadout",
    "positional_report": "PositionalReport",
    "contextual_report": "ContextualReport",
    "compare_bases": "BasisComparison",
    "screenot": "usable_k",
    "papers.theorem1": "dct_vectors",
    "token_paths": "TokenPaths token_approach update_split",
    "trajectories": "Trajectories",
    "flow_map": "fit_map",
    "flow_report": "FlowReport",
    "truncation_kl": "TruncationCurve",
    "skip_costs": "skip_map SkipMap",
    "papers.sarfati": "ensembles_apart true_against_extrapolated",
    "papers.song_zhong": "Settings settings_for topic_bases topic_windows published_tables",
    "zoo.embedded": "hugging_face tokenizer directory card NAME",
    "zoo.smollm2": "smollm2_hugging_face",
    "zoo.minilm": "minilm_directory",
    "report": "make write",
    "render.measure_curves": "incoherence learning_curve",
    "render.head_shares": "head_types",
    "render.heads": "band_atlas coverage_curves",
    "render.head_planes": "bands_page",
    "render.graph_page": "logit_page",
    "render.effect_bars": "surrogate_bars",
    "render.attention_heads": "circuitsvis",
}
"""Names of version 2 -> names of version 1 that became them."""

GONE: dict[str, str] = {
    "a model is anything with cfg, run_with_cache and run_with_hooks": "ModelLike",
    "TokenWindows, ids, texts, or an iterable of id batches": "TokensLike",
    "shares come from splits and sweeps": "ShareSums share_sums",
    "sweeps choose their own random tokens": "token_range",
    "offset_profile shows it": "offset_share",
    "offset_profile of the relative-position term": "relative_kernel RelativeKernel",
    "the largest of split.total().topk(k)": "TopCells",
    "bands of wavelengths by pandas.cut": "Band default_bands",
    "a merge of two DataFrames of nodes or edges": "GraphComparison EdgePairs",
    "graph.direct() of each prompt": "explain_logits LogitMeans",
    "a cell of a split times the response of the graph, in the recipes": (
        "attention_pairs AttentionPairs "
    ),
    "twelve lines of pandas in the recipes": "read_mib",
    "effects of term edits that keep the first term of each head": "dominant_only Dominance",
    "pandas joins two data frames": "beside_knockouts AttributionTable",
    "a hook of six lines at the state": "project_stream",
    "TransformerLens's FactoredMatrix, or weight_geometry": "Factors",
    "PCA of scikit-learn": "principal_projection",
    "umap-learn itself": "umap_coordinates",
    "papers.song_zhong, papers.sarfati and papers.molina": "reproduce",
    "training experiments are benchmarks/training": (
        "Claim Outcome Setup addition experiment nanogpt randomisation "
    ),
    "planted models are benchmarks/known_models": "known KnownModel",
    "the report is a list of items, made by the command": (
        "Analysis Card Draft SECTIONS Section TITLES "
    ),
    "report --quick": "Budget",
    "a section whose CSV is there is read": "Folder",
    "provenance says them": "versions",
    "columns of flow_report": "residual_figure",
}
"""Why names are gone, and which."""

NAMES: dict[str, str] = {name.split(".")[-1]: name for name in SAME}
NAMES |= {old: new for new, names in BECAME.items() for old in names.split()}
NAMES |= {old: f"gone: {why}" for why, names in GONE.items() for old in names.split()}
"""Name of version 1 -> names of version 2, or ``gone: why``."""

WITHOUT_ROW: dict[str, str] = {
    **dict.fromkeys(
        ("BudgetError", "GeometryError", "ReconstructionError", "UnsupportedModelError"),
        "errors: the table of refusals",
    ),
    **dict.fromkeys(
        (
            *("circuits", "corpus", "decomposition", "flow", "interventions", "measures"),
            *("models", "papers", "render", "report", "scores", "sphere", "weights", "zoo"),
        ),
        "a package",
    ),
    **dict.fromkeys(("Result", "Table"), "what all results are: their own laws"),
    "Prompts": "version 2 alone: a row is written with it",
    "zoo.default_windows": "text of the running Python: a law compares it with windows",
    "plot": "version 2 alone: a row is written with it",
    "from_hf": "every model of the tests is made by it",
    "build": "the report: its own laws",
}
"""Names of version 2 that need no row in the subject table, and why."""
