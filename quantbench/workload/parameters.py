"""Counts the parameters of a model, and pads its vocabulary as Megatron does."""

from dataclasses import replace

from quantbench.workload.transformer import TransformerShape

#: Ratio hidden / layers that is assumed for a model of unknown depth. It is near the middle of the
#: range from 128 (12288 / 96) to 205 (14336 / 70) that the BigScience team tried for 200 B
#: parameters (bigscience-workshop/bigscience, tr11-176B-ml/chronicles-prequel.md).
USUAL_ASPECT = 160


def gpt_layer_parameters(hidden: int) -> int:
    """Returns the number of parameters in a GPT layer whose MLP has width 4 · hidden.

    The layer has 12·hidden² weights, and 13·hidden parameters in biases and norms.
    """
    return 12 * hidden**2 + 13 * hidden


def parameters(shape: TransformerShape) -> int:
    """Returns the model's number of parameters, including biases and norms.

    `TransformerShape.parameters` counts only matrices. Position embeddings are not included,
    because most current models have none.

    >>> from quantbench.workload.presets import preset
    >>> parameters(preset("bloom-176b"))
    176247242752
    """
    attention_width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # In addition to matrices, a layer has biases of qkv, proj, up and down, and weights and biases
    # of two norms. Gated models have norm weights, but no biases. One more norm follows the last
    # layer.
    if shape.gated:
        return shape.parameters + shape.layers * 2 * shape.hidden + shape.hidden
    small = attention_width + shape.ffn + 6 * shape.hidden
    return shape.parameters + shape.layers * small + 2 * shape.hidden


def useful_parameters(shape: TransformerShape, vocab: int) -> int:
    """Returns the number of parameters without the vocabulary's padding.

    vocab: size of the vocabulary without padding.
    """
    if shape.vocab > vocab:
        shape = replace(shape, vocab=vocab)
    return parameters(shape)


def padded_vocab(vocab: int, tp: int) -> int:
    """Returns a vocabulary size padded to a multiple of 128 · tp, as in Megatron.

    >>> padded_vocab(250000, 8)
    250880
    """
    multiple = 128 * tp
    return -(-vocab // multiple) * multiple


def layers_within(
    shape: TransformerShape, budget: float, tolerance: float
) -> tuple[float, float, float]:
    """Returns the depths at which the model has a given number of parameters.

    The result is the number of layers for (1 − tolerance), 1 and (1 + tolerance) times the budget.
    The numbers need not be whole.

    shape: all sizes of the model except the number of layers.
    budget: number of parameters.
    tolerance: relative tolerance of the budget.
    """
    # Each layer after the dense layers adds the same number of parameters. Two depths, the smallest
    # possible and one layer more, determine this line.
    least = shape.dense_layers + 1
    one = parameters(replace(shape, layers=least))
    each = parameters(replace(shape, layers=least + 1)) - one
    rest = one - least * each

    def layers(share: float) -> float:
        return (share * budget - rest) / each

    return layers(1 - tolerance), layers(1.0), layers(1 + tolerance)
