"""The distillation objective and the language-modelling head that computes it."""
