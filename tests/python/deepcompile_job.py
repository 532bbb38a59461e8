"""One rank that calls the operators of DeepCompile's ZeRO-3 by hand, and knows what is right."""

import torch
import torch.distributed as dist

GRAPH = 7


class Config:
    double_buffer = True
    symmetric_memory = False
    free_activation_threshold = 0


class Job:
    """One rank's runtime over some parameters, each a tensor that all ranks know whole."""

    def __init__(
        self,
        shapes,
        *,
        dtype=torch.float32,
        grad_dtype=None,
        frozen=(),
        persistent=(),
        bucket=1000,
        config=Config,
        group=None,
    ):
        from penstock import _dc

        self.dc = _dc
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.shapes, self.dtype = shapes, dtype
        _dc.init(group or dist.group.WORLD, config(), bucket)
        self.number = _dc.current()
        # Pieces of one flat tensor, as DeepSpeed has them.
        chunks = [self.chunk(i) for i in range(len(shapes))]
        self.shards = torch.empty(sum(chunks), dtype=dtype).split(chunks)
        self.buffers = []
        for i, shape in enumerate(shapes):
            trainable = i not in frozen
            buffer = torch.full((self.chunk(i) if trainable else 0,), torch.nan, dtype=dtype)
            self.buffers.append(buffer)
            _dc.register_z3_param(i, shape, self.shards[i], buffer, i in persistent, grad_dtype)
        _dc.register_graph_z3(GRAPH, list(range(len(shapes))))
        self.version = 0
        self.write_shards()

    def numel(self, i):
        return torch.Size(self.shapes[i]).numel()

    def chunk(self, i):
        return -(-self.numel(i) // self.world)

    def value(self, i):
        flat = torch.arange(self.numel(i), dtype=torch.float32) % 128 + i + 32 * self.version
        return flat.view(self.shapes[i]).to(self.dtype)

    def sharded(self, i, whole):
        padded = torch.zeros(self.chunk(i) * self.world, dtype=whole.dtype)
        padded[: self.numel(i)] = whole.flatten()
        return padded[self.rank * self.chunk(i) :][: self.chunk(i)]

    def write_shards(self):
        for i, shard in enumerate(self.shards):
            shard.copy_(self.sharded(i, self.value(i)))

    def update(self):
        """Write as an optimizer does it whose writes torch does not count."""
        self.version += 1
        for i, shard in enumerate(self.shards):
            shard.data.copy_(self.sharded(i, self.value(i)))

    def gather(self, i, dtype=None, graph=GRAPH):
        gathered = torch.ops.dc.allgather_param.default(self.shards[i], graph, i, dtype=dtype)
        return torch.ops.dc.wait_allgather.default(gathered, graph, i)

    def use(self, i, dtype=None, graph=GRAPH):
        gathered = self.gather(i, dtype, graph)
        assert gathered.shape == torch.Size(self.shapes[i])
        assert gathered.dtype == (dtype or self.dtype)
        torch.testing.assert_close(gathered, self.value(i).to(gathered.dtype), rtol=0, atol=0)
        self.release(i, graph=graph)
        return gathered

    def release(self, i, users=1, graph=GRAPH):
        return torch.ops.dc.release_param.default(torch.zeros(1), graph, i, users)

    def gradient(self, i, factor):
        return self.value(i).to(torch.float32) * factor * (self.rank + 1)

    def mean(self, i, factor):
        return self.value(i).to(torch.float32) * factor * (self.world + 1) / 2

    def reduce(self, i, factor, graph=GRAPH, dtype=torch.float32):
        done = torch.ops.dc.reduce_grad.default(self.gradient(i, factor).to(dtype), graph, i)
        assert done.numel() == 0
        return done

    def end_backward(self, deps=(), graph=GRAPH, release=True):
        torch.ops.dc.end_backward.default(list(deps) or [None], graph, release)

    def backward(self, factor, *, update, graph=GRAPH):
        self.dc.start_backward(update)
        trainable = [i for i, buffer in enumerate(self.buffers) if buffer.numel() > 0]
        for i in reversed(trainable):
            self.use(i, graph=graph)
        done = [self.reduce(i, factor, graph=graph) for i in reversed(trainable)]
        self.end_backward(done, graph=graph)

    def check_buffer(self, i, expected, tolerance=1e-6):
        torch.testing.assert_close(
            self.buffers[i].float(),
            self.sharded(i, expected),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text: f"parameter {i}: {text}",
        )

    def close(self):
        self.dc.select(self.number)
        self.dc.cleanup()


SHAPES = [(5, 3), (7,), (64, 33), (1,), (3,)]
