"""`quantbench models`: the presets that --model knows."""

from __future__ import annotations

from dataclasses import asdict

from quantbench.cli.options import command, json_option
from quantbench.cli.output import output, plain_table, print_json, show
from quantbench.workload.presets import preset, preset_names, preset_source, published_parameters


@command
def models(as_json: bool = json_option()) -> None:
    """The presets that --model knows: dimensions, parameters, and where they come from."""
    if as_json:
        print_json(
            [
                {"name": name, "published_parameters": published_parameters(name), "source": preset_source(name)}
                | asdict(preset(name))
                for name in preset_names()
            ]
        )
        return
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq")
    rows = []
    for name in preset_names():
        shape = preset(name)
        unusual = [
            *(["unfused attention"] if shape.attention == "unfused" else []),
            *(["dropout"] if shape.dropout else []),
            *([f"sliding window {shape.sliding_window}"] if shape.sliding_window else []),
        ]
        parameters = f"{published_parameters(name) / 1e9:.3g} B"
        rows.append((name, parameters, *(str(getattr(shape, size)) for size in sizes), ", ".join(unusual)))
    titles = (f">{size}".replace("kv_", "kv ") for size in sizes)
    table = plain_table(("model", ">parameters", *titles, "not as usual"), rows)
    notes = "seq: as pre-trained. --json also has where each model's dimensions come from."
    show(output(), (table, notes, "\nNext: quantbench advise --model llama-3-8b --gpu h100-sxm5-80gb"))
