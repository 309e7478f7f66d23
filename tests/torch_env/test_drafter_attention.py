import threading

import pytest

torch = pytest.importorskip("torch")

from drafter_cases import document_ids  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.attention.flex_attention import flex_attention  # noqa: E402

from draftflow.drafter.anchors import sample_anchors  # noqa: E402
from draftflow.drafter.attention import attend, attend_from_block, forbid_dense  # noqa: E402
from draftflow.drafter.mask import FULL, Kind, allowed, block_mask, draft_mask  # noqa: E402
from draftflow.errors import DraftflowError  # noqa: E402


def heads(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slow_attention(q, k, v, mask):
    """Softmax over the allowed keys, head by head, in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~mask[:, 0], -torch.inf)
        out[:, head] = scores.softmax(-1) @ v[:, head // group]
    return out


@pytest.mark.parametrize(("block_size", "kind"), [(8, FULL), (10, FULL), (10, Kind(64, True)), (8, Kind(30))])
def test_dense_and_sparse_attention_are_the_slow_one(block_size, kind):
    documents = document_ids([[120, 80], [90]], 200)
    anchors = sample_anchors(torch.ones_like(documents), documents, 100, torch.Generator().manual_seed(0))
    queries = 100 * block_size
    q = heads(2, 6, queries, 16)
    k, v = heads(2, 2, 200 + queries, 16, seed=1), heads(2, 2, 200 + queries, 16, seed=2)
    dense = allowed(anchors, documents, block_size, kind)
    expected = slow_attention(q, k, v, dense).float()
    # fp32 sums of up to 130 terms of order one
    torch.testing.assert_close(attend(q, k, v, dense), expected, rtol=0, atol=1e-5)
    sparse = attend(q, k, v, block_mask(anchors, documents, block_size, kind))
    torch.testing.assert_close(sparse, expected, rtol=0, atol=1e-5)


def test_drafting_sees_everything_or_what_its_mask_says():
    q, k, v = heads(1, 4, 5, 8), heads(1, 2, 9, 8, seed=1), heads(1, 2, 9, 8, seed=2)
    everything, window = torch.ones(1, 1, 5, 9, dtype=torch.bool), draft_mask(4, 5, 5, True, q.device)
    for mask, same in ((None, everything), (window, window)):
        expected = slow_attention(q, k, v, same).float()
        torch.testing.assert_close(attend_from_block(q, k, v, mask), expected, rtol=0, atol=1e-6)


def test_more_rows_than_a_draft_block_has_are_refused_on_a_gpu():
    with FakeTensorMode():
        k = torch.empty(1, 2, 8192, 64, device="cuda")
        block, many = (torch.empty(1, 4, rows, 64, device="cuda") for rows in (16, 129))
        assert attend_from_block(block, k, k, None).shape == block.shape
        with pytest.raises(DraftflowError, match=r"\[1, 4, 129, 8192\] take 16,908,288 bytes"):
            attend_from_block(many, k, k, None)


def test_dense_mask_on_a_gpu_is_refused_with_its_bytes():
    with FakeTensorMode():
        q = torch.empty(2, 32, 8192, 128, device="cuda")
        k = torch.empty(2, 8, 11264, 128, device="cuda")
        mask = torch.empty(2, 1, 8192, 11264, dtype=torch.bool, device="cuda")
        with pytest.raises(DraftflowError, match=r"23,622,320,128 bytes \(22\.00 GiB\)"):
            attend(q, k, k, mask)


SMALL = heads(1, 2, 128, 16)
DENSE_CALL = r"dense.*\[1, 2, 128, 128\] take 131,072 bytes"


def test_dense_flex_is_refused_while_forbidden_and_only_then():
    flex_attention(SMALL, SMALL, SMALL)
    with forbid_dense("cpu"):
        with pytest.raises(DraftflowError, match=DENSE_CALL):
            flex_attention(SMALL, SMALL, SMALL)
        with forbid_dense("cpu"):
            pass
        with pytest.raises(DraftflowError, match=DENSE_CALL):
            flex_attention(SMALL, SMALL, SMALL)
    flex_attention(SMALL, SMALL, SMALL)


def test_guard_of_one_device_lets_another_pass():
    with forbid_dense("cuda"):
        flex_attention(SMALL, SMALL, SMALL)


def test_guard_holds_in_other_threads_and_outlives_another_threads_guard():
    seen, entered, leave = [], threading.Event(), threading.Event()

    def other():
        with forbid_dense("cpu"):
            entered.set()
            leave.wait(20)

    def dense():
        try:
            flex_attention(SMALL, SMALL, SMALL)
        except DraftflowError as error:
            seen.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(20)
    with forbid_dense("cpu"):
        pass  # opened and closed inside the other thread's guard
    dense_thread = threading.Thread(target=dense)
    dense_thread.start()
    dense_thread.join()
    leave.set()
    thread.join()
    assert len(seen) == 1
    flex_attention(SMALL, SMALL, SMALL)


def test_compiled_code_that_runs_dense_is_refused_when_it_runs_and_not_when_it_is_traced():
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q: flex_attention(q, q, q), backend=backend, fullgraph=True)
    with forbid_dense("cpu"), torch.no_grad(), pytest.raises(DraftflowError, match=DENSE_CALL):
        compiled(SMALL)
    assert len(traced) == 1
