"""The mark of tests whose plans leave some ops whole, or run micro-batches in several loops: a `PlanWarning`, and not what
they are about."""

import pytest

losing = pytest.mark.filterwarnings("ignore:plan .*(parallelism|memory) is lost:jscaler.PlanWarning")
