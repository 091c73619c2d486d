"""The reference after a reset, as files: what a checkpoint needs of it beside itself, where it is not its own policy.

``reference`` of the run folder holds one Hugging Face folder a version, named as checkpoints are by the step whose
policy it was.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.models.gpt.gpt_model import GPTModel

from tba_megatron.dist import Groups
from tba_megatron.errors import CheckpointError, ModelError
from tba_megatron.models.architecture import Architecture, ModelShape
from tba_megatron.trainer.all_or_none import AllOrNone
from tba_megatron.trainer.checkpoint_folder import checkpoints, final_path
from tba_megatron.trainer.exchange import from_rank_0
from tba_megatron.trainer.export_hf import export_hf
from tba_megatron.trainer.load_hf import load_hf

FOLDER = "reference"  # of the run folder


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceFiles:
    """``template`` is the folder whose companions a version gets; ``dtype`` the trainer's, so that nothing is lost."""

    folder: Path
    template: Path
    dtype: str
    architecture: Architecture
    shape: ModelShape
    groups: Groups

    def write(self, chunks: Sequence[GPTModel], version: int) -> None:
        """Unless it is there; a collective over all ranks. CheckpointError on every rank when any could not write."""
        target = final_path(self.folder, version)
        if not self._exists(target):
            export_hf(
                chunks,
                self.architecture,
                self.shape,
                self.groups,
                folder=target,
                template=self.template,
                dtype=self.dtype,
            )

    def read(self, chunks: Sequence[GPTModel], version: int) -> None:
        """A collective over all ranks. CheckpointError on every rank where it is not there, or not whole."""
        source = final_path(self.folder, version)
        advice = "put the whole folder back, or remove the newest checkpoint, which needs it, to resume earlier"
        if not self._exists(source):
            raise CheckpointError(f"{source} is missing, the reference after a reset; {advice}")
        try:
            load_hf(chunks, self.architecture, self.shape, source, self.groups)
        except ModelError as error:  # the same on every rank
            raise CheckpointError(f"{source} cannot be read, the reference after a reset ({error}); {advice}") from None

    def remove_after(self, step: int) -> None:
        """Versions of steps after ``step`` are of another branch than the one that goes on from there: this one makes
        its own. A collective over all ranks; CheckpointError on every rank where one cannot be removed.
        """
        with AllOrNone(f"cannot remove what an abandoned branch left in {self.folder}", self.groups.world):
            if self.groups.rank == 0:
                for version, path in checkpoints(self.folder):
                    if version > step:
                        shutil.rmtree(path)

    def remove_all_but(self, versions: Collection[int]) -> None:
        """For rank 0 alone. What cannot be removed stays for the next time."""
        for version, path in checkpoints(self.folder):
            if version not in versions:
                shutil.rmtree(path, ignore_errors=True)

    def _exists(self, path: Path) -> bool:
        """As rank 0 sees it."""
        return from_rank_0(path.exists() if self.groups.rank == 0 else None, self.groups)
