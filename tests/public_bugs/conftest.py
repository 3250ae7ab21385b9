"""The board's bench, for the same runs."""

from tests.board.conftest import bench

__all__ = ["bench"]
