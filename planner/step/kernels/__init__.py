"""The kernels of a step: what a compiler launches at once, and what each computes and moves."""
