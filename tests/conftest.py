"""Settings of every test: property tests draw the same examples on every machine and have no deadline."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unmask", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("unmask")

# As in the command line: threads that spin between parallel regions make tests ten times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
