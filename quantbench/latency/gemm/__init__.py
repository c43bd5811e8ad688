"""The latency model of matrix products: `model.GemmModel` fits, predicts and stores; the other modules are its parts.

From bottom to top: `menu` (the kernels a library chooses from), `cost_model` (the time of each kernel), `fitting` (its
parameters from measured rows), `trees` (what the cost model leaves unexplained), `ensemble` (several members together),
`training` (a whole fit, and what other GPUs teach), `distilled` (the fast form), `model`, `files`, `cliffs`.
"""
