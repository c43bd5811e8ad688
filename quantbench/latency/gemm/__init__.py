"""Models GEMM latencies.

Entry point: `model.GemmModel`; the other modules are its parts. From bottom to top: `cost_model` (time of each kernel a
library may choose), `trees` (residual of the cost model), `ensemble` (average of several members), `training` (fit and
priors), `distilled` (fast form), `files` (JSON), `model`, `cliffs` (probability of cliffs).
"""
