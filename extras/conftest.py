"""The tests of extras use the tiny world of the others."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tests.conftest import *  # noqa: E402, F403
