"""A service of a named shape: configuration, tokenizer, and weights that every engine draws alike.

The weights' loader is part of the benchmarks, and engines run in processes that a service starts. vLLM finds the loader
there as it finds any plugin: by an entry point on PYTHONPATH.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from loadtests.shapes import SHAPES, TOKENIZER_VOCAB_SIZE, write_shape
from services.config import ServiceConfig
from wisp_core.errors import ConfigurationError

LOAD_FORMAT = "wisp_bench"
"""As `loadtests.bench.child.weights` registers it, which only a process with vLLM can import."""

_ROOT = Path(__file__).parents[2]
_ENTRY_POINTS = """\
[vllm.general_plugins]
wisp_bench_weights = loadtests.bench.child.weights:register
"""


def with_made_up_weights(config: ServiceConfig, shape_name: str, directory: Path) -> ServiceConfig:
    """``config`` serving ``shape_name`` from ``directory``, with the small tokenizer's vocabulary.

    Raises ConfigurationError for an unknown shape.
    """
    if shape_name not in SHAPES:
        raise ConfigurationError(f"--model {shape_name}: no such directory, and no shape: {', '.join(SHAPES)}")
    model = directory / "model"
    # Sampled ids must have words: random weights draw from the whole vocabulary.
    write_shape(model, replace(SHAPES[shape_name], vocab_size=TOKENIZER_VOCAB_SIZE))
    facts = directory / "wisp_bench_weights-1.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: wisp-bench-weights\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(_ENTRY_POINTS)
    engine = config.replica.engine | {"load_format": LOAD_FORMAT}
    env = config.replica.env | {"PYTHONPATH": python_path(directory)}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(model)}),
            "replica": config.replica.model_copy(update={"engine": engine, "env": env}),
        }
    )


def python_path(directory: Path) -> str:
    """PYTHONPATH of a process that shall find the plugin, this project and what this process was given."""
    return os.pathsep.join([str(directory), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
