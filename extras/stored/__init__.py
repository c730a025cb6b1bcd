"""
A tape that forms the gradient of each row during the backward, in place of their sum. For CPUs.

That is no more arithmetic than an ordinary backward has. Scores are then the product of a matrix
(rows, weights) with a vector, and a weighted gradient is a sum of its rows. Both cost their
traffic: 4 bytes x rows x weights, written once and read three times.
"""
import functools

import torch
from torch import nn

from common.device import free_memory
from common.script import BadInput
from tape import Tape, add_gradient

FEWEST = 24         # tokens of a completion from which it pays
COLUMNS = 2 ** 17   # of a matrix at a time: what rows are added to (0.5 MB) stays in the cache


class StoredTape(Tape):
    """Stores the gradients of `size` rows of as many parameters as fit into `memory` bytes, and
    records the others as Tape does. pool: {parameter: matrix}, memory that the next tape uses
    again."""

    def __init__(self, model, num_rows, all_reduce=lambda tensors: None, *, size, memory, pool):
        super().__init__(model, num_rows, all_reduce)
        self.order = torch.zeros(0, dtype=torch.long, device=self.device)   # numbers, as stored
        self.stored = {}        # {parameter: (size, weights)}
        self.fresh = set()      # parameters that these rows have not used yet
        for module in self.layers:
            for p in module.parameters(recurse=False):
                # the gradient of a lookup alone is sparse
                is_lookup = isinstance(module, nn.Embedding)
                if is_lookup or p not in self.names or p in self.stored or size * p.nbytes > memory:
                    continue
                memory -= size * p.nbytes
                if p not in pool:
                    pool[p] = torch.empty(size, p.numel(), dtype=p.dtype, device=p.device)
                self.stored[p] = pool[p]

    def rows(self, numbers, owners=None):
        super().rows(numbers, owners)
        self.here = slice(len(self.order), len(self.order) + len(numbers))
        self.order = torch.cat([self.order, self.numbers])
        self.fresh = set(self.stored)

    def check_owners(self):
        super().check_owners()
        for p in self.fresh:                # its memory holds other rows
            self.stored[p][self.here] = 0

    def uses(self, record):
        found = super().uses(record)
        return found if self.summing else [(name, p) for name, p in found if p not in self.stored]

    def keep(self, record):
        if self.uses(record):
            super().keep(record)
        if self.summing:
            return
        for name, p in super().uses(record):
            if p in self.stored:
                g = self.stored[p][self.here]
                self.store(g.view(len(g), *p.shape), p in self.fresh, name, *record)
                self.fresh.discard(p)

    def store(self, g, fresh, name, module, rows, a, b):
        """Adds the gradients of one parameter to g (n, *shape), row by row. fresh: g holds nothing
        of use yet."""
        is_product = isinstance(module, nn.Linear) and name == "weight"
        if is_product and b.dim() == 3 and b.dtype == g.dtype:
            g.baddbmm_(b.mT, a, beta=0 if fresh else 1)
            return
        if fresh:
            g.zero_()
        if b.dim() == 3 and g.dim() == 2:       # bias, or weight of a norm
            g += (b if name == "bias" else b * a).sum(1)
            return
        for total, number in zip(g, self.numbers):
            here = (rows == number).nonzero()[:, 0]
            add_gradient(total, module, name, a[here], b[here])

    def pieces(self):
        """(parameter, some of its columns, what is stored in them (rows, columns)) of all."""
        for p, g in self.stored.items():
            for start in range(0, p.numel(), COLUMNS):
                columns = slice(start, start + COLUMNS)
                yield p, columns, g[:len(self.order), columns]

    def gradient(self, weights):
        total = self.own_gradient(weights)      # of what is not stored
        # row by row: a product would read rows of weight 0 too, which may hold NaN
        factors = weights[self.order].tolist()
        for p, columns, g in self.pieces():
            out = total[p].view(-1)[columns]
            for row, factor in zip(g, factors):
                if factor:
                    out.add_(row, alpha=float(factor))
        return self.over_processes(total)

    def dot(self, G):
        scores = torch.zeros(self.num_rows, dtype=torch.float64, device=self.device)
        for p, columns, g in self.pieces():
            products = g @ G[p].flatten()[columns].to(g)
            scores[self.order] += products.double()
        self.all_reduce([scores])
        return scores + super().dot(G)

    def squared_norms(self, rows, scale={}):
        found = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        asked, place = (rows[:, None] == self.order).nonzero(as_tuple=True)     # of this process
        for p, columns, g in self.pieces():
            squares = g[place].square()
            if p in scale:
                squares = squares * scale[p].flatten()[columns]
            found[asked] += squares.sum(1).double()
        self.all_reduce([found])
        return found + super().squared_norms(rows, scale)       # of what is not stored


def use_stored_tape(nets, cfg):
    """Makes influence store rows' gradients, on a CPU and where rows are long enough for that to
    pay, and says what it costs. The first step of a run holds their sum against an ordinary
    gradient."""
    rows = cfg.mini_batch_size or cfg.num_prompts * cfg.num_generations     # of a step
    weights = sum(p.numel() for p in nets.trained)
    stored = 0.0        # GB
    if nets.device.type == "cpu" and cfg.max_completion_length >= FEWEST:
        stored = min(4 * rows * weights / 2 ** 30, cfg.tracin_memory)
    print(f"influence: {rows} rows x {weights / 1e6:.1f} M weights, {stored:.2f} GB of gradients "
          "are stored")
    free = free_memory(nets.device) / 2 ** 30
    if stored > free:
        raise BadInput(f"tracin_memory = {cfg.tracin_memory:g}: {stored:.1f} GB of gradients are "
                       f"to be stored, and {free:.1f} GB are free; lower it")
    if stored:
        memory = int(cfg.tracin_memory * 2 ** 30)
        nets.influence.new_tape = functools.partial(StoredTape, size=rows, memory=memory, pool={})
