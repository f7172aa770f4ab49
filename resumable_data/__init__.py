"""The PyTorch data loader that survives being killed: the resumed run is the same run, bit for bit."""

from resumable_data.checkpoint import (
    CheckpointManager,
    apply_payload,
    atomic_json_dump,
    atomic_torch_save,
    build_payload,
)
from resumable_data.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLimitError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSecurityError,
    CheckpointWriteError,
    RankDisagreementError,
    ResumableDataError,
    RNGRestoreError,
    StaleIteratorError,
    StateError,
    StateMismatchError,
    StateVersionError,
)
from resumable_data.loader import ResumableLoader
from resumable_data.rng import capture_rng_state, restore_rng_state
from resumable_data.seeding import sample_seed

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointLimitError",
    "CheckpointManager",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSecurityError",
    "CheckpointWriteError",
    "RNGRestoreError",
    "RankDisagreementError",
    "ResumableDataError",
    "ResumableLoader",
    "StaleIteratorError",
    "StateError",
    "StateMismatchError",
    "StateVersionError",
    "apply_payload",
    "atomic_json_dump",
    "atomic_torch_save",
    "build_payload",
    "capture_rng_state",
    "restore_rng_state",
    "sample_seed",
]
