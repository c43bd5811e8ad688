"""Fits Gaussian processes with scikit-learn and evaluates them with numpy and scipy.

Attention models correct their cost model with a `GaussianProcess`. The covariance function is a
Matérn 3/2 with one length scale per feature, plus noise. The hyperparameters are fitted on a subset
of the rows, because the cost grows with the cube of the number of rows; the posterior then uses all
rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError
from quantbench.latency.autodiff import FloatArray
from quantbench.latency.forest import chunks

_SQRT3 = 3**0.5
# Decimals kept in JSON. A rounding of standardised features to 1e-6 is far below any length scale.
_DIGITS = 6
# Rows per batch. The number keeps the kernel matrix below some 40 MB.
_BATCH = 8192


@dataclass(frozen=True)
class GaussianProcess:
    """Gaussian process posterior over standardised features.

    features: (rows, features), standardised features of the fitted rows.
    targets: (rows,), fitted values minus `centre`.
    shift, spread: (features,), mean and standard deviation of the raw features.
    length_scales: (features,), length scale of each standardised feature.
    amplitude: prior variance of the function.
    noise: variance of the noise.
    centre: mean of the fitted values, which the process predicts far from all rows.
    """

    features: FloatArray
    targets: FloatArray
    shift: FloatArray
    spread: FloatArray
    length_scales: FloatArray
    amplitude: float
    noise: float
    centre: float

    @classmethod
    def fit(
        cls, features: FloatArray, targets: FloatArray, *, seed: int = 0, subset: int = 300
    ) -> GaussianProcess:
        """Fits `targets` (rows,) as a function of `features` (rows, features), not standardised.

        subset: largest number of rows that the hyperparameters are fitted on.

        Raises InputError for fewer than 4 rows and for numbers that are not finite.
        """
        import warnings

        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

        if len(features) < 4 or not np.isfinite(features).all() or not np.isfinite(targets).all():
            what = f"{len(features)} rows"
            raise InputError("GaussianProcess.fit", what, "at least 4 rows of finite numbers")
        shift = features.mean(axis=0)
        spread = features.std(axis=0)
        spread = np.where(spread > 1e-9, spread, 1.0)
        scaled = (features - shift) / spread
        centre = float(targets.mean())
        variance = float(np.var(targets)) + 1e-8
        # Start and bounds of each hyperparameter: amplitude and noise relative to the variance of
        # the targets, length scales in standardised features.
        level = ConstantKernel(variance, (1e-3 * variance, 1e2 * variance))
        smooth = Matern(np.full(features.shape[1], 3.0), (0.5, 100.0), nu=1.5)
        noise = WhiteKernel(0.01 * variance, (1e-5 * variance, 0.1 * variance))
        rows = np.random.default_rng(seed).permutation(len(scaled))[:subset]
        search = GaussianProcessRegressor(level * smooth + noise, random_state=seed)
        with warnings.catch_warnings():
            # A length scale at its upper bound causes a warning. It only means that the feature has
            # no effect.
            warnings.simplefilter("ignore", ConvergenceWarning)
            search.fit(scaled[rows], targets[rows] - centre)
        found = search.kernel_
        return cls(
            features=scaled,
            targets=targets - centre,
            shift=shift,
            spread=spread,
            length_scales=np.asarray(found.k1.k2.length_scale, dtype=float),
            amplitude=float(found.k1.k1.constant_value),
            noise=float(found.k2.noise_level),
            centre=centre,
        )

    def condition(self, rows: npt.NDArray[np.int64]) -> GaussianProcess:
        """Returns the posterior given only these rows, with the same hyperparameters."""
        return replace(self, features=self.features[rows], targets=self.targets[rows])

    def predict(self, features: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Predicts the function's mean and standard deviation, without noise, (n,) each.

        features: (n, features), not standardised.
        """
        from scipy.linalg import solve_triangular

        mean = np.empty(len(features))
        deviation = np.empty(len(features))
        for part in chunks(len(features), _BATCH):
            cross = self._kernel((features[part] - self.shift) / self.spread, self.features)
            mean[part] = self.centre + cross @ self._weights
            explained = solve_triangular(self._cholesky, cross.T, lower=True, check_finite=False)
            deviation[part] = np.sqrt(np.maximum(self.amplitude - (explained**2).sum(axis=0), 0.0))
        return mean, deviation

    @cached_property
    def _cholesky(self) -> FloatArray:
        """Cholesky factor of the noisy targets' covariance matrix, (rows, rows)."""
        kernel = self._kernel(self.features, self.features)
        # The jitter for numerical stability is scikit-learn's (alpha = 1e-10), times the amplitude.
        kernel[np.diag_indices_from(kernel)] += self.noise + 1e-10 * self.amplitude
        return np.asarray(np.linalg.cholesky(kernel), dtype=np.float64)

    @cached_property
    def _weights(self) -> FloatArray:
        """Weights of the rows' covariances in a predicted mean, (rows,)."""
        from scipy.linalg import cho_solve

        return np.asarray(cho_solve((self._cholesky, True), self.targets))

    def _kernel(self, left: FloatArray, right: FloatArray) -> FloatArray:
        """Returns the covariances of the function between two sets of rows, (left, right)."""
        a = left / self.length_scales
        b = right / self.length_scales
        squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2.0 * (a @ b.T)
        distance = _SQRT3 * np.sqrt(np.maximum(squared, 0.0))
        return np.asarray(self.amplitude * (1.0 + distance) * np.exp(-distance))

    def to_json(self) -> dict[str, Any]:
        """Returns the process as JSON values, with rounded features and targets."""
        rounded = replace(
            self,
            features=np.round(self.features, _DIGITS),
            targets=np.round(self.targets, _DIGITS),
        )
        data: dict[str, Any] = {"kernel": "matern-3/2"}
        for field in fields(self):
            data[field.name] = np.asarray(getattr(rounded, field.name)).tolist()
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GaussianProcess:
        """Inverse of `to_json`, up to rounding."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = data[field.name]
            values[field.name] = np.array(value, float) if isinstance(value, list) else value
        return cls(**values)
