"""The attention of `relative_attention` as Triton kernels; see there for what it computes and for the letters.

Scores by distance lie in memory with a row of W columns for each query. Query i finds key j in column T - 1 - i + j, so
that a tile of queries and keys is read with rows W - 1 apart. Columns from K on are padding; future positions have no
column.

Probabilities are powers of two: scores are multiplied by ``scale`` · log₂ e, and ``log_sums`` are logarithms to base 2.
T' is T with padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(64)
"""Per-query statistics are padded to a multiple of this; query block sizes must divide it."""
GROUP = tl.constexpr(16)
"""Columns that are stored together; a row of scores is usually a multiple of it long."""
OUT_OF_SIGHT = tl.constexpr(1 << 30)
"""Larger than any key index, so nothing is visible."""


@triton.jit
def _key_rows(key, stream, streams, queries, remembered, features: tl.constexpr):
    """Where the keys' rows begin in the projections; their values stand ``features`` further on.

    First come all rows of the segments, (B, T, 3, H, P), then those of the memories, (B, M, 2, H, P).
    """
    own = (stream * queries - remembered) * (3 * features) + features
    memory = (streams * queries * 3 + stream * remembered * 2) * features
    rows = tl.where(key < remembered, memory + key * (2 * features), own + key * (3 * features))
    return tl.multiple_of(rows, 8)  # head widths are multiples of 8; not every compiler sees it


@triton.jit
def _sight(query, queries, remembered, first, same_length: tl.constexpr):
    """The first key that each query sees, and how many more it sees; queries past the segment's end see nothing.

    A key is seen where ``key - lowest``, read as an unsigned number, is at most ``more``: one comparison.
    """
    lowest = tl.maximum(first, query + 1) if same_length else tl.maximum(first, 0) + tl.zeros_like(query)
    return tl.where(query < queries, lowest, OUT_OF_SIGHT), (remembered + query - lowest).to(tl.uint32)


@triton.jit
def attention_forward(
    projected,  # (B, T, 3, H, P), then (B, M, 2, H, P)
    scores,  # (H, B, T, W)
    filled,  # (1,)
    mixed,  # (B, T, H, P)
    log_sums,  # (B, H, T')
    streams,
    queries,
    remembered,
    columns,
    scale,
    same_length: tl.constexpr,
    heads: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
):
    features: tl.constexpr = heads * width
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_queries  # the longest rows first
    pair = tl.program_id(1)
    stream, head = (pair // heads).to(tl.int64), pair % heads
    query, feature = start + tl.arange(0, block_queries), tl.arange(0, padded)
    there = (query < queries)[:, None] & (feature < width)[None, :]
    own = projected + stream * queries * (3 * features) + head * width
    q = tl.load(own + query[:, None] * (3 * features) + feature[None, :], mask=there, other=0.0)  # (queries, P)
    scores += (head * streams + stream) * queries * columns + queries - 1
    by_key = scores + query.to(tl.int64)[:, None] * (columns - 1)
    by_key += tl.arange(0, block_keys).to(tl.int64)[None, :]
    first = (remembered - tl.load(filled)).to(tl.int32)
    lowest, more = _sight(query, queries, remembered, first, same_length)
    begin = tl.maximum(first, start + 1) if same_length else tl.maximum(first, 0)
    end = tl.minimum(remembered + queries, remembered + start + block_queries)
    most = tl.full((block_queries,), -1e20, tl.float32)  # above hidden scores, so that they get no weight
    total = tl.zeros((block_queries,), tl.float32)
    read = tl.zeros((block_queries, padded), tl.float32)
    for at in range(begin // block_keys * block_keys, end, block_keys):
        key = at + tl.arange(0, block_keys)
        rows = projected + (_key_rows(key, stream, streams, queries, remembered, features) + head * width)[:, None]
        held = (key < remembered + queries)[:, None] & (feature < width)[None, :]
        k = tl.load(rows + feature[None, :], mask=held, other=0.0)  # (keys, P)
        v = tl.load(rows + features + feature[None, :], mask=held, other=0.0)  # (keys, P)
        by_distance = tl.load(by_key + at)
        score = tl.dot(q, tl.trans(k)) + by_distance  # (queries, keys)
        score = tl.where((key[None, :] - lowest[:, None]).to(tl.uint32) <= more[:, None], score, -1e30)
        new_most = tl.maximum(most, tl.max(score, 1))
        shrink = tl.exp2((most - new_most) * scale)
        share = tl.exp2(score * scale - (new_most * scale)[:, None])
        total = total * shrink + tl.sum(share, 1)
        read = tl.dot(share.to(v.dtype), v, read * shrink[:, None])
        most = new_most
    mixed += stream * queries * features + head * width
    tl.store(mixed + query[:, None] * features + feature[None, :], read / total[:, None], mask=there)
    log_sums += pair.to(tl.int64) * tl.cdiv(queries, ROWS) * ROWS
    tl.store(log_sums + query, most * scale + tl.log2(total))


@triton.jit
def attention_prepare(
    mixed,  # (B, T, H, P)
    grad_mixed,  # (B, T, H, P)
    overlaps,  # (B, H, T')
    grad_scores,  # (H, B, T, W)
    streams,
    queries,
    remembered,
    columns,
    heads: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    block_queries: tl.constexpr,
):
    """The product of each row with its gradient, and zeros where a row of scores has columns without a key.

    Zeros are stored in whole column groups so that stores vectorise. Some of these columns do have a key; their
    gradients are written afterwards.
    """
    start = tl.program_id(0) * block_queries
    pair = tl.program_id(1)
    stream, head = (pair // heads).to(tl.int64), pair % heads
    query, feature = start + tl.arange(0, block_queries), tl.arange(0, padded)
    inside = (query < queries)[:, None]
    there = inside & (feature < width)[None, :]
    at = ((stream * queries + query) * (heads * width) + head * width)[:, None] + feature[None, :]
    row = tl.load(mixed + at, mask=there, other=0.0).to(tl.float32)
    gradient = tl.load(grad_mixed + at, mask=there, other=0.0).to(tl.float32)
    rows = grad_scores + (head * streams + stream) * queries * columns + (query * columns)[:, None]
    nothing = tl.zeros((block_queries, 64), grad_scores.dtype.element_ty)
    keyless = tl.cdiv(tl.maximum(queries - 1 - start, 0), GROUP) * GROUP
    for before in range(0, keyless, 64):
        column = before + tl.arange(0, 64)
        tl.store(rows + column[None, :], nothing, mask=inside & ((column < keyless) & (column < columns))[None, :])
    for after in range((remembered + queries) // GROUP * GROUP, columns, 64):
        column = after + tl.arange(0, 64)
        tl.store(rows + column[None, :], nothing, mask=inside & (column < columns)[None, :])
    tl.store(overlaps + pair.to(tl.int64) * tl.cdiv(queries, ROWS) * ROWS + query, tl.sum(row * gradient, 1))


@triton.jit
def attention_key_gradients(
    projected,  # (B, T, 3, H, P), then (B, M, 2, H, P)
    scores,  # (H, B, T, W)
    filled,  # (1,)
    grad_mixed,  # (B, T, H, P)
    log_sums,  # (B, H, T')
    overlaps,  # (B, H, T')
    grad_projected,  # like projected
    grad_scores,  # (H, B, T, W)
    streams,
    queries,
    remembered,
    columns,
    scale,
    scale_to_base_2,
    same_length: tl.constexpr,
    heads: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
):
    """The gradients of keys and values, and those of the scores on the way; every tile has one row for each key."""
    features: tl.constexpr = heads * width
    pair = tl.program_id(1)
    stream, head = (pair // heads).to(tl.int64), pair % heads
    start = tl.program_id(0) * block_keys
    key, feature = start + tl.arange(0, block_keys), tl.arange(0, padded)
    held = (key < remembered + queries)[:, None] & (feature < width)[None, :]
    at = (_key_rows(key, stream, streams, queries, remembered, features) + head * width)[:, None] + feature[None, :]
    k = tl.load(projected + at, mask=held, other=0.0)  # (keys, P)
    v = tl.load(projected + features + at, mask=held, other=0.0)  # (keys, P)
    of_head = (head * streams + stream) * queries * columns + queries - 1
    scores, grad_scores = scores + of_head, grad_scores + of_head
    in_block = tl.arange(0, block_queries)[None, :] * (columns - 1) + key[:, None]  # (keys, queries)
    own = projected + stream * queries * (3 * features) + head * width
    grad_mixed += stream * queries * features + head * width
    of_pair = pair.to(tl.int64) * tl.cdiv(queries, ROWS) * ROWS
    log_sums, overlaps = log_sums + of_pair, overlaps + of_pair
    first = (remembered - tl.load(filled)).to(tl.int32)
    grad_k = tl.zeros((block_keys, padded), tl.float32)
    grad_v = tl.zeros((block_keys, padded), tl.float32)
    lowest_query = tl.maximum(start - remembered, 0) // block_queries * block_queries
    upcoming = tl.load(scores + lowest_query * (columns - 1) + in_block)
    for begin in range(lowest_query, queries, block_queries):
        query = begin + tl.arange(0, block_queries)
        inside = query < queries
        there = inside[:, None] & (feature < width)[None, :]
        q = tl.load(own + query[:, None] * (3 * features) + feature[None, :], mask=there, other=0.0)  # (queries, P)
        gradient = tl.load(grad_mixed + query[:, None] * features + feature[None, :], mask=there, other=0.0)  # the same
        by_distance, after = upcoming, tl.full((1, 1), begin + block_queries, tl.int32)
        upcoming = tl.load(scores + after * (columns - 1) + in_block, mask=after < queries)  # a block ahead of its use
        log_sum, overlap = tl.load(log_sums + query), tl.load(overlaps + query)
        lowest, more = _sight(query, queries, remembered, first, same_length)
        seen = (key[:, None] - lowest[None, :]).to(tl.uint32) <= more[None, :]
        score = tl.dot(k, tl.trans(q)) + by_distance  # (keys, queries)
        share = tl.where(seen, tl.exp2(score * scale_to_base_2 - log_sum[None, :]), 0.0)
        grad_v = tl.dot(share.to(v.dtype), gradient, grad_v)
        grad_share = tl.dot(v, tl.trans(gradient))  # (keys, queries)
        grad_score = (share * (grad_share - overlap[None, :]) * scale).to(k.dtype)
        up_to = tl.where(inside, remembered + query, -1)
        tl.store(grad_scores + begin * (columns - 1) + in_block, grad_score, mask=key[:, None] <= up_to[None, :])
        grad_k = tl.dot(grad_score, q, grad_k)
    tl.store(grad_projected + at, grad_k, mask=held)
    tl.store(grad_projected + features + at, grad_v, mask=held)


@triton.jit
def attention_query_gradients(
    projected,  # (B, T, 3, H, P), then (B, M, 2, H, P)
    distances,  # (W, H, P)
    grad_scores,  # (H, B, T, W)
    grad_projected,  # like projected
    sums,  # (B, blocks of queries, H, P)
    streams,
    queries,
    remembered,
    columns,
    heads: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
):
    """The queries' gradients: those of the scores, read by key and by distance, times the keys and the distances."""
    features: tl.constexpr = heads * width
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_queries  # the longest rows first
    pair = tl.program_id(1)
    stream, head = (pair // heads).to(tl.int64), pair % heads
    query, feature = start + tl.arange(0, block_queries), tl.arange(0, padded)
    inside = (query < queries)[:, None]
    keys = remembered + queries
    grad_scores += (head * streams + stream) * queries * columns
    by_key = grad_scores + queries - 1 + query.to(tl.int64)[:, None] * (columns - 1)
    by_key += tl.arange(0, block_keys).to(tl.int64)[None, :]
    up_to = tl.where(query < queries, remembered + query, -1)
    grad_q = tl.zeros((block_queries, padded), tl.float32)
    for at in range(0, tl.minimum(keys, remembered + start + block_queries), block_keys):
        key = at + tl.arange(0, block_keys)
        held = (key < keys)[:, None] & (feature < width)[None, :]
        key_rows = (_key_rows(key, stream, streams, queries, remembered, features) + head * width)[:, None]
        k = tl.load(projected + key_rows + feature[None, :], mask=held, other=0.0)  # (keys, P)
        gradient = tl.load(by_key + at, mask=key[None, :] <= up_to[:, None], other=0.0)
        grad_q = tl.dot(gradient, k, grad_q)
    for at in range(tl.maximum(queries - start - block_queries, 0) // block_keys * block_keys, keys, block_keys):
        column = at + tl.arange(0, block_keys)
        held = (column < keys)[:, None] & (feature < width)[None, :]
        r = tl.load(distances + (column * features + head * width)[:, None] + feature[None, :], mask=held, other=0.0)
        by_distance = grad_scores + query[:, None] * columns + column[None, :]
        gradient = tl.load(by_distance, mask=inside & (column < columns)[None, :], other=0.0)
        grad_q = tl.dot(gradient, r, grad_q)
    real = (feature < width)[None, :]
    own = grad_projected + stream * queries * (3 * features) + head * width
    tl.store(own + query[:, None] * (3 * features) + feature[None, :], grad_q, mask=inside & real)
    block = stream * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums + block * features + head * width + feature, tl.sum(grad_q, 0), mask=feature < width)
