"""The tokenizer of a prepared target, without torch."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from draftflow.errors import DraftflowError


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of the target prepared in `folder`, with its chat template.

    Raises:
        DraftflowError: the folder holds no tokenizer.
    """
    path = Path(folder) / "tokenizer"
    if not (path / "tokenizer.json").is_file():
        raise DraftflowError(
            "There is no tokenizer.",
            "Run `snakemake dataset`, which prepares the target.",
            str(path / "tokenizer.json"),
        )
    return PreTrainedTokenizerFast.from_pretrained(path)
