"""Its place puts this folder on the path, so that every test finds ``ranks`` and ``tiny``."""

from hypothesis import HealthCheck, settings

import megatron_patches

megatron_patches.apply()  # before a test imports megatron, in whatever order files are collected

# No example is a failure for its time: a machine that others use too would decide about it.
settings.register_profile("tba", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tba")
