"""Arguments and results of a step: what is traced, what is static, what is updated in place."""
