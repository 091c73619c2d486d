"""Where searchers find the trainer: one small file in the run folder, written by rename, readable by its owner only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from tba_megatron.errors import TransportError

FILE = "rendezvous.json"
HELD = ".start-"  # how folders in ``weights`` are called that hold a version for a searcher that starts
MARKER = "newest.json"  # of the folder of versions: which one to start from


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """``weights``: the folder of published versions; its marker names the one to start an engine from."""

    address: str
    host: str  # where the trainer's rank 0 runs
    token: str
    attempt: int
    weights: str


def write_rendezvous(folder: Path, rendezvous: Rendezvous) -> None:
    partial = folder / f".{FILE}.partial"
    partial.unlink(missing_ok=True)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(rendezvous)))
    partial.rename(folder / FILE)


def read_rendezvous(folder: Path) -> Rendezvous | None:
    """None while there is no trainer; TransportError when the file cannot be read."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Rendezvous)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TransportError(f"{folder / FILE} cannot be read ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise TransportError(f"{folder / FILE} is damaged ({error}); remove it and restart the trainer") from None


def remove_rendezvous(folder: Path) -> None:
    """Whoever wrote it."""
    (folder / FILE).unlink(missing_ok=True)


def withdraw_rendezvous(folder: Path, token: str) -> None:
    """Remove the file unless another trainer has put its own there by now."""
    found = read_rendezvous(folder)
    if found is not None and found.token == token:
        remove_rendezvous(folder)


def remove_held(weights: Path) -> None:
    """The versions that were held for searchers while those started: one that is killed meanwhile leaves its own."""
    for held in weights.glob(f"{HELD}*"):
        shutil.rmtree(held, ignore_errors=True)
