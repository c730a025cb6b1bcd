"""The list of planted mistakes fits the code: planted.py plants them, which takes minutes."""
import ast
import os

import pytest
from planted import MISTAKES, ROOT, read, trouble_of


def test_every_planted_mistake_has_its_place():
    trouble = [x for x in map(trouble_of, MISTAKES) if x]
    assert not trouble, "\n".join(trouble)
    names = [m.name for m in MISTAKES]
    assert len(set(names)) == len(names), "two mistakes have one name"


@pytest.mark.parametrize("mistake", MISTAKES, ids=[m.name for m in MISTAKES])
def test_a_planted_mistake_is_python(mistake):
    ast.parse(read(os.path.join(ROOT, mistake.file)).replace(mistake.old, mistake.new))
    assert all(os.path.exists(os.path.join(ROOT, "tests", name)) for name in mistake.tests.split())
