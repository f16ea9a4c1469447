"""The mark of tests whose plans split some ops and leave others whole: a `PlanWarning`, and not what they are about."""

import pytest

losing = pytest.mark.filterwarnings("ignore:plan .*parallelism is lost:jscaler.PlanWarning")
