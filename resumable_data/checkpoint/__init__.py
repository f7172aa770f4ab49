"""Durable, verified checkpoints of any objects with ``state_dict``; nothing here knows a data loader."""

from __future__ import annotations

from resumable_data.checkpoint.atomic import atomic_json_dump, atomic_torch_save
from resumable_data.checkpoint.manager import CheckpointManager
from resumable_data.checkpoint.payload import apply_payload, build_payload

__all__ = ["CheckpointManager", "apply_payload", "atomic_json_dump", "atomic_torch_save", "build_payload"]
