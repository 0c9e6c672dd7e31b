"""Text, conversations or token ids in; packs of Documents out, in an order that is a function of (seed, step)."""

from unmask.data.dataset import Dataset, Manifest, open_dataset
from unmask.data.ends import end_policy
from unmask.data.mixing import Mixture, Source
from unmask.data.packing import Packs
from unmask.data.prepare import dataset_from, prepare, source_tokenizer
from unmask.data.reading import Reading
from unmask.data.sampler import Sampler
from unmask.data.tokenizer import load_tokenizer, train_tokenizer

__all__ = [
    "Dataset",
    "Manifest",
    "Mixture",
    "Packs",
    "Reading",
    "Sampler",
    "Source",
    "dataset_from",
    "end_policy",
    "load_tokenizer",
    "open_dataset",
    "prepare",
    "source_tokenizer",
    "train_tokenizer",
]
