"""Operations that the layers of a drafter cannot do without in a step; a multiplication and an addition are two.

In the first layer the inputs are the anchors and, for all other places of a row's blocks, MASK: one row for all of
them, until they have positions. In the last layer slot 0 of a block, which proposes nothing, serves as key and value
alone. No torch.
"""

from draftflow.drafter.shape import DrafterShape


def block_products(shape: DrafterShape, rows: int, anchors: int) -> float:
    """Of the products of weights and draft rows in all layers, forward; backward there are twice as many. The inputs of
    the first layer are frozen, but the norm that they go through is not.

    Args:
        rows: packed rows.
        anchors: of each.
    """
    hidden, queries, keys = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    starts, last = rows * anchors, shape.layers - 1
    total = 0.0
    for number in range(shape.layers):
        found = starts * (shape.block_size - (number == last))  # rows that go on after attention
        known = starts + rows if number == 0 else starts * shape.block_size
        asked = known - starts if number == last else known
        total += 2.0 * hidden * (known * 2 * keys + asked * queries + found * (queries + 3 * shape.intermediate_size))
    return total


def attention_product(shape: DrafterShape, visible: float) -> float:
    """Of one product of attention in all layers; there are two forward and four backward.

    Args:
        visible: pairs of a query and a key that it sees in one layer, where the queries of a block see the same keys.
    """
    queries = shape.heads * shape.head_dim
    return 2.0 * queries * visible * (shape.layers * shape.block_size - 1) / shape.block_size
