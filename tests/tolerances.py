"""How far apart two correct float32 computations of the same thing may be.

Another processor, attention kernel, batch size or amount of padding adds the same products in
another order. A float32 sum of n terms is then off by about eps * sqrt(n) times the size of its
terms (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 2.8), and a
network chains such sums.

Exact equality is for the same computation done again: the same graph, shapes and threads.
"""

EPSILON = 2.0**-23

# A tiny model chains some 16 sums (two layers of projections, scores, contexts, feed-forward and
# norms) of up to 64 terms, whose values reach about 4: eps * sqrt(16 * 64) * 4 = 1.5e-5. Kernels
# were seen 6e-6 apart. Another input, label, pooling or mask moves an output by 1e-3 or more.
OUTPUTS = 2e-5
"""Absolute tolerance for what a tiny model's graph gives: logits, hidden states, pooled vectors."""
LARGER = OUTPUTS / 4
"""Relative tolerance beside it, where values are larger."""

# A softmax passes on half of its logits' error at most, and a vector of 32 values of size 1 has a
# length above 5: normalized, its components have a fifth of the error.
SCORES = 1e-5
"""Absolute tolerance for probabilities and components of normalized vectors."""
