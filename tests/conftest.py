"""Settings of every test: property tests draw the same examples on every machine and have no deadline."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unmask", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("unmask")
