#!/usr/bin/env python3
"""Writes tests/fixtures/stats/paired.json: what scipy and statsmodels say about paired comparisons.

Enters: nothing but the seed below. Leaves: samples with the p values, corrections, intervals and detectable effects that the Rust
statistics are held against. See tests/fixtures/README.md for the versions and the command.
"""

import json
import platform
from pathlib import Path

import numpy as np
import scipy
import statsmodels
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

SEED = 20240612


def rounded(values: np.ndarray) -> list[float]:
    """Values short enough to be read, before anything is computed from them."""
    return [float(f"{value:.5g}") for value in values]


def holm(random: np.random.Generator) -> list[dict]:
    families = [[0.04], [0.01, 0.04, 0.03, 0.005], [0.02, 0.02, 0.02], [0.9, 0.6, 0.0005, 0.011]]
    families.append(rounded(random.uniform(0.0, 0.1, 24)))
    return [{"p": p, "adjusted": multipletests(p, method="holm")[1].tolist()} for p in families]


def t_interval_log(random: np.random.Generator) -> list[dict]:
    cases = []
    for pairs in (2, 5, 12, 30):
        values = rounded(np.exp(random.normal(0.02, 0.015, pairs)))
        found = stats.ttest_1samp(np.log(values), 0.0)
        interval = found.confidence_interval(0.95)
        low, high = np.exp(interval.low), np.exp(interval.high)
        cases.append({"values": values, "center": float(stats.gmean(values)), "low": float(low), "high": float(high)})
    return cases


def welch_log(random: np.random.Generator) -> list[dict]:
    cases = []
    for left, right in ((2, 3), (10, 10), (12, 40)):
        a = rounded(10 * np.exp(random.normal(0.0, 0.01, left)))
        b = rounded(11 * np.exp(random.normal(0.0, 0.04, right)))
        interval = stats.ttest_ind(np.log(b), np.log(a), equal_var=False).confidence_interval(0.95)
        center = stats.gmean(b) / stats.gmean(a)
        low, high = np.exp(interval.low), np.exp(interval.high)
        cases.append({"a": a, "b": b, "center": float(center), "low": float(low), "high": float(high)})
    return cases


def minimum_detectable() -> list[dict]:
    cases = []
    for pairs, alpha, power in [(8, 0.05, 0.8), (12, 0.05, 0.8), (20, 0.05, 0.8), (30, 0.05, 0.9), (20, 0.0125, 0.8)]:
        effect = TTestPower().solve_power(nobs=pairs, alpha=alpha, power=power, alternative="two-sided")
        cases.append({"pairs": pairs, "alpha": alpha, "power": power, "effect_over_sd": float(effect)})
    return cases


def main() -> None:
    random = np.random.default_rng(SEED)
    found = {
        "made_by": "scripts/make_stats_fixtures.py",
        "seed": SEED,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "statsmodels": statsmodels.__version__,
        },
        "holm": holm(random),
        "t_interval_log": t_interval_log(random),
        "welch_log": welch_log(random),
        "minimum_detectable": minimum_detectable(),
    }
    path = Path(__file__).resolve().parent.parent / "tests/fixtures/stats/paired.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
