"""The record: what was sampled, as it was sampled, and how it becomes rows to train on."""

from agent_rl.record.dump import Segment, TrajectoryRecord, read_dump

__all__ = ["Segment", "TrajectoryRecord", "read_dump"]
