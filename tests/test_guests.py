"""Attention by hand and the fused head against the plain functions of model.py that they stand in for."""

@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("shape", [(3, 4, 4, 1, 9), (3, 6, 2, 1, 9), (2, 4, 4, 7, 7), (2, 6, 3, 7, 7), (2, 4, 4, 5, 9)])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "numbers"])
def test_attention_and_its_gradients_are_those_of_its_definition(dtype, bound, shape, kind):
    B, nh, nkv, T, S = shape
    g = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(B, n, t, 8, generator=g, dtype=torch.float64).to(dtype)
                   for n, t in ((nh, T), (nkv, S), (nkv, S), (nh, T)))
    allowed = torch.rand(B, 1, T, S, generator=g) < 0.6
    allowed |= torch.eye(T, S, dtype=torch.bool)
    if kind == "causal":
        allowed = torch.ones(T, S, dtype=torch.bool).tril().expand(B, 1, T, S)
    mask = {"bool": allowed, "numbers": torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -math.inf)}.get(kind)
    x = [y.clone().requires_grad_() for y in (q, k, v)]
    y = attend(*x, mask, kind == "causal", 0.3)
    found = [y, *torch.autograd.grad(y, x, dy)]
    x = [y.double().requires_grad_() for y in (q, k, v)]
    forbidden = torch.zeros_like(allowed) if kind == "none" else ~allowed
    heads = [[(x[0][b, h] @ x[1][b, h * nkv // nh].T * 0.3).masked_fill(forbidden[b, 0], -math.inf).softmax(-1)
              @ x[2][b, h * nkv // nh] for h in range(nh)] for b in range(B)]
    y = torch.stack([torch.stack(row) for row in heads])
    for a, right in zip(found, [y, *torch.autograd.grad(y, x, dy.double())]):
        assert float((a.detach().double() - right.detach()).abs().max()) < bound * max(1, float(right.detach().abs().max()))
