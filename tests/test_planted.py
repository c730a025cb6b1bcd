"""The list of planted mistakes fits the code. To plant them, run planted.py: it takes minutes."""
from planted import MISTAKES, ROOT, trouble_of


def test_every_planted_mistake_has_its_place():
    trouble = [x for x in map(trouble_of, MISTAKES) if x]
    assert not trouble, "\n".join(trouble)
    names = [m.name for m in MISTAKES]
    assert len(set(names)) == len(names), "two mistakes have one name"
    files = {ROOT / "tests" / m.test for m in MISTAKES}
    assert all(file.exists() for file in files), "a test file that is to catch one is not there"
