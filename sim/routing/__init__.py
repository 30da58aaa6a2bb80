"""Routers: which replica an arrival goes to."""

from sim.routing.base import ROUTERS
from sim.routing.routers import LeastKv, LeastRequests, PowerOfTwo, RoundRobin

__all__ = ["ROUTERS", "LeastKv", "LeastRequests", "PowerOfTwo", "RoundRobin"]
