"""`quantbench models`: the presets that --model knows."""

from __future__ import annotations

from dataclasses import asdict

from quantbench.cli.options import AsJson
from quantbench.cli.output import output, plain_table, print_json, say
from quantbench.workload.presets import preset, preset_names, preset_source, published_parameters


def models(as_json: AsJson = False) -> None:
    """The presets that --model knows: dimensions, parameters, and where they come from."""
    if as_json:
        found = [
            {
                "name": name, "published_parameters": published_parameters(name), "source": preset_source(name),
                **asdict(preset(name)),
            }
            for name in preset_names()
        ]  # fmt: skip
        print_json(found)
        return
    console = output()
    numbers = ("parameters", "layers", "hidden", "heads", "kv heads", "head_dim", "ffn", "vocab", "seq")
    table = plain_table("model", *numbers, "not as usual", right=numbers)
    for name in preset_names():
        shape = preset(name)
        unusual = [
            *(["unfused attention"] if shape.attention == "unfused" else []),
            *(["dropout"] if shape.dropout else []),
            *([f"sliding window {shape.sliding_window}"] if shape.sliding_window else []),
        ]
        sizes = (
            shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab, shape.seq,
        )  # fmt: skip
        table.add_row(
            name, f"{published_parameters(name) / 1e9:.3g} B", *(str(size) for size in sizes), ", ".join(unusual)
        )
    console.print(table)
    say(console, "seq: as pre-trained. --json also has where each model's dimensions come from.")
    say(console, "\nNext: quantbench advise --model llama-3-8b --gpu h100-sxm5-80gb")
