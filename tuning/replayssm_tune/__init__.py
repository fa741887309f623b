"""Measure launch choices on the GPU here and keep the best as registry rows: ``replayssm-tune``."""
