"""What each engine can do, as data: options, live parameters, signals, probes.

One table per engine; everything else in the controller reads tables and knows no engine by name.
"""

from headway_operator.engines.headway import HEADWAY
from headway_operator.engines.table import (
    Engine,
    Option,
    Parameter,
    Probe,
    Signal,
    Support,
)

ENGINES: dict[str, Engine] = {HEADWAY.name: HEADWAY}

__all__ = ["ENGINES", "Engine", "Option", "Parameter", "Probe", "Signal", "Support", "engine"]


def engine(name: str) -> Engine:
    """The table of an engine; KeyError for one that the schema would have refused."""
    return ENGINES[name]
