"""`quantbench models`: the presets that --model knows."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.table import Table

from quantbench.cli.console import output, say
from quantbench.workload.presets import preset, preset_names, preset_source, published_parameters


def models(as_json: bool) -> None:
    """Print every preset: its dimensions and where they come from."""
    if as_json:
        found = [
            {
                "name": name, "published_parameters": published_parameters(name), "source": preset_source(name),
                **asdict(preset(name)),
            }
            for name in preset_names()
        ]  # fmt: skip
        print(json.dumps(found, indent=1))
        return
    console = output()
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("model", no_wrap=True)
    names = ("parameters", "layers", "hidden", "heads", "kv heads", "head_dim", "ffn", "vocab", "seq")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("not as usual", overflow="fold")
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
