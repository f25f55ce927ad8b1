"""Name the metrics of a judge for people, and say which of them are better when they are lower."""

from __future__ import annotations

TITLES = {
    "mae": "MAE",
    "rmse": "RMSE",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "kendall": "Kendall",
    "qwk": "QWK",
    "within_1": "within 1",
    "accuracy": "accuracy",
    "macro_f1": "macro-F1",
    "kappa": "kappa",
    "swap_consistency": "swap consistency",
    "ece": "calibration error",
    "rouge_l": "ROUGE-L",
}
LOWER_IS_BETTER = frozenset({"mae", "rmse", "ece"})
