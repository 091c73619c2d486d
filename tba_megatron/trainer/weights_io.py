"""Weights in and out of Megatron's shards: Hugging Face folders in, Hugging Face tensors and folders out."""

from tba_megatron.trainer.export_hf import export_hf
from tba_megatron.trainer.load_hf import LoadReport, load_hf, load_random
from tba_megatron.trainer.stream_hf import stream_buckets, stream_hf

__all__ = ["LoadReport", "export_hf", "load_hf", "load_random", "stream_buckets", "stream_hf"]
