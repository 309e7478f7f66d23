"""The target's forward as one CUDA graph, for targets whose layers are launched more slowly than computed.

A layer of a small target is a dozen kernels of microseconds each, and Python starts one after the other. 2048 tokens
through eight layers of SmolLM2's shape take 0.83 ms on an H200; neither compiled nor replayed they took 7.9
(benchmarks/step_time.py). Recorded are the kernels that would run anyway, with room for a number of documents; those
that are not there are empty. The numbers are the same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from draftflow.target.attention import Documents, documents_of
from draftflow.target.features import FeatureExtractor

# Tokens for each document that there is room for: an empty one costs little, but not nothing.
TOKENS_PER_DOCUMENT = 32
# Operations of a layer's matrix products, from which on a GPU is no longer faster than its host.
MOST_OPERATIONS = 4e11


def worth_replaying(extractor: FeatureExtractor, tokens: int) -> bool:
    """Whether the forward of so many tokens may be launched more slowly than computed; and can be recorded."""
    return extractor.reads_no_host_bounds and 2.0 * tokens * extractor.layer_parameters < MOST_OPERATIONS


class Replayed:
    """A feature extractor, recorded in its second call and replayed from then on.

    Args:
        extractor: its first call has compiled and loaded what there is to; it waits for no device.
    """

    def __init__(self, extractor: FeatureExtractor):
        self.extractor = extractor
        self._called = False
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, document_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Features, as `FeatureExtractor` gives them; they stand until the next call."""
        documents = documents_of(document_ids, input_ids.device)
        room = input_ids.numel() // TOKENS_PER_DOCUMENT
        other = self._graph is not None and input_ids.shape != self._ids.shape
        if not self._called or other or len(documents.host_bounds) > room + 1:
            self._called = True
            return self.extractor.of(input_ids, position_ids, documents)
        bounds = F.pad(documents.host_bounds, (0, room + 1 - len(documents.host_bounds)), value=input_ids.numel())
        if self._graph is None:
            self._record(input_ids, position_ids, bounds)
        assert self._graph is not None
        self._ids.copy_(input_ids)
        self._positions.copy_(position_ids)
        self._bounds.copy_(bounds.pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._features

    def _record(self, input_ids: Tensor, position_ids: Tensor, bounds: Tensor) -> None:
        self._ids, self._positions = input_ids.clone(), position_ids.clone()
        self._bounds = bounds.to(input_ids.device)
        longest = torch.tensor(input_ids.shape[1], dtype=torch.int32)  # no document is longer than its row
        documents = Documents(self._bounds, bounds, longest)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # cuBLAS has a workspace for each stream
            self.extractor.of(self._ids, self._positions, documents)
        torch.cuda.current_stream().wait_stream(stream)
        # other threads may go on: what they do is not on this stream
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._features = self.extractor.of(self._ids, self._positions, documents)
        self._graph = graph
