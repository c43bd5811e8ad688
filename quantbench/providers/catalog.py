"""Lists the providers by id, and creates a provider from its id (`make`).

There are three forms of an id:
- `torch.mm` is a variant of a library;
- `triton.persistent@128x256x64` is one of quantbench's Triton kernels, with a fixed tile;
- `package.module:Class` is a user-defined provider.

On the command line, the name of a library stands for its default variants (`expand`). torch or
triton is imported only when a provider is created.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING

from quantbench.errors import InputError, QuantbenchError
from quantbench.launch import Tile
from quantbench.reasons import reason_line

if TYPE_CHECKING:
    from quantbench.providers.base import Provider

#: built-in providers, by id: (kind of workload, module, class)
_CATALOG: dict[str, tuple[str, str, str]] = {
    "torch.mm": ("gemm", "torch_gemm", "TorchMm"),
    "torch.grouped_loop": ("grouped_gemm", "torch_moe", "TorchGroupedLoop"),
    "torch.grouped_mm": ("grouped_gemm", "torch_moe", "TorchGroupedMm"),
    "torch.permute": ("permute", "torch_moe", "TorchPermute"),
    "torch.eager": ("softmax", "torch_attention", "TorchEagerSoftmax"),
    "torch.flash": ("attention", "torch_attention", "TorchAttention"),
    "torch.cudnn": ("attention", "torch_attention", "TorchAttention"),
    "torch.efficient": ("attention", "torch_attention", "TorchAttention"),
    "torch.math": ("attention", "torch_attention", "TorchAttention"),
    "triton.data_parallel": ("gemm", "triton_kernels", "TritonGemm"),
    "triton.split_k": ("gemm", "triton_kernels", "TritonGemm"),
    "triton.stream_k": ("gemm", "triton_kernels", "TritonGemm"),
    "triton.persistent": ("gemm", "triton_kernels", "TritonGemm"),
    "triton.grouped": ("grouped_gemm", "triton_kernels", "TritonGrouped"),
    "triton.grouped_persistent": ("grouped_gemm", "triton_kernels", "TritonGrouped"),
    "triton.fused": ("softmax", "triton_kernels", "TritonFusedSoftmax"),
    "triton.flash": ("attention", "triton_kernels", "TritonFlash"),
}

#: default variants, by the name of the library
_DEFAULTS: dict[str, tuple[str, ...]] = {
    "torch": tuple(name for name in _CATALOG if name.startswith("torch.")),
    "triton": ("triton.data_parallel", "triton.grouped", "triton.fused", "triton.flash"),
}
#: providers of grouped GEMMs that do not pad the rows of the experts
UNPADDED = ("torch.grouped_loop",)
#: methods that the class of a user-defined provider must have
_METHODS = ("unsupported", "prepare")


def expand(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the provider ids that names from the command line stand for.

    The name of a library is expanded to its default variants. A user-defined provider is not
    imported here.

    Raises InputError for an unknown name, and for a tile that the provider cannot have.

    >>> expand(["triton"])
    ('triton.data_parallel', 'triton.grouped', 'triton.fused', 'triton.flash')
    """
    ids: list[str] = []
    for name in names:
        base, tile = _split(name)
        if "@" in name and not base.startswith("triton."):
            expected = "a tile for one of our kernels, as triton.persistent@128x256"
            raise InputError("provider", repr(name), expected)
        if base not in _CATALOG and name not in _DEFAULTS and ":" not in name:
            known = ", ".join([*_DEFAULTS, *_CATALOG])
            raise InputError(
                "provider",
                repr(name),
                f"package.module:Class or one of {known} (cuBLAS's products are torch.mm)",
            )
        if tile and "gemm" not in _CATALOG[base][0] and (tile.block_k or tile.split_k > 1):
            expected = "a tile without block_k and parts, which only products have"
            raise InputError("provider", repr(name), expected)
        ids += _DEFAULTS.get(name, (name,))
    return tuple(dict.fromkeys(ids))


def _split(provider_id: str) -> tuple[str, Tile | None]:
    """Splits an id into the part before the `@` and the tile after it; the tile may be None."""
    if ":" in provider_id:
        return provider_id, None
    base, at, tile = provider_id.partition("@")
    return base, Tile.parse(tile) if at else None


def gemm_tiles(
    provider_ids: Sequence[str], declared: Mapping[str, Tile]
) -> tuple[Tile | None, ...]:
    """Returns the distinct tiles of the providers of GEMMs and grouped GEMMs.

    A tile comes from the provider's declaration or from its id. None in the result means that some
    providers have neither.

    declared: tiles of user-defined providers, from `declared_tiles`.
    """
    tiles = []
    for name in provider_ids:
        if runs_kind(name, "gemm") or runs_kind(name, "grouped_gemm"):
            tiles.append(declared.get(name) or _split(name)[1])
    return tuple(dict.fromkeys(tiles))


def runs_kind(provider_id: str, kind: str) -> bool:
    """Returns whether a provider runs workloads of this kind.

    Returns True for every user-defined provider, because its class is not imported here. The
    provider refuses unsupported kinds later.
    """
    return ":" in provider_id or _CATALOG[_split(provider_id)[0]][0] == kind


def require_found(names: Sequence[str]) -> None:
    """Raises InputError if the package of a user-defined provider cannot be found.

    The package must be installed or in the working directory, where the worker that imports it
    looks first. Nothing is imported here.
    """
    for name in names:
        module, colon, within = name.partition(":")
        if colon and not (module and within):
            raise InputError("provider", repr(name), "package.module:Class")
        if module.endswith(".py") or "/" in module:
            stem = Path(module).stem
            expected = f"package.module:Class, as {stem}:{within} for {stem}.py in this folder"
            raise InputError("provider", repr(name), expected)
        package = module.partition(".")[0]
        if colon and PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
            found = f"{name!r} (no module named {package!r})"
            raise InputError("provider", found, "a class that can be imported")


def local_modules(names: Sequence[str]) -> list[Path]:
    """Returns the files and package folders in the working directory that define the providers.

    Installed packages and built-in providers have no entry in the result.
    """
    found = []
    for name in names:
        spec = PathFinder.find_spec(name.partition(":")[0].partition(".")[0], [str(Path.cwd())])
        if spec is not None and spec.origin is not None:
            path = Path(spec.origin)
            found.append(path.parent if path.stem == "__init__" else path)
    return found


def declared_tiles(names: Sequence[str]) -> dict[str, Tile]:
    """Creates the user-defined providers among the names, and returns the tiles that they declare.

    A provider declares its tile by an attribute `tile`. Providers without it are not in the result.
    Raises InputError if the attribute is not a `Tile`.
    """
    tiles = {}
    for name in names:
        tile = getattr(make(name), "tile", None) if ":" in name else None
        if isinstance(tile, Tile):
            tiles[name] = tile
        elif tile is not None:
            found = f"{name!r} with tile = {tile!r}"
            raise InputError("provider", found, "a quantbench.launch.Tile, such as Tile(128, 64)")
    return tiles


def make(provider_id: str) -> Provider:
    """Creates the provider with this id.

    This imports the provider's module, and with it torch or triton.

    Raises InputError if the id is unknown, if it stands for several providers, or if its class
    cannot be imported or used.
    """
    variants = expand([provider_id])
    if variants != (provider_id,):
        raise InputError("provider", repr(provider_id), f"one of {', '.join(variants)}")
    base, tile = _split(provider_id)
    if ":" in provider_id:
        module, name = provider_id.split(":", 1)
    else:
        _, module, name = _CATALOG[base]
        module = f"quantbench.providers.{module}"
    try:
        maker = getattr(import_module(module), name)
        lacks = ""
        missing = [method for method in _METHODS if not callable(getattr(maker, method, None))]
        if not isinstance(maker, type):
            lacks = f"a {type(maker).__name__}"
        elif missing:
            lacks = f"a class without {', '.join(missing)}"
        if lacks:
            found = f"{provider_id!r} ({lacks})"
            raise InputError("provider", found, f"a class with {', '.join(_METHODS)}")
        provider: Provider = maker() if ":" in provider_id else maker(provider_id, tile)
    except QuantbenchError:
        raise
    except Exception as error:
        found = f"{provider_id!r} ({_raised(error)})"
        expected = "a class that can be imported and is made without arguments"
        raise InputError("provider", found, expected) from error
    return provider


def _raised(error: Exception) -> str:
    """Describes an error that a provider's module raised, with file and line in the module."""
    frames = extract_tb(error.__traceback__)
    places = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    text = f"{type(error).__name__}: {reason_line(error).removeprefix(f'{type(error).__name__}: ')}"
    # The first frame is that of `make`, and the second that of `import_module` or of the provider.
    # After a syntax error there is no third frame; its text names file and line.
    for place in places[2:3]:
        text += f" ({Path(place.filename).name}, line {place.lineno})"
    return text
