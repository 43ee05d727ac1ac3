"""AdamW with clipping by the global norm.

Kingma, Ba 2014, arXiv 1412.6980, algorithm 1, with the decoupled weight decay of Loshchilov, Hutter 2017, arXiv
1711.05101, algorithm 2 (decay times the learning rate, as in the common implementations). Clipping: Pascanu, Mikolov,
Bengio 2012, arXiv 1211.5063, algorithm 1.
"""

from dataclasses import dataclass, field

import numpy as np

Params = dict[str, np.ndarray]


def global_norm(grads: Params) -> float:
    return float(np.sqrt(sum(float((g * g).sum()) for g in grads.values())))


@dataclass
class AdamW:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # of 2-D parameters only, embeddings among them
    grad_clip: float
    step: int = 0
    m: Params = field(default_factory=dict)
    v: Params = field(default_factory=dict)

    def update(self, params: Params, grads: Params) -> float:
        """Changes params in place; returns the norm of grads before clipping."""
        norm = global_norm(grads)
        scale = self.grad_clip / norm if norm > self.grad_clip else 1.0
        self.step += 1
        for name, p in params.items():
            g = grads[name] * scale
            m = self.m[name] = self.beta1 * self.m.get(name, 0.0) + (1.0 - self.beta1) * g
            v = self.v[name] = self.beta2 * self.v.get(name, 0.0) + (1.0 - self.beta2) * g * g
            mhat = m / (1.0 - self.beta1**self.step)
            vhat = v / (1.0 - self.beta2**self.step)
            decay = self.weight_decay if p.ndim == 2 else 0.0
            p -= self.lr * (mhat / (np.sqrt(vhat) + self.eps) + decay * p)
        return norm
