"""The architectures written out in float64 numpy, one token and one head at a time."""

import math

import jax
import numpy as np


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def norm(model, x, weight):
    weight = 1 + weight if model.zero_centred_norm else weight
    return x / np.sqrt(np.mean(x * x) + model.norm_eps) * weight


def rotate(model, x, position):
    """Pairs (i, i + n/2) of the first n dimensions turn by position * theta ** (-2 i / n)."""
    n = round(len(x) * model.rotary_fraction)
    out = x.copy()
    for i in range(n // 2):
        angle = position * model.rope_theta ** (-2 * i / n)
        a, b = x[i], x[i + n // 2]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + n // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(model, w, xs):
    H, J, K = model.heads, model.kv_heads, model.head_dim
    queries, keys, values, out = [], [], [], []
    for t, x in enumerate(xs):
        q, gates = x @ w["q"], None
        if model.gated_attention:
            per_head = q.reshape(H, 2 * K)
            q, gates = per_head[:, :K], per_head[:, K:]
        q, k = q.reshape(H, K), (x @ w["k"]).reshape(J, K)
        if model.qk_norm:
            q = [norm(model, head, w["q_norm"]) for head in q]
            k = [norm(model, head, w["k_norm"]) for head in k]
        queries.append([rotate(model, head, t) for head in q])
        keys.append([rotate(model, head, t) for head in k])
        values.append((x @ w["v"]).reshape(J, K))
        mixed = []
        for h in range(H):
            j = h // (H // J)
            scores = np.array([queries[t][h] @ keys[s][j] for s in range(t + 1)]) / np.sqrt(K)
            heard = sum(p * values[s][j] for s, p in enumerate(softmax(scores)))
            mixed.append(heard if gates is None else heard * sigmoid(gates[h]))
        out.append(np.concatenate(mixed) @ w["o"])
    return out


def gated_delta(model, w, xs):
    keys, values = model.linear_key_heads, model.linear_value_heads
    dk, dv, width = model.linear_key_dim, model.linear_value_dim, model.conv_width
    before, out = [np.zeros(w["qkv"].shape[1])] * (width - 1), []
    memory = [np.zeros((dk, dv)) for _ in range(values)]
    for x in xs:
        before = [*before, x @ w["qkv"]][-width:]
        mixed = sum(before[i] * w["conv"][:, i] for i in range(width))
        mixed = mixed * sigmoid(mixed)
        q = mixed[: keys * dk].reshape(keys, dk)
        k = mixed[keys * dk : 2 * keys * dk].reshape(keys, dk)
        v = mixed[2 * keys * dk :].reshape(values, dv)
        z, heads = (x @ w["z"]).reshape(values, dv), []
        for h in range(values):
            j = h // (values // keys)
            query = q[j] / np.sqrt(q[j] @ q[j] + 1e-6) / np.sqrt(dk)
            key = k[j] / np.sqrt(k[j] @ k[j] + 1e-6)
            softplus = np.log1p(np.exp(x @ w["a"][:, h] + w["dt_bias"][h]))
            memory[h] = memory[h] * np.exp(-np.exp(w["A_log"][h]) * softplus)
            change = sigmoid(x @ w["b"][:, h]) * (v[h] - key @ memory[h])
            memory[h] = memory[h] + np.outer(key, change)
            o = query @ memory[h]
            o = o / np.sqrt(np.mean(o * o) + model.norm_eps) * w["norm"]
            heads.append(o * z[h] * sigmoid(z[h]))
        out.append(np.concatenate(heads) @ w["out"])
    return out


def mlp(gate_up, down, x):
    gate, up = np.split(gate_up @ x, 2)
    return down @ (gate * sigmoid(gate) * up)


def moe(model, w, x):
    probs = softmax(x @ w["router"])
    chosen = np.argsort(-probs)[: model.experts_per_token]
    total = probs[chosen].sum() if model.renormalise_gates else 1.0
    y = sum(probs[e] / total * mlp(w["gate_up"][e], w["down"][e], x) for e in chosen)
    if model.shared_ffn:
        y = y + sigmoid(x @ w["shared_gate"]) * mlp(w["shared_gate_up"], w["shared_down"], x)
    return y


def logits(model, params, tokens):
    """(T, V) of one sequence."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    layers, used = params["layers"], {}

    def take(name):
        """The next row of a component's stack: layers come in order."""
        row = used[name] = used.get(name, -1) + 1
        return {weight: stack[row] for weight, stack in layers[name].items()}

    xs = [params["embed"][token] for token in tokens]
    for i in range(model.layers):
        h = [norm(model, x, layers["mixer_norm"][i]) for x in xs]
        if i % model.full_attention_every == model.full_attention_every - 1:
            heard = attention(model, take("attention"), h)
        else:
            heard = gated_delta(model, take("linear"), h)
        xs = [x + a for x, a in zip(xs, heard, strict=True)]
        h = [norm(model, x, layers["ffn_norm"][i]) for x in xs]
        if model.experts and i not in model.dense_layers:
            w = take("moe")
            xs = [x + moe(model, w, a) for x, a in zip(xs, h, strict=True)]
        else:
            w = take("mlp")
            xs = [x + mlp(w["gate_up"], w["down"], a) for x, a in zip(xs, h, strict=True)]
    assert all(
        len(next(iter(layers[name].values()))) == last + 1 for name, last in used.items()
    )  # no layer is left over
    head = params.get("head", params["embed"])
    return np.stack([head @ norm(model, x, params["final_norm"]) for x in xs])


def log_probs(model, params, tokens, temperature):
    """log softmax(logits / temperature) of each next token of one sequence."""
    rows = logits(model, params, tokens) / temperature
    return [np.log(softmax(row)[token]) for row, token in zip(rows[:-1], tokens[1:], strict=True)]
