"""Command `models`: lists the presets that --model knows.

Entry point: `models`, loaded by `app`.
"""

from __future__ import annotations

from dataclasses import asdict

from quantbench.cli.options import command, json_option
from quantbench.cli.output import plain_table, print_result
from quantbench.workload.presets import preset, preset_names, preset_source, published_parameters


@command
def models(as_json: bool = json_option()) -> None:
    """List the presets that --model knows, with dimensions, parameters and their sources."""
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq")
    rows, answer = [], []
    for name in preset_names():
        shape = preset(name)
        unusual = [
            *(["unfused attention"] if shape.attention == "unfused" else []),
            *([f"{shape.experts} experts of {shape.moe_ffn}, top {shape.top_k}"] if shape.experts else []),
            *(["dropout"] if shape.dropout else []),
            *([f"sliding window {shape.sliding_window}"] if shape.sliding_window else []),
        ]
        parameters = published_parameters(name)
        source = preset_source(name)
        answer.append({"name": name, "published_parameters": parameters, "source": source, **asdict(shape)})
        rows.append(
            (name, f"{parameters / 1e9:.3g} B", *(str(getattr(shape, size)) for size in sizes), ", ".join(unusual))
        )
    titles = (f">{size}".replace("kv_", "kv ") for size in sizes)
    table = plain_table(("model", ">parameters", *titles, "not as usual"), rows)
    notes = "seq: as pre-trained. --json also has where each model's dimensions come from."
    next_command = "\nNext: quantbench advise --model llama-3-8b --gpu h100-sxm5-80gb"
    print_result(as_json, lambda: answer, (table, notes, next_command))
