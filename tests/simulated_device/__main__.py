"""Build the device, and say where it is."""

import sys

from simulated_device.build import build, why_not

reason = why_not()
if reason is not None:
    sys.exit(reason)
print(build())
