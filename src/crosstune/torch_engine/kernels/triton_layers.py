"""Triton kernels of the fast layers: RMSNorm, rows in e4m3, cross entropy, rotation of queries and keys, gated activations,
and dequantization of NF4."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x, added, total, out, rstd, weight, packed, scale, out_stride, packed_stride, eps, offset,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    values = tl.load(x + row * N + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(added + row * N + column, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * N + column, rounded, mask=mask)
        values = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values) / N + eps)
    tl.store(rstd + row, inverse)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset
    normal = values * inverse * gain
    tl.store(out + row * out_stride + column, normal.to(out.dtype.element_ty), mask=mask)
    if QUANTIZE:
        normal = tl.where(mask, normal, 0.0)
        factor = tl.maximum(tl.max(tl.abs(normal)), 1e-12) / 448.0
        tl.store(scale + row, factor)
        tl.store(packed + row * packed_stride + column, (normal / factor).to(tl.float8e4nv), mask=mask)


@triton.jit
def rebuild_rms_norm(total, rstd, weight, out, out_stride, offset, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    values = tl.load(total + row * N + column, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset
    normal = values * tl.load(rstd + row) * gain
    tl.store(out + row * out_stride + column, normal.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward(
    gradient, total, rstd, weight, residual, out, gradient_stride, residual_stride, out_stride, offset,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    inverse = tl.load(rstd + row)
    values = tl.load(total + row * N + column, mask=mask, other=0.0).to(tl.float32) * inverse
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset
    weighted = tl.load(gradient + row * gradient_stride + column, mask=mask, other=0.0).to(tl.float32) * gain
    found = (weighted - values * (tl.sum(weighted * values) / N)) * inverse
    if ADD:
        found += tl.load(residual + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def quantize_rows(
    values, columns, packed, scale, stride, packed_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < N
        part = tl.load(values + row * stride + column, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            part *= tl.load(columns + column, mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.abs(part))
    factor = tl.maximum(tl.max(largest), 1e-12) / 448.0
    tl.store(scale + row, factor)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < N
        part = tl.load(values + row * stride + column, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            part *= tl.load(columns + column, mask=mask, other=0.0)
        tl.store(packed + row * packed_stride + column, (part / factor).to(tl.float8e4nv), mask=mask)


@triton.jit
def cross_entropy(logits, targets, losses, N, BLOCK: tl.constexpr, GRADIENT: tl.constexpr):
    """Write the loss of each row; put the gradient of its logits in their place."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * N
    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(base + column, mask=column < N, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, values)
        # A lane that has seen no value yet has -inf twice, whose difference is not a number.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - shift) + tl.exp(values - shift)
        largest = higher
    top = tl.max(largest)
    sum_all = tl.sum(total * tl.exp(largest - top))
    log_sum = top + tl.log(sum_all)
    target = tl.load(targets + row)
    tl.store(losses + row, log_sum - tl.load(base + target).to(tl.float32))
    if GRADIENT:
        tl.debug_barrier()
        for start in range(0, N, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < N
            values = tl.load(base + column, mask=mask, other=float("-inf")).to(tl.float32)
            found = tl.exp(values - log_sum) - tl.where(column == target, 1.0, 0.0)
            tl.store(base + column, found.to(logits.dtype.element_ty), mask=mask)


@triton.jit
def rotate(
    qkv, out, cos, sin, q_weight, k_weight, period, qkv_stride, out_stride, eps, offset,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotate the queries (second program id 0) or keys (1) of a token, after their norm if there is one.

    PAIRS and HEADS are powers of two above HALF and the number of heads; REST covers the unrotated values, 0 for none.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    count = tl.where(part == 0, QUERIES, KEYS)
    mask = (head < count) & (pair < HALF)
    place = part * QUERIES * SIZE + head * SIZE + pair
    first = tl.load(qkv + token * qkv_stride + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv + token * qkv_stride + place + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if REST > 0:
            other = tl.arange(0, REST)[None, :]
            keep = (head < count) & (other < SIZE - 2 * HALF)
            spot = part * QUERIES * SIZE + head * SIZE + 2 * HALF + other
            rest = tl.load(qkv + token * qkv_stride + spot, mask=keep, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1)
        inverse = (1.0 / tl.sqrt(squares / SIZE + eps))[:, None]
        weight = q_weight if part == 0 else k_weight
        inside = pair < HALF
        first *= inverse * (tl.load(weight + pair, mask=inside, other=0.0).to(tl.float32) + offset)
        second *= inverse * (tl.load(weight + HALF + pair, mask=inside, other=0.0).to(tl.float32) + offset)
        if REST > 0:
            gain = tl.load(weight + 2 * HALF + other, mask=other < SIZE - 2 * HALF, other=0.0).to(tl.float32)
            rest = (rest * inverse * (gain + offset)).to(out.dtype.element_ty)
            tl.store(out + token * out_stride + spot, rest, mask=keep)
    line = (token % period) * HALF
    c = tl.load(cos + line + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + line + pair, mask=pair < HALF, other=0.0)
    turned = (first * c - second * s).to(out.dtype.element_ty)
    other_turned = (second * c + first * s).to(out.dtype.element_ty)
    tl.store(out + token * out_stride + place, turned, mask=mask)
    tl.store(out + token * out_stride + place + HALF, other_turned, mask=mask)


@triton.jit
def rotate_backward(
    gradient, out, cos, sin, raw, weight, period, length, row_stride, token_stride, head_stride, out_stride,
    raw_stride, start, eps, offset,
    COUNT: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotate the gradients of COUNT heads of a token back and write them into packed rows from column `start`.

    HALF is 0 for values, which are not rotated. With NORM, `raw` are the packed rows before the norm.
    """
    token = tl.program_id(0).to(tl.int64)
    source = gradient + (token // length) * row_stride + (token % length) * token_stride
    head = tl.arange(0, HEADS)[:, None]
    target = out + token * out_stride + start
    other = tl.arange(0, REST)[None, :]
    keep = (head < COUNT) & (other < SIZE - 2 * HALF)
    rest = tl.load(source + head * head_stride + 2 * HALF + other, mask=keep, other=0.0).to(tl.float32)
    if HALF > 0:
        pair = tl.arange(0, PAIRS)[None, :]
        mask = (head < COUNT) & (pair < HALF)
        x = tl.load(source + head * head_stride + pair, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(source + head * head_stride + HALF + pair, mask=mask, other=0.0).to(tl.float32)
        line = (token % period) * HALF
        c = tl.load(cos + line + pair, mask=pair < HALF, other=0.0)
        s = tl.load(sin + line + pair, mask=pair < HALF, other=0.0)
        first = x * c + y * s
        second = y * c - x * s
        if NORM:
            before = raw + token * raw_stride + start + head * SIZE
            a = tl.load(before + pair, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(before + HALF + pair, mask=mask, other=0.0).to(tl.float32)
            d = tl.load(before + 2 * HALF + other, mask=keep, other=0.0).to(tl.float32)
            squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(d * d, axis=1)
            inverse = (1.0 / tl.sqrt(squares / SIZE + eps))[:, None]
            inside = pair < HALF
            first *= tl.load(weight + pair, mask=inside, other=0.0).to(tl.float32) + offset
            second *= tl.load(weight + HALF + pair, mask=inside, other=0.0).to(tl.float32) + offset
            gain = tl.load(weight + 2 * HALF + other, mask=other < SIZE - 2 * HALF, other=0.0).to(tl.float32)
            rest *= gain + offset
            a *= inverse
            b *= inverse
            d *= inverse
            along = tl.sum(first * a, axis=1) + tl.sum(second * b, axis=1) + tl.sum(rest * d, axis=1)
            along = (along / SIZE)[:, None]
            first = (first - a * along) * inverse
            second = (second - b * along) * inverse
            rest = (rest - d * along) * inverse
        tl.store(target + head * SIZE + pair, first.to(out.dtype.element_ty), mask=mask)
        tl.store(target + head * SIZE + HALF + pair, second.to(out.dtype.element_ty), mask=mask)
    tl.store(target + head * SIZE + 2 * HALF + other, rest.to(out.dtype.element_ty), mask=keep)


@triton.jit
def activation(gate, KIND: tl.constexpr):
    """Return the activation of the gate and its slope."""
    if KIND == 0:  # silu
        sigmoid = tl.sigmoid(gate)
        active = gate * sigmoid
        slope = sigmoid + active * (1 - sigmoid)
    elif KIND == 1:  # gelu by tanh
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        active = 0.5 * gate * (1 + tanh)
        steep = 0.7978845608028654 * (1 + 0.134145 * gate * gate)
        slope = 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * steep
    else:  # gelu
        below = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
        active = gate * below
        slope = below + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    return active, slope


@triton.jit
def gate_product(
    gate_up, out, packed, scale, out_stride, packed_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Write act(gate) * up of a row, and its e4m3 copy in a second pass."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < N
        gate = tl.load(gate_up + row * 2 * N + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * N + N + column, mask=mask, other=0.0).to(tl.float32)
        active, _slope = activation(gate, KIND)
        product = active * up
        tl.store(out + row * out_stride + column, product.to(out.dtype.element_ty), mask=mask)
        largest = tl.maximum(largest, tl.abs(product))
    if QUANTIZE:
        factor = tl.maximum(tl.max(largest), 1e-12) / 448.0
        tl.store(scale + row, factor)
        tl.debug_barrier()
        for start in range(0, N, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < N
            product = tl.load(out + row * out_stride + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(packed + row * packed_stride + column, (product / factor).to(tl.float8e4nv), mask=mask)


@triton.jit
def gate_backward(
    gradient, gate_up, product, out, columns, packed, scale, gradient_stride, product_stride, out_stride,
    packed_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, REBUILD: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < N
        given = tl.load(gradient + row * gradient_stride + column, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + row * 2 * N + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * N + N + column, mask=mask, other=0.0).to(tl.float32)
        active, slope = activation(gate, KIND)
        if REBUILD:
            rebuilt = (active * up).to(product.dtype.element_ty)
            tl.store(product + row * product_stride + column, rebuilt, mask=mask)
        for_gate = given * up * slope
        for_up = given * active
        tl.store(out + row * out_stride + column, for_gate.to(out.dtype.element_ty), mask=mask)
        tl.store(out + row * out_stride + N + column, for_up.to(out.dtype.element_ty), mask=mask)
        if QUANTIZE:
            for_gate *= tl.load(columns + column, mask=mask, other=0.0)
            for_up *= tl.load(columns + N + column, mask=mask, other=0.0)
            largest = tl.maximum(largest, tl.maximum(tl.abs(for_gate), tl.abs(for_up)))
    if QUANTIZE:
        factor = tl.maximum(tl.max(largest), 1e-12) / 448.0
        tl.store(scale + row, factor)
        tl.debug_barrier()
        for start in range(0, 2 * N, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < 2 * N
            found = tl.load(out + row * out_stride + column, mask=mask, other=0.0).to(tl.float32)
            found *= tl.load(columns + column, mask=mask, other=0.0)
            tl.store(packed + row * packed_stride + column, (found / factor).to(tl.float8e4nv), mask=mask)


@triton.jit
def nf4_words(
    packed, absmax, table, nested_table, nested_absmax, offset, out, row_scales, source, target,
    num_words, out_stride, K, num_rows, num_columns, source_stride, target_stride,
    GROUP: tl.constexpr, NESTED: tl.constexpr, WORDS: tl.constexpr, SCALED: tl.constexpr, COPY: tl.constexpr,
    COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dequantize 4-bit weights, a word of 8 per thread.

    GROUP weights share a scale. With NESTED, a scale is an 8-bit code, and NESTED codes share a scale; launch with
    enable_fp_fusion=False then, since bitsandbytes rounds the product before it adds the offset. With COPY, the last
    programs copy a matrix of num_rows x num_columns, a tile each.
    """
    program = tl.program_id(0)
    num_programs = tl.cdiv(num_words, 2 * WORDS)
    if program < num_programs:
        # Two words: the loads of the second overlap the wait for the first.
        word = program * 2 * WORDS + tl.arange(0, WORDS)
        other = word + WORDS
        bits = tl.load(packed + word, mask=word < num_words, other=0)
        other_bits = tl.load(packed + other, mask=other < num_words, other=0)
        size = _nf4_size(word, num_words, absmax, nested_table, nested_absmax, offset, GROUP, NESTED)
        other_size = _nf4_size(other, num_words, absmax, nested_table, nested_absmax, offset, GROUP, NESTED)
        _write_nf4(word, bits, size, num_words, table, out, out_stride, row_scales, K, WORDS, SCALED)
        _write_nf4(
            other, other_bits, other_size, num_words, table, out, out_stride, row_scales, K, WORDS, SCALED
        )
    elif COPY:
        tile = program - num_programs
        across = tl.cdiv(num_columns, COPY_COLUMNS)
        row = ((tile // across) * COPY_ROWS + tl.arange(0, COPY_ROWS)).to(tl.int64)[:, None]
        column = ((tile % across) * COPY_COLUMNS + tl.arange(0, COPY_COLUMNS))[None, :]
        mask = (row < num_rows) & (column < num_columns)
        found = tl.load(source + row * source_stride + column, mask=mask, other=0.0)
        tl.store(target + row * target_stride + column, found, mask=mask)


@triton.jit
def _nf4_size(
    word, num_words, absmax, nested_table, nested_absmax, offset, GROUP: tl.constexpr, NESTED: tl.constexpr
):  # fmt: skip
    """Return the scale of the weights in each word."""
    inside = word < num_words
    group = word // (GROUP // 8)
    if NESTED > 0:
        code = tl.load(absmax + group, mask=inside, other=0).to(tl.int32)
        size = tl.load(nested_table + code) * tl.load(nested_absmax + group // NESTED, mask=inside, other=0.0)
        size += tl.load(offset)
    else:
        size = tl.load(absmax + group, mask=inside, other=0.0)
    return size


@triton.jit
def _write_nf4(
    word, bits, size, num_words, table, out, out_stride, row_scales, K, WORDS: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    inside = word < num_words
    even = tl.interleave(
        tl.interleave(_nf4(bits, 0, table, size), _nf4(bits, 4, table, size)),
        tl.interleave(_nf4(bits, 2, table, size), _nf4(bits, 6, table, size)),
    )
    odd = tl.interleave(
        tl.interleave(_nf4(bits, 1, table, size), _nf4(bits, 5, table, size)),
        tl.interleave(_nf4(bits, 3, table, size), _nf4(bits, 7, table, size)),
    )
    values = tl.reshape(tl.interleave(even, odd), (WORDS, 8))
    row = word // (K // 8)
    place = row.to(tl.int64) * out_stride + (word - row * (K // 8)) * 8
    if SCALED:
        values = values / tl.load(row_scales + row, mask=inside, other=1.0)[:, None]
    places = place[:, None] + tl.arange(0, 8)[None, :]
    tl.store(out + places, values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _nf4(bits, NUMBER: tl.constexpr, table, size):  # fmt: skip
    """Return weight NUMBER of each word: the high half of each byte comes first."""
    code = (bits >> (8 * (NUMBER // 2) + 4 * (1 - NUMBER % 2))) & 15
    return tl.load(table + code) * size
