"""The garbage collector leaves alone what is older, and only meanwhile."""

import gc

import pytest

from headstart.train.data.garbage import older_objects_kept


def test_older_objects_are_left_alone_for_a_while() -> None:
    older, newer = [[]], None
    with pytest.raises(KeyError), older_objects_kept():
        newer = [[]]
        looked_at = {id(found) for found in gc.get_objects()}
        assert id(newer) in looked_at and id(older) not in looked_at
        raise KeyError
    assert id(older) in {id(found) for found in gc.get_objects()} and gc.get_freeze_count() == 0
