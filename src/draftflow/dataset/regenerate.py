"""Stage: the target writes every response anew, turn by turn, since a drafter must imitate its target.

Prompts of similar length share a batch, padded on the left. Greedy decoding depends on the batch only through rounding.
Sampling adds Gumbel noise to the logits and takes the largest, which is a sample of their softmax (the Gumbel-max
trick); the noise of each response comes from a generator of its own, seeded by the prompt, so that a response does not
depend on what else is in its batch either.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from draftflow.compile_cache.guard import Guard
from draftflow.dataset import formats
from draftflow.dataset.formats import Conversation, Message
from draftflow.dataset.template import encode_prompt
from draftflow.errors import DraftflowError
from draftflow.stage import Record, run_stage, say, sha256, stage_parser
from draftflow.target import decoding
from draftflow.target.attending import attending
from draftflow.target.load import Target, load_target
from draftflow.target.tokenizer import load_tokenizer

MARKUP = 16  # tokens that a chat template may put around a turn


@dataclass
class Writing:
    """A conversation while the target writes its responses.

    Args:
        source: the conversation as read.
        name: its prompt id and how many equal ones come before it; seeds the sampling.
    """

    source: Conversation
    name: str
    messages: list[Message] = field(default_factory=list)
    tokens: int = 0
    silent: bool = False

    @property
    def turns(self) -> list[list[Message]]:
        """What the target answers to: a user message each, with the system message before the first."""
        turns: list[list[Message]] = [[]]
        for message in self.source.messages:
            if message["role"] != "assistant":
                turns[-1].append(message)
            if message["role"] == "user":
                turns.append([])
        return turns[:-1]


class GumbelNoise(LogitsProcessor):
    """Adds standard Gumbel noise to logits [B, V]; row `i` draws from generator `i`."""

    def __init__(self, generators: Sequence[torch.Generator]):
        self.generators = generators

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores - noise.log()


@torch.inference_mode()
def generate(
    target: Target, prompts: Sequence[Sequence[int]], names: Sequence[str], settings: dict[str, Any]
) -> list[list[int]]:
    """Continue a batch of prompts.

    Args:
        target: the target.
        prompts: token ids of each prompt, of any lengths.
        names: what each response's sampling is seeded by, beside the seed.
        settings: `max_new_tokens`, `temperature`, `top_p`, `seed`.

    Returns:
        The new token ids of each, up to and with the first token that ends a response.
    """
    device, width = target.embed_weight.device, max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    attended = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attended[row, width - len(prompt) :] = 1
    processors = LogitsProcessorList()
    if settings["temperature"] > 0:
        processors.append(TemperatureLogitsWarper(float(settings["temperature"])))
        if settings["top_p"] < 1:
            processors.append(TopPLogitsWarper(settings["top_p"]))
        seeds = [hashlib.sha256(f"{settings['seed']}:{name}".encode()).digest()[:8] for name in names]
        generators = [torch.Generator(device).manual_seed(int.from_bytes(seed) >> 1) for seed in seeds]
        processors.append(GumbelNoise(generators))
    eos = target.eos_token_ids
    with attending(target.model.get_decoder().config, decoding.NAME):
        output = target.model.generate(
            input_ids=ids.to(device),
            attention_mask=attended.to(device),
            generation_config=GenerationConfig(
                max_new_tokens=settings["max_new_tokens"], do_sample=False, eos_token_id=eos, pad_token_id=eos[0]
            ),
            logits_processor=processors,
        )
    responses = output[:, width:].tolist()
    ends = [next((at for at, token in enumerate(response) if token in eos), len(response)) for response in responses]
    return [response[: end + 1] for response, end in zip(responses, ends, strict=True)]


def take(writing: Writing, ids: Sequence[int], eos: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> None:
    """Add a response to its conversation, or mark the conversation silent if the response has no text."""
    writing.tokens += len(ids)
    complete = ids[-1] in eos
    text = tokenizer.decode(ids[:-1] if complete else ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if not complete:
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # a character of which only the first bytes were written
    writing.silent = not text.strip()
    message: Message = {"role": "assistant", "content": text}
    writing.messages.append(message if complete else {**message, "complete": False})


def write_responses(
    target: Target, tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Conversation], settings: dict[str, Any]
) -> tuple[list[Conversation], dict[str, Any]]:
    """Let the target answer every user message, each with its own earlier answers before it.

    Args:
        target: the target.
        tokenizer: the target's.
        conversations: their assistant messages are left out.
        settings: those of `generate`, and `batch_size`.

    Returns:
        The conversations in their order, without those in which the target said nothing, and figures for the record.

    Raises:
        DraftflowError: a conversation does not fit the target's context, the template refuses it, or the target said
            nothing in any.
    """
    check_context(target, tokenizer, conversations, settings["max_new_tokens"])
    seen: Counter[str] = Counter()
    writings = []
    for conversation in conversations:
        writings.append(Writing(conversation, f"{conversation.id}:{seen[conversation.id]}"))
        seen[conversation.id] += 1
    start, size = time.perf_counter(), settings["batch_size"]
    for turn in range(max(len(writing.turns) for writing in writings)):
        active = [writing for writing in writings if turn < len(writing.turns) and not writing.silent]
        prompts = []
        for writing in active:
            writing.messages += writing.turns[turn]
            prompts.append(encode_prompt(tokenizer, writing.messages, writing.source.where))
        order = sorted(range(len(active)), key=lambda index: -len(prompts[index]))
        for first in range(0, len(order), size):
            batch = order[first : first + size]
            names = [f"{active[index].name}:{turn}" for index in batch]
            for index, ids in zip(batch, generate(target, [prompts[i] for i in batch], names, settings), strict=True):
                take(active[index], ids, target.eos_token_ids, tokenizer)
            tokens = sum(writing.tokens for writing in writings)
            rate = tokens / (time.perf_counter() - start)
            say(
                f"turn {turn + 1}: {first + len(batch)} of {len(order)} responses, {tokens} tokens, {rate:.0f} tokens/s"
            )
    kept = [writing for writing in writings if not writing.silent]
    dropped = [writing.source.where for writing in writings if writing.silent]
    if dropped:
        say(f"dropped {len(dropped)} conversations in which the target said nothing: {', '.join(dropped[:10])}")
    if not kept:
        raise DraftflowError(
            "The target said nothing to any prompt.", "Look at its chat template (target.chat_template)."
        )
    written = [message for writing in kept for message in writing.messages if message["role"] == "assistant"]
    figures = {
        "conversations": len(kept),
        "dropped": dropped,
        "responses": len(written),
        "cut_responses": sum("complete" in message for message in written),
        "tokens": sum(writing.tokens for writing in writings),
        "tokens_per_second": round(sum(writing.tokens for writing in writings) / (time.perf_counter() - start), 1),
    }
    return [Conversation(writing.messages, writing.source.where) for writing in kept], figures


def check_context(
    target: Target, tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Conversation], max_new_tokens: int
) -> None:
    """Refuse conversations that may not fit the target's context, before hours are spent on the others.

    Raises:
        DraftflowError: with responses of full length, some would exceed `max_position_embeddings`.
    """
    context = target.description["max_position_embeddings"]
    faults: list[formats.Fault] = []
    for conversation in conversations:
        users = [message for message in conversation.messages if message["role"] == "user"]
        opening = conversation.messages[: conversation.messages.index(users[0]) + 1]
        first = len(encode_prompt(tokenizer, opening, conversation.where))
        later = tokenizer([message["content"] for message in users[1:]])["input_ids"] if users[1:] else []
        need = first + max_new_tokens + sum(len(ids) + MARKUP + max_new_tokens for ids in later)
        if need > context:
            faults.append((conversation.where, f"may need {need} tokens, the target's context is {context}"))
    formats.refuse(faults, len(conversations), "Lower dataset.regenerate.max_new_tokens, or remove such conversations.")


def main() -> None:
    parser = stage_parser(__doc__ or "")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--target", type=Path, required=True, help="prepared target")
    parser.add_argument("--conversations", type=Path, required=True, help="canonical conversations")
    parser.add_argument("--output", type=Path, required=True, help="conversations with responses to write")
    parser.add_argument("--record", type=Path, required=True, help="record to write")
    arguments = parser.parse_args()
    record = Record("regenerate_responses", settings=arguments.settings)
    conversations = formats.read_canonical(arguments.conversations)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    with record.part("load"):
        target = load_target(arguments.target, arguments.device, dtype)
        tokenizer = load_tokenizer(arguments.target)
    guard = Guard("warn")
    guard.seal()  # nothing is compiled: the context grows with every token
    with record.part("generate"):
        written, figures = write_responses(target, tokenizer, conversations, arguments.settings)
    guard.check()
    record["guard"] = guard.counts()
    formats.write(arguments.output, written)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    facts = {"device": device, "precision": str(dtype).removeprefix("torch."), "torch": torch.__version__, **figures}
    facts["target"] = {key: target.description[key] for key in ("source", "sha256")}
    facts["sha256"] = sha256(arguments.output)
    for key, value in facts.items():
        record[key] = value
    record.write(arguments.record)


if __name__ == "__main__":
    run_stage(main)
