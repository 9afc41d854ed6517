"""A small CAM++ as an ONNX model, layer by layer as published, with or without folded normalisations."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEAD, GROWTH, BOTTLENECK, EMBEDDING = 4, 4, 8, 12
LAYERS, DILATIONS = (2, 3, 1), (1, 2, 3)
SEGMENT = 100


class Builder:
    """Collects nodes; the same seed gives the same numbers, folded or not."""

    def __init__(self, folded, bins):
        self.folded, self.bins, self.rng = folded, bins, np.random.default_rng(0)
        self.nodes, self.weights = [], []

    def weight(self, x):
        name = f"onnx::Weight_{len(self.weights)}"  # as exporters call what they computed
        self.weights.append(numpy_helper.from_array(np.asarray(x), name))
        return name

    def node(self, op, *inputs, **attributes):
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"{op}_{len(self.nodes)}", **attributes))
        return output

    def ints(self, *values):
        return self.weight(np.array(values, np.int64))

    def normal(self, *shape, scale=0.2):
        return (scale * self.rng.standard_normal(shape)).astype(np.float32)

    def statistics(self, width):
        return [1 + self.normal(width), self.normal(width), self.normal(width), 1 + self.rng.random(width, np.float32)]

    def norm(self, x, width):
        return self.node("BatchNormalization", x, *map(self.weight, self.statistics(width)), epsilon=1e-5)

    def conv(self, x, out, width, kernel, strides=(1,), dilation=1, bias=False, norm=False, squeeze=False):
        """A convolution, and with `norm` the normalisation behind it."""
        kernel = np.broadcast_to(kernel, len(strides)).tolist()
        w = self.normal(out, width, *kernel, scale=(4 / (width * np.prod(kernel)))**0.5)
        b = [self.normal(out)] if bias else []
        stats = self.statistics(out) if norm else None
        if norm and self.folded and not squeeze:
            gamma, beta, mean, variance = stats
            scale = gamma / np.sqrt(variance + np.float32(1e-5))
            w, b = w * scale.reshape(-1, *[1] * (w.ndim - 1)), [beta - mean * scale]
        pads = [(k - 1) // 2 * dilation for k in kernel]
        x = self.node("Conv", x, self.weight(w), *map(self.weight, b), strides=strides, pads=pads * 2,
                      kernel_shape=kernel, dilations=[dilation] * len(kernel))
        if squeeze:
            x = self.node("Squeeze", x, self.ints(2))
        if norm and not (self.folded and not squeeze):
            x = self.node("BatchNormalization", x, *map(self.weight, stats), epsilon=1e-5)
        return x

    def relu(self, x):
        return self.node("Relu", x)

    def residual(self, x, stride):
        y = self.relu(self.conv(x, HEAD, HEAD, 3, (stride, 1), norm=True))
        y = self.conv(y, HEAD, HEAD, 3, (1, 1), norm=True)
        short = self.conv(x, HEAD, HEAD, 1, (stride, 1), norm=True) if stride == 2 else x
        return self.relu(self.node("Add", y, short))

    def dense(self, x, width, dilation, frames):
        h = self.conv(self.relu(self.norm(x, width)), BOTTLENECK, width, 1, norm=True)
        h = self.relu(h)
        local = self.conv(h, GROWTH, BOTTLENECK, 3, dilation=dilation)
        spread = self.pooled(h, frames) if self.folded else self.sliced(h, frames)
        context = self.node("Add", self.node("ReduceMean", h, axes=[-1], keepdims=1), spread)
        context = self.relu(self.conv(context, BOTTLENECK // 2, BOTTLENECK, 1, bias=True))
        mask = self.node("Sigmoid", self.conv(context, GROWTH, BOTTLENECK // 2, 1, bias=True))
        return self.node("Mul", local, mask)

    def pooled(self, h, frames):
        """Means of segments of 100 frames as exporters write them."""
        segments = self.node("AveragePool", h, kernel_shape=[SEGMENT], strides=[SEGMENT], ceil_mode=1)
        spread = self.node("Expand", self.node("Unsqueeze", segments, self.ints(-1)), self.ints(1, 1, 1, SEGMENT))
        return self.node("Slice", self.node("Reshape", spread, self.ints(1, BOTTLENECK, -1)), self.ints(0),
                         self.ints(frames), self.ints(2))

    def sliced(self, h, frames):
        """The same piece by piece: `onnx.reference` pools wrongly where the last segment is shorter."""
        pieces = []
        for start in range(0, frames, SEGMENT):
            stop = min(start + SEGMENT, frames)
            piece = self.node("Slice", h, self.ints(start), self.ints(stop), self.ints(2))
            piece = self.node("ReduceMean", piece, axes=[-1], keepdims=1)
            pieces.append(self.node("Expand", piece, self.ints(1, BOTTLENECK, stop - start)))
        return self.node("Concat", *pieces, axis=2)

    def network(self, frames):
        x = self.node("Unsqueeze", self.node("Transpose", "feats", perm=[0, 2, 1]), self.ints(1))
        x = self.relu(self.conv(x, HEAD, 1, 3, (1, 1), norm=True))
        for stride in (2, 1, 2, 1):
            x = self.residual(x, stride)
        x = self.relu(self.conv(x, HEAD, HEAD, 3, (2, 1), norm=True))
        flat = HEAD * self.bins // 8
        x = self.node("Reshape", x, self.ints(1, flat, frames))
        width, frames = 8, (frames + 1) // 2
        x = self.relu(self.conv(x, width, flat, 5, (2,), norm=True))
        for n, (count, dilation) in enumerate(zip(LAYERS, DILATIONS)):
            for _ in range(count):
                x = self.node("Concat", x, self.dense(x, width, dilation, frames), axis=1)
                width += GROWTH
            x = self.relu(self.norm(x, width))
            x = self.conv(x, width // 2, width, 1, norm=n == len(LAYERS) - 1)
            width //= 2
        x = self.relu(x)
        mean = self.node("ReduceMean", x, axes=[-1], keepdims=1)
        centred = self.node("Sub", x, mean)
        square = self.node("ReduceMean", self.node("Mul", centred, centred), axes=[-1], keepdims=1)
        unbiased = self.node("Mul", square, self.weight(np.float32(frames / (frames - 1))))
        x = self.node("Concat", mean, self.node("Sqrt", unbiased), axis=1)
        return self.conv(x, EMBEDDING, 2 * width, 1, norm=True, squeeze=True)


def model(folded=True, frames=330, bins=16):
    """The model; it runs on `feats` [1, frames, bins]."""
    builder = Builder(folded, bins)
    out = builder.network(frames)
    graph = helper.make_graph(
        builder.nodes, "campplus", [helper.make_tensor_value_info("feats", TensorProto.FLOAT, [1, frames, bins])],
        [helper.make_tensor_value_info(out, TensorProto.FLOAT, [1, EMBEDDING])], builder.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def save(path, folded=True, bins=16):
    """Writes `model` to a file."""
    onnx.save(model(folded, bins=bins), path)
    return path
