"""The paper's numbers: "Rethinking Normalization Placement for LLMs: Post-Norm under Curriculum Depth Growing"
(arXiv 2608.13156). Three blocks of three layers, phases of 50,000 steps, one seed.

Kinds of training are named as in ``experiment.py``: ``grow``, ``freeze``, and ``joint1``, ``joint2``, ``joint3`` for joint
training over one, two and three phases' worth of steps.
"""

SOURCE = "arXiv 2608.13156"
BLOCKS = 3
SCALE = (
    "Qwen3-8B-Base's width, 3 blocks x 3 layers, phases of 50,000 steps of 64 FineWeb-Edu documents (about 3.11B tokens), "
    "one seed"
)

CE: dict[tuple[str, str], float] = {
    ("joint1", "pre"): 2.7603,
    ("grow", "pre"): 2.7658,
    ("joint1", "post"): 2.7607,
    ("grow", "post"): 2.7330,
    ("joint2", "post"): 2.7518,
    ("joint3", "post"): 2.7428,
    ("freeze", "pre"): 2.9104,
    ("freeze", "post"): 2.8772,
}
"""Validation cross-entropy at the scheduled endpoint (Tables 1, 3 and A3)."""

DELTA = {"joint1": 0.0004, "grow": -0.0328, "freeze": -0.0332}
INTERACTION = -0.0332
"""As printed with Table 1 and Table A3; the differences of the rounded cross-entropies are the same."""

FIRST_PHASE: dict[str, dict[str, float]] = {
    "pre": {"ce": 2.9802, "kd": 3.0155, "ppl": 19.69},
    "post": {"ce": 2.9846, "kd": 3.0183, "ppl": 19.78},
}
"""One block, at the end of phase 0 (Table 2)."""

REMOVAL: dict[tuple[str, str], tuple[tuple[float, float], ...]] = {
    ("grow", "pre"): ((8.13, 0.499), (2.36, 0.310), (0.02, 0.031)),
    ("grow", "post"): ((8.32, 0.483), (3.74, 0.365), (2.38, 0.342)),
    ("joint1", "pre"): ((8.05, 0.485), (1.47, 0.245), (2.34, 0.360)),
    ("joint1", "post"): ((0.55, 0.395), (0.99, 0.166), (4.00, 0.437)),
}
"""Delta CE and angular distance of each block (Table 4)."""

BUDGETS: dict[str, dict[str, float]] = {
    "joint1": {"layers": 9, "tokens": 3.11e9, "unique_tokens": 3.11e9},
    "grow": {"layers": 9, "tokens": 9.34e9, "unique_tokens": 3.11e9},
    "joint2": {"layers": 9, "tokens": 6.22e9, "unique_tokens": 6.22e9},
    "joint3": {"layers": 9, "tokens": 9.34e9, "unique_tokens": 9.34e9},
}
"""Layers at the end, tokens in all and unique tokens (Table A2)."""

TRANSITIONS: dict[tuple[str, int], dict[str, float]] = {
    ("pre", 1): {"jump": 0.0226, "auc_short": 0.0694, "auc_long": 0.1217, "recovery": 101},
    ("post", 1): {"jump": 0.2500, "auc_short": 0.1820, "auc_long": 0.1464, "recovery": 19914},
    ("pre", 2): {"jump": 0.0230, "auc_short": 0.0688, "auc_long": 0.1277, "recovery": 19054},
    ("post", 2): {"jump": 0.2847, "auc_short": 0.2059, "auc_long": 0.1774, "recovery": 19426},
}
"""Growth under each placement, by the phase that it begins (Table A4)."""

FIGURE_NOTES = {
    "figure4": (
        "The paper: after block 0 the standard deviation goes from 5.81 to 19.98 over the phases for pre-norm and stays "
        "between 0.07 and 0.19 for post-norm."
    ),
    "figure5a": (
        "The paper: document-boundary tokens go from 119 to 425 for pre-norm, 37 times the regular tokens at the end, and "
        "regular tokens from 7.1 to 11.5; for post-norm they are at 2.45 and 2.40."
    ),
    "figureA1": "The paper: the kurtosis of pre-norm is over 2400 in the last phase.",
}
"""What the paper gives in words about figures whose points it does not list."""
