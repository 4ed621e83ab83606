"""Proofs about the core by exhaustive and random exploration of its real arbiters."""

from tests.model_checker.explore import Explorer as Explorer
from tests.model_checker.explore import Report as Report
from tests.model_checker.explore import explore as explore
from tests.model_checker.packets import Stimulus as Stimulus
from tests.model_checker.setting import Policy as Policy
from tests.model_checker.setting import Setting as Setting
from tests.model_checker.trace import CheckError as CheckError
from tests.model_checker.trace import Trace as Trace
from tests.model_checker.trace import replay as replay
