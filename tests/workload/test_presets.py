"""Published models: their shapes' own parameter counts against the published ones."""

import pytest

from quantbench.errors import InputError
from quantbench.workload.presets import preset, preset_names, published

# The shape leaves out biases, norms and positions: 0.2 % of gpt2-xl, less of larger ones. OPT and
# Falcon are published in round numbers.
TOLERANCE = 0.006


@pytest.mark.parametrize("name", preset_names())
def test_parameters_agree_with_the_published_count(name: str) -> None:
    assert preset(name).parameters == pytest.approx(
        published(name)["published_parameters"], rel=TOLERANCE
    )


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_dated_source(name: str) -> None:
    assert any(f"20{year}" in published(name)["source"] for year in range(18, 27))


def test_names_that_others_rely_on() -> None:
    assert set(preset_names()) >= {
        "gpt3-175b", "bloom-176b", "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b",
        "llama-3-405b", "mistral-7b", "gpt2-xl", "gpt-neox-20b", "opt-66b", "opt-175b", "falcon-40b", "falcon-180b",
        "qwen2.5-7b", "qwen2.5-72b", "pythia-6.9b", "gemma-7b",
        "gpt-j-6b", "pythia-70m", "pythia-12b", "falcon-7b", "qwen2.5-0.5b", "qwen2.5-14b", "qwen3-8b", "gemma-2-9b",
        "gemma-3-27b", "mistral-nemo-12b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.3-70b", "phi-4",
    }  # fmt: skip


def test_presets_carry_how_they_were_trained() -> None:
    # What 2022's runs say of themselves; everything else runs one attention kernel and drops
    # nothing out.
    unfused = {name for name in preset_names() if preset(name).attention == "unfused"}
    assert unfused == {"bloom-7b1", "bloom-176b", "opt-66b", "opt-175b", "gpt-neox-20b"}
    dropped = {name for name in preset_names() if preset(name).dropout}
    assert dropped == unfused - {"gpt-neox-20b"} | {"gpt2-xl", "phi-2"}
    windows = {
        name: preset(name).sliding_window
        for name in ("mistral-7b", "mistral-7b-v0.3", "gemma-3-1b")
    }
    assert windows == {"mistral-7b": 4096, "mistral-7b-v0.3": 0, "gemma-3-1b": 512}


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        preset("llama-3-80b")
    assert (
        str(caught.value)
        == "model: 'llama-3-80b'; expected one of llama-3-8b, llama-3-70b, llama-3.1-8b"
    )


def test_a_model_unlike_any_lists_all() -> None:
    with pytest.raises(
        InputError, match=r"model: 'zzz'; expected one of gpt2-xl, gpt3-175b, .*, phi-4, .*"
    ):
        preset("zzz")
