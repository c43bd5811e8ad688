"""Command `models`: lists the presets that --model knows."""

from quantbench.cli.options import command
from quantbench.cli.output import Result, encoded, plain_table
from quantbench.units import billions
from quantbench.workload.presets import preset, preset_names, published


@command
def models() -> Result:
    """List the presets that --model knows, with dimensions, parameters and their sources."""
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq")
    rows = []
    answer = []
    for name in preset_names():
        shape = preset(name)
        notes = {
            "unfused attention": shape.attention == "unfused",
            f"{shape.experts} experts of {shape.moe_ffn}, top {shape.top_k}": shape.experts,
            "dropout": shape.dropout,
            f"sliding window {shape.sliding_window}": shape.sliding_window,
        }
        unusual = ", ".join(note for note, holds in notes.items() if holds)
        about = published(name)
        answer.append({"name": name, **about, **encoded(shape)})
        values = [str(getattr(shape, size)) for size in sizes]
        rows.append((name, billions(about["published_parameters"]), *values, unusual))
    titles = (f">{size}".replace("kv_", "kv ") for size in sizes)
    table = plain_table(("model", ">parameters", *titles, "not as usual"), rows)
    sources = "seq: as pre-trained. --json also has where each model's dimensions come from."
    next_command = "\nNext: quantbench advise --model llama-3-8b --gpu h100-sxm5-80gb"
    return Result(answer, (table, sources, next_command))
