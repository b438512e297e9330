"""The command line."""

from __future__ import annotations

import torch

from tests.bad_inputs.cases import (
    TEXT,
    Command,
    fit,
)

COMMANDS = [
    Command("an unknown option", ("fit", "--nothing"), "nothing"),
    Command("an unknown command", ("fitt",), "fitt"),
    Command("contexts -5", fit("--contexts", "-5"), "contexts", TEXT),
    Command("contexts 0", fit("--contexts", "0"), "contexts", TEXT),
    Command("contexts beyond the corpus", fit("--contexts", "9999"), "windows|contexts", TEXT),
    Command("contexts in words", fit("--contexts", "many"), "many", TEXT),
    Command("length 0", fit("--length", "0"), "length", TEXT),
    Command("length 1", fit("--length", "1"), "length", TEXT),
    Command("length beyond n_ctx", fit("--length", "4096"), "length|positions|tokens", TEXT),
    Command("batch size 0", fit("--batch-size", "0"), "batch-size|batch_size", TEXT),
    Command("seed -1", fit("--seed", "-1"), "seed", TEXT),
    Command("a corpus that is not there", ("fit", "--corpus", "nope.txt"), "nope.txt"),
    Command("a corpus that is a folder", ("fit", "--corpus", "."), "corpus"),
    Command(
        "an empty corpus", ("fit", "--corpus", "empty.txt"), "text|empty", (("empty.txt", b""),)
    ),
    Command(
        "a corpus that is binary",
        ("fit", "--corpus", "b.txt"),
        "text",
        (("b.txt", b"abc\0def" * 500),),
    ),
    Command(
        "a corpus in Latin-1",
        ("fit", "--corpus", "l.txt"),
        "UTF-8|encoding",
        (("l.txt", "caf\xe9 ".encode("latin-1") * 500),),
    ),
    Command(
        "a token file that is cut",
        ("fit", "--corpus", "t.npy"),
        "t.npy|npy",
        (("t.npy", b"\x93NUMPY"),),
    ),
    Command(
        "a device that is not there",
        fit("--device", "cuda" if not torch.cuda.is_available() else "cuda:99"),
        "device|CUDA",
        TEXT,
    ),
    Command("a device that is nonsense", fit("--device", "toaster"), "device", TEXT),
    Command("a dtype that is nonsense", fit("--dtype", "float7"), "dtype", TEXT),
    Command("a class that is nonsense", fit("--class", "hook"), "class", TEXT),
    Command("an output that is a folder", fit("--out", "."), "out", TEXT),
    Command("an output below a file", fit("--out", "a.txt/basis.safetensors"), "out|a.txt", TEXT),
    Command(
        "a report into a file", ("report", "--corpus", "a.txt", "--out", "a.txt"), "out|a.txt", TEXT
    ),
    Command(
        "a section that is not there",
        ("report", "--corpus", "a.txt", "--sections", "head"),
        "sections|heads",
        TEXT,
    ),
    Command(
        "a budget that is nonsense",
        ("report", "--corpus", "a.txt", "--budget", "soon"),
        "budget",
        TEXT,
    ),
    Command("a model that is not there", ("check", "gpt-99"), "gpt-99|name"),
    Command("a folder without a model", ("check", "."), "config.json"),
    Command(
        "a folder with a pickled model",
        ("check", "."),
        "safetensors",
        (
            ("config.json", b'{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'),
            ("pytorch_model.bin", b"\x80\x04."),
        ),
    ),
    Command(
        "a folder with its own code",
        ("check", "."),
        "code|trust",
        (
            (
                "config.json",
                b'{"model_type": "mine", "auto_map": {"AutoConfig": "a.B", '
                b'"AutoModelForCausalLM": "a.C"}}',
            ),
            ("a.py", b"raise SystemExit(7)"),
            ("model.safetensors", b""),
        ),
    ),
    Command(
        "a config that is no JSON", ("check", "."), "config.json|JSON", (("config.json", b"{"),)
    ),
    Command("a head beyond the last", ("readout", "--layer", "0", "--head", "9"), "head"),
    Command("weights that are nonsense", ("readout", "--weights", "KV"), "QK"),
    Command("a readout of no tokens", ("readout", "--k", "0"), "k"),
    Command("a target of many tokens", ("trace", "x = 1", "--target", "x y z"), "one token"),
    Command("a target that is none", ("trace", "x = 1", "--target", ""), "one token"),
    Command(
        "a position beyond the prompt",
        ("trace", "x = 1", "--target", "x", "--position", "99"),
        "position",
    ),
    Command("a trace into a file", ("trace", "x", "--target", "x", "--out", "a.txt"), "out", TEXT),
    Command("a work that is unknown", ("reproduce", "newton"), "newton|song-zhong"),
    Command("a row that is unknown", ("reproduce", "song-zhong", "--row", "GPT-9"), "row"),
    Command("an experiment that is unknown", ("experiment", "cooking"), "cooking|addition"),
    Command("a scale that is unknown", ("experiment", "addition", "--scale", "huge"), "scale|huge"),
    Command(
        "a setting that is unknown",
        ("experiment", "addition", "--scale", "smoke", "--set", "salt=1"),
        "salt|setting",
    ),
    Command(
        "a setting without a value",
        ("experiment", "addition", "--scale", "smoke", "--set", "steps"),
        "steps|setting",
    ),
]
