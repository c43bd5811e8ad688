"""Defines and checks the timing options, which are part of every record's key."""

from dataclasses import dataclass

from quantbench.errors import InputError, UnsupportedError, require_choice, require_int

_CACHES = ("cold", "hot")
_MODES = ("auto", "events", "graph")
_DISTRIBUTIONS = ("normal", "uniform", "zeros", "integers")


@dataclass(frozen=True)
class TimingOptions:
    """Options that determine how each point is timed.

    cache: `cold` if the last-level cache must not contain a run's data when the run starts; `hot`
        to leave the cache as it is.
    mode: `events` times single runs between CUDA events, and `graph` replays CUDA graphs. `auto`
        means `events` on a GPU, for all points, so that their times can be compared.
    half_width: target for the relative half-width of the median's 95 % confidence interval.
    min_samples, max_samples: bounds on the number of accepted samples.
    max_time_s: time limit for sampling a point, in s. Sampling then stops even if the target is not
        reached.
    distribution: distribution of the inputs' values.
    seed: random seed of the inputs that providers prepare. `quantbench.providers.audit` replaces
        the inputs' values before they are timed.
    """

    cache: str = "cold"
    mode: str = "auto"
    half_width: float = 0.005
    min_samples: int = 10
    max_samples: int = 2000
    max_time_s: float = 2.0
    distribution: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        who = "TimingOptions"
        require_choice(who, "cache", self.cache, _CACHES)
        require_choice(who, "mode", self.mode, _MODES)
        require_choice(who, "distribution", self.distribution, _DISTRIBUTIONS)
        require_int(who, "min_samples", self.min_samples, low=3, high=1_000_000)
        require_int(who, "max_samples", self.max_samples, low=self.min_samples, high=1_000_000)
        require_int(who, "seed", self.seed, low=0)
        if not 0 < self.half_width < 1:
            raise InputError(
                who, f"half_width = {self.half_width!r}", "a share between 0 and 1 (0.005 is 0.5 %)"
            )
        if not 0 < self.max_time_s <= 3600:
            raise InputError(
                who, f"max_time_s = {self.max_time_s!r}", "seconds above 0 and at most 3600"
            )

    def require_device(self, kind: str) -> None:
        """Raises UnsupportedError if a device of this kind (cuda, cpu) cannot use these options."""
        if kind == "cpu" and self.mode == "graph":
            raise UnsupportedError(
                "timing", "mode = 'graph' on a processor", "a CUDA device, or mode = 'auto'"
            )
