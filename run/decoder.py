"""Decoding with fixed shapes and addresses."""
import copy

import torch
import torch.nn as nn

from run.script import BadInput
from sample import LOOK_EVERY, Rollout, sample


class Decoder:
    """The steps of `decode` with every shape and address fixed, so that a CUDA graph launches one as a whole, where it would be
    some two hundred launches, and torch.compile compiles it once.

        decoder = Decoder(policy, torch.bfloat16)
        generate(policy, ..., decoder=decoder)

    Rows run in buffers of the decoder's own, which it keeps. The cache is read under a mask up to the next multiple of `bucket`
    positions, and the rows that run are halved when half of them have ended: a graph for each pair of the two. In bfloat16
    (under autocast) the Linear weights are copies, refreshed by generate, so that no step casts them. It stays with one model
    and one device. Raises BadInput for graphs of a model that is not on a GPU.
    """

    def __init__(self, model, dtype=torch.float32, compile=False, graphs=True, bucket=64):
        if graphs and not model.wte.weight.is_cuda:
            raise BadInput(f"cuda_graphs = True: the model is on {model.wte.weight.device}, where there are none; set it False")
        self.model, self.copies = model, []
        if dtype == torch.bfloat16:
            self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
            for module in self.model.modules():
                for name, p in list(module.named_parameters(recurse=False)) if isinstance(module, nn.Linear) else ():
                    setattr(module, name, nn.Parameter(p.detach().to(dtype), requires_grad=False))
                    self.copies.append((getattr(module, name), p))
        self.step = torch.compile(decode_step, dynamic=True) if compile else decode_step
        self.graphs, self.bucket, self.states = graphs, bucket, {}
        self.pool, self.captured = None, []  # all that were ever captured: their pool lives as long as they do

    @torch.no_grad()
    def refresh(self):
        """The copies <- the weights as they are now."""
        for mine, p in self.copies:
            mine.copy_(p)

    def state(self, r, prefix, settings):
        """(Rollout, noise, rows, cache, t, P, graphs) for rollouts like r and these settings, the same again while it is wide
        enough."""
        (N, width), T, device = r.tokens.shape, r.mask.shape[1], r.tokens.device
        state = self.states.get((N, T, settings))
        if state is None or state[0].tokens.shape[1] < width:
            self.states[N, T, settings] = state = None  # the buffers are given back before there are wider ones
            width = -(-width // self.bucket) * self.bucket
            own = Rollout(*(None if x is None else torch.zeros_like(x) for x in vars(r).values()))
            own.tokens, own.real = (x.new_zeros(N, width) for x in (r.tokens, r.real))
            cache = prefix.new_zeros(*prefix.shape[:4], width, prefix.shape[5])
            t, P = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
            state = own, torch.zeros(N, T, device=device), torch.arange(N, device=device), cache, t, P, {}
            self.states[N, T, settings] = state
        return state

    def __call__(self, r, prefix, noise, eos, temperature, limits, retire):
        """Tokens 1, 2, ... of the rows r, whose token 0 is drawn. prefix (n_layer, 2, N, nkv, P, hs): prompts' cache."""
        (N, T), P = r.mask.shape, prefix.shape[4]
        own, seeds, rows, cache, t, start, graphs = self.state(r, prefix, (eos, temperature, limits))
        pairs = [(mine[..., :x.shape[-1]], x) for mine, x in zip(vars(own).values(), vars(r).values()) if x is not None]
        for mine, given in [*pairs, (seeds, noise), (cache[:, :, :, :, :P], prefix), (rows, torch.arange(N, device=rows.device))]:
            mine.copy_(given)
        t.fill_(1), start.fill_(P)
        n = N
        for i in range(1, T):
            if retire and i % LOOK_EVERY.get(rows.device.type, 16) == 0:
                ended, before = own.ended[rows[:n]], n
                runs = n - int(ended.sum())
                if runs == 0:
                    break
                while n > 3 and runs <= n // 2:  # not down to one row, for which torch.compile would compile again
                    n //= 2
                if n < before:
                    order = ended.long().argsort(stable=True)[:n]  # those that run first
                    cache[:, :, :n], rows[:n] = cache[:, :, order], rows[order]
            S = -(-(P + i) // self.bucket) * self.bucket
            self.launch(graphs, (n, S), lambda: self.step(
                self.model, own, rows[:n], cache[:, :, :n, :, :S], t, start, seeds, eos, temperature, limits))
        for mine, given in pairs:
            given.copy_(mine)

    def launch(self, graphs, key, step):
        """The step itself the first time, which readies the libraries; from the second on its graph."""
        if not self.graphs or key not in graphs:
            graphs[key] = None
            return step()
        if graphs[key] is None:
            graphs[key], self.pool = self.capture(step)
            self.captured.append(graphs[key])
        graphs[key].replay()

    def capture(self, step):
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                step()
        except RuntimeError as e:
            raise BadInput(f"cuda_graphs = True: a step could not be captured ({str(e).splitlines()[0]}); set it False") from e
        return graph, graph.pool()


def decode_step(model, r, rows, cache, t, P, noise, eos, temperature, limits):
    """Token t of these rows (n,) of r, and t <- t + 1. cache (n_layer, 2, n, nkv, S, hs); t, P (1,)."""
    at = P + t
    h = model(r.tokens[rows, at - 1][:, None], r.real[rows, :cache.shape[4]], cache, at - 1)[:, 0]  # (n, C)
    sample(model.lm_head, h, r, rows, t, at, noise, eos, temperature, limits)
    t += 1
