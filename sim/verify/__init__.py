"""Verification policies: how many draft tokens of each request the target checks in a step.

Start with `base` (the seam), then one file a policy, `dspark` first; `kernels` is the compiled part of them. `check`
proves or refutes that a policy is lossless.
"""

from sim.verify.base import POLICIES, Policy, Verifier

# In the order in which they are listed to a person.
# isort: off
from sim.verify.none import NoSpeculation
from sim.verify.mtp1 import Mtp1
from sim.verify.fixed import Fixed
from sim.verify.threshold import Threshold
from sim.verify.batch_table import BatchTable
from sim.verify.dspark import Dspark
from sim.verify.dspark_async import DsparkAsync
from sim.verify.oracle import Oracle
# isort: on

__all__ = [
    "POLICIES",
    "BatchTable",
    "Dspark",
    "DsparkAsync",
    "Fixed",
    "Mtp1",
    "NoSpeculation",
    "Oracle",
    "Policy",
    "Threshold",
    "Verifier",
]
