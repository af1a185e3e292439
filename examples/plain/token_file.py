"""Training on a file of tokens, with the loop of many language models: groups, warm-up, clipping, the best model."""

import math
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

# settings; --key=value on the command line changes one
max_iters, warmup_iters, eval_interval, eval_iters = 1000, 50, 100, 10
learning_rate, min_lr, weight_decay, beta1, beta2, grad_clip = 1e-3, 1e-4, 0.1, 0.9, 0.95, 1.0
batch_size, block_size, n_layer, n_embd, gradient_accumulation_steps = 12, 64, 2, 64, 4
data_dir, out, dtype = "tokens", "token_file.pt", "bfloat16"
for word in sys.argv[1:]:
    key, value = word.removeprefix("--").split("=")
    globals()[key] = type(globals()[key])(value)

torch.manual_seed(1337)
train_data, val_data = (
    np.memmap(Path(data_dir, f"{part}.bin"), dtype=np.uint16, mode="r") for part in ("train", "val")
)
ctx = torch.autocast("cpu", dtype=torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def get_batch(data):
    ix = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        layer = nn.TransformerEncoderLayer(n_embd, 4, 4 * n_embd, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.h = nn.TransformerEncoder(layer, n_layer, nn.LayerNorm(n_embd), enable_nested_tensor=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        logits = self.lm_head(self.h(x, mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        no_decay = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch(val_data))[1].item() for _ in range(eval_iters)]
    model.train()
    return sum(losses) / eval_iters


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    rest = 1 - (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + (learning_rate - min_lr) * (1 - math.cos(math.pi * rest)) / 2


model = GPT(int(train_data.max()) + 1)
optimizer = model.configure_optimizers()
iter_num, best_val_loss = 0, 1e9
X, Y = get_batch(train_data)
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        val_loss = estimate_loss()
        print(f"step {iter_num}: val loss {val_loss:.4f}")
        if val_loss < best_val_loss:
            best_val_loss = val_loss
            torch.save({"model": model.state_dict(), "iter_num": iter_num}, f"best-{out}")
    for _micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch(train_data)
        loss.backward()
    if grad_clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num == max_iters:
        break

torch.save(model.state_dict(), out)
